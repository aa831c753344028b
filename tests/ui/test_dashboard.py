"""The dashboard as a server: who may look, what is sent, and what happens when the house is away."""

import asyncio
import json

import httpx
import msgspec
import pytest
import redis

from orchestrator.client import NotRunning
from orchestrator.dashboard.feed import Feed
from orchestrator.view import View


@pytest.fixture
def stranger(house):
    """Somebody who can connect, and has no token."""
    with httpx.Client(base_url=house.url) as client:
        yield client


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", 200),
        ("127.0.0.1:8000", 200),
        ("localhost:8000", 200),
        ("LOCALHOST", 200),
        ("[::1]:8000", 200),
        ("127.0.40.1:1", 200),
        ("evil.example", 400),
        ("127.0.0.1.evil.example", 400),
        ("localhost.evil.example:8000", 400),
        ("10.0.0.5:8000", 400),
        ("127.0.0.1@evil.example", 400),
        ("", 400),
        ("127.0.0.1:80:80", 400),
        ("127.0.0.1:x", 400),
        ("0.0.0.0:8000", 400),
    ],
)
def test_only_names_of_this_machine_are_answered(stranger, house, host, expected):
    """A site that rebinds its name to 127.0.0.1 sends its own name, and gets nothing."""
    headers = {"Host": host, "Authorization": f"Bearer {house.key}"}
    assert stranger.get("/api/view", headers=headers).status_code == expected


def test_every_answer_carries_the_protective_headers(stranger):
    """Refusals and redirects too: no script but ours, no frame, no cache, no referrer."""
    for path in ("/", "/nowhere", "/static/page.js"):
        headers = stranger.get(path).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
        assert headers["referrer-policy"] == "no-referrer"


def test_the_page_has_no_inline_script_and_no_foreign_address(stranger, house):
    """It works offline and under a policy without exceptions."""
    headers = {"Authorization": f"Bearer {house.key}"}
    page = stranger.get("/", headers=headers).text
    assert '<script type="module" src="/static/page.js"></script>' in page
    assert page.count("<script") == page.count('<script src="/static/') + 1
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
    """A page gets what is now, then what changes."""
    headers = {"Authorization": f"Bearer {house.key}"}
    with (
        httpx.Client(base_url=house.url, headers=headers) as client,
        client.stream("GET", "/api/stream") as answer,
    ):
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.iter_lines()
        read_up_to_now(lines, house)
        house.source.now = make.view(jobs=(make.job(step=2500, loss=1.5),))
        [message] = messages(lines, 1)
        assert message["view"]["jobs"][0]["step"] == 2500
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
    headers = {"Authorization": f"Bearer {house.key}"}
    with (
        httpx.Client(base_url=house.url, headers=headers) as client,
        client.stream("GET", "/api/stream") as answer,
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
    feed.view = make.view(jobs=(make.job(loss=float("nan")),))
    asyncio.run(feed._show(""))
    message = json.loads(feed.message)
    assert message["view"]["jobs"][0]["loss"] is None


def test_prometheus_reads_the_present_with_a_read_only_key(house):
    """The numbers are those of the view; while the manager is away there is one number that says so."""
    headers = {"Authorization": f"Bearer {house.keys.make('read-only')}"}
    with httpx.Client(base_url=house.url, headers=headers) as client:
        shown = client.get("/metrics")
        assert shown.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert "spot_up 1" in shown.text
        assert "0.2451" in shown.text
        house.source.error = ConnectionError("nothing is running")
        with client.stream("GET", "/api/stream") as answer:
            lines = answer.iter_lines()
            while not messages(lines, 1)[0]["away"]:
                pass
        assert "spot_up 0" in client.get("/metrics").text
