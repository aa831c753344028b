"""The dashboard as a server: who may look, what is sent, and what happens when the house is away."""

import asyncio
import json

import httpx
import msgspec
import pytest
import redis
from starlette.routing import Route

from orchestrator.client import NotRunning
from orchestrator.dashboard.app import create_app
from orchestrator.dashboard.feed import POINTS_MAX, SERIES_MAX, Feed, Series
from orchestrator.dashboard.guard import Guard
from orchestrator.view import View


@pytest.fixture
def app(make):
    source = make.source(make.view())
    return create_app(lambda: source, make.token, period_s=0.01)


@pytest.fixture
def stranger(house):
    """Somebody who can connect, and has no token."""
    with httpx.Client(base_url=house.url) as client:
        yield client


def status(client: httpx.Client, path: str, **kwargs) -> int:
    """The answer's code; a stream is not read to its end, for it has none."""
    with client.stream("GET", path, **kwargs) as response:
        return response.status_code


def test_every_route_needs_the_token(house, make, app):
    """All but the page's own files: no token and a wrong token get 401, the right one 200. An address is no place for it."""
    paths = [route.path for route in app.routes if isinstance(route, Route)]
    shown = [path for path in paths if path == "/" or path.startswith("/static/")]
    assert {*paths} - {*shown} == {"/view", "/events"}
    assert {"/", "/static/page.js", "/static/style.css"} <= set(shown)
    wrong = [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Basic {make.token}"},
        {"Authorization": make.token},
        {"Authorization": "Bearer"},
        {"Cookie": f"orchestrator={make.token}; token={make.token}"},
        {"Authorization": "Bearer \xe4\xff"},
    ]
    with httpx.Client(base_url=house.url) as client:
        for path in ["/view", "/events", "/nowhere", "/docs", "/static/", "/static/../view"]:
            for headers in wrong:
                raw = [(k.encode(), v.encode("latin-1")) for k, v in headers.items()]
                assert status(client, path, headers=raw) == 401, (path, headers)
            assert status(client, path, params={"token": make.token}) == 401
        for path in paths:
            headers = {"Authorization": f"Bearer {make.token}"} if path not in shown else {}
            assert status(client, path, headers=headers) == 200, path
        assert status(client, "/nowhere", headers={"Authorization": f"Bearer {make.token}"}) == 404


def test_no_answer_sets_a_cookie(stranger, make):
    """A browser would send it to every port of this machine, so to the pages of other users too."""
    for path in ("/", f"/?token={make.token}", "/view"):
        headers = {"Authorization": f"Bearer {make.token}"}
        assert "set-cookie" not in stranger.get(path, headers=headers).headers


def test_a_token_that_can_be_guessed_is_refused():
    """An empty or short token would be no protection."""
    with pytest.raises(ValueError, match="31 characters, not 32"):
        Guard(None, "x" * 31)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", 200), ("127.0.0.1:8000", 200), ("localhost:8000", 200), ("LOCALHOST", 200),
        ("[::1]:8000", 200), ("127.0.40.1:1", 200), ("evil.example", 400), ("127.0.0.1.evil.example", 400),
        ("localhost.evil.example:8000", 400), ("10.0.0.5:8000", 400), ("127.0.0.1@evil.example", 400),
        ("", 400), ("127.0.0.1:80:80", 400), ("127.0.0.1:x", 400), ("0.0.0.0:8000", 400),
    ],
)  # fmt: skip
def test_only_names_of_this_machine_are_answered(stranger, make, host, expected):
    """A site that rebinds its name to 127.0.0.1 sends its own name, and gets nothing."""
    headers = {"Host": host, "Authorization": f"Bearer {make.token}"}
    assert stranger.get("/view", headers=headers).status_code == expected


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_changed_through_the_page(stranger, make, method):
    """Every method but reading is refused, even with the token."""
    headers = {"Authorization": f"Bearer {make.token}"}
    assert stranger.request(method, "/view", headers=headers).status_code == 405


def test_every_answer_carries_the_protective_headers(stranger):
    """Refusals and redirects too: no script but ours, no frame, no cache, no referrer."""
    for path in ("/", "/nowhere", "/static/page.js"):
        headers = stranger.get(path).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
        assert headers["referrer-policy"] == "no-referrer"


def test_the_page_has_no_inline_script_and_no_foreign_address(stranger, make):
    """It works offline and under a policy without exceptions."""
    headers = {"Authorization": f"Bearer {make.token}"}
    page = stranger.get("/", headers=headers).text
    assert '<script type="module" src="/static/page.js"></script>' in page
    assert page.count("<script") == 1
    assert " style=" not in page
    for path in ("/", "/static/page.js", "/static/style.css"):
        text = stranger.get(path, headers=headers).text
        assert "https://" not in text
        assert "innerHTML" not in text


def messages(lines, wanted: int) -> list[dict]:
    found = []
    for line in lines:
        if line.startswith("data: "):
            found.append(json.loads(line.removeprefix("data: ")))
            if len(found) == wanted:
                break
    return found


def read_up_to_now(lines, house) -> None:
    """One reader serves all tests: the page may be shown first what another test has put there."""
    while True:
        [message] = messages(lines, 1)
        view = message["view"] and msgspec.json.decode(json.dumps(message["view"]), type=View)
        if view == house.source.now and not message["away"]:
            return


def test_changes_are_pushed_over_one_stream(house, make):
    """A page gets what is now, then what changes, and the losses seen so far."""
    headers = {"Authorization": f"Bearer {make.token}"}
    with (
        httpx.Client(base_url=house.url, headers=headers) as client,
        client.stream("GET", "/events") as answer,
    ):
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.iter_lines()
        read_up_to_now(lines, house)
        house.source.now = make.view(jobs=(make.job(step=2500, loss=1.5),))
        [message] = messages(lines, 1)
        assert message["view"]["jobs"][0]["step"] == 2500
        assert message["losses"]["gpt-7f3a"] == [[2412, 1.8734], [2500, 1.5]]
        assert msgspec.json.decode(json.dumps(message["view"]), type=View) == house.source.now


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (NotRunning("nothing is running here; start it with: orchestrator up"), "orchestrator up"),
        (redis.ConnectionError("connection refused"), "connection refused"),
    ],
)
def test_a_house_that_is_away_is_said_and_survived(house, make, error, text):
    """The page keeps what was last seen, says why it stands still, and goes on by itself."""
    headers = {"Authorization": f"Bearer {make.token}"}
    with (
        httpx.Client(base_url=house.url, headers=headers) as client,
        client.stream("GET", "/events") as answer,
    ):
        lines = answer.iter_lines()
        read_up_to_now(lines, house)
        house.source.error = error
        [away] = messages(lines, 1)
        assert text in away["away"]
        assert away["view"] is not None
        house.source.error = None
        assert messages(lines, 1)[0]["away"] == ""


def test_a_loss_that_is_not_a_number_does_not_break_the_stream(make):
    """JSON has no NaN; the page gets null."""
    feed = Feed(lambda: None)
    feed._take(make.view(jobs=(make.job(loss=float("nan")),)))
    asyncio.run(feed._show(""))
    message = json.loads(feed.message)
    assert message["view"]["jobs"][0]["loss"] is None
    assert message["losses"]["gpt-7f3a"] == [[2412, None]]


def test_history_is_bounded_and_keeps_both_ends():
    """However long a job runs, a curve has at most so many points, and the first and last are right."""
    series = Series()
    for x in range(10 * POINTS_MAX):
        series.add("job", x, x / 2)
    points = series.points["job"]
    assert len(points) <= POINTS_MAX
    assert points[0] == (0, 0.0)
    assert points[-1] == (10 * POINTS_MAX - 1, (10 * POINTS_MAX - 1) / 2)
    for i in range(2 * SERIES_MAX):
        series.add(f"job-{i}", 0, 0)
    assert len(series.points) <= SERIES_MAX


def test_a_job_that_goes_back_draws_no_loop():
    """After a rewind the curve continues from the earlier step."""
    series = Series()
    for x in (1, 2, 3, 4, 2):
        series.add("job", x, 10 - x)
    assert series.points["job"] == [(1, 9), (2, 8)]
