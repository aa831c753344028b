"""Who may do what: every route of the OpenAPI document, asked with every kind of key."""

import time
from contextlib import ExitStack

import httpx
import pytest
from msgspec.structs import replace

from cloud import private
from orchestrator.dashboard import guard
from orchestrator.dashboard.api import LINES_MAX, LINES_SEARCHED_MAX, PAGES_OF_A_KEY_MAX
from orchestrator.dashboard.guard import BURST, CHANGE_COST, PER_S, Pace
from orchestrator.dashboard.keys import KEPT_MAX, SESSIONS_MAX, Keys
from orchestrator.events import JobCancelled, JobChanged, JobResumed

PARAMETERS = {"job": "gpt-7f3a", "cause": "useful"}
BODIES = {
    "/api/jobs/{job}/bounds": {"budget_usd": 2.0},
    "/api/jobs/{job}/resume-from": {"step": 40},
    "/api/drill": {"nodes": 1},
}


@pytest.fixture
def caller(house):
    with httpx.Client(base_url=house.url) as client:
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def session(caller: httpx.Client, key: str) -> dict[str, str]:
    """The headers of a page that has exchanged its key; the client has the cookie."""
    caller.cookies.clear()
    answer = caller.post("/api/session", headers=bearer(key))
    assert answer.status_code == 200
    return {"X-Page-Token": answer.json()["token"]}


def routes(caller: httpx.Client, key: str) -> list[tuple[str, str]]:
    document = caller.get("/api/openapi.json", headers=bearer(key)).json()
    return [(path, method) for path, methods in document["paths"].items() for method in methods]


def status(caller: httpx.Client, path: str, method: str, **words) -> int:
    """The answer's code; a stream is not read to its end, because it has none."""
    body = {"json": BODIES.get(path)} if method == "post" else {}
    with caller.stream(method, path.format(**PARAMETERS), **body, **words) as answer:
        return answer.status_code


def expired(house, role: str) -> str:
    return house.keys.make(role, -1.0)


def test_every_route_of_the_document_with_every_kind_of_key(house, caller):
    """No key, a wrong one and an expired one open nothing; read-only reads; admin does everything, as a bearer and as a
    session."""
    known = routes(caller, house.key)
    paths = {path for path, _ in known}
    assert {"/api/view", "/api/stream", "/api/session", "/api/drill", "/api/openapi.json"} <= paths
    for path, method in known:
        wrong = [{}, bearer("wrong"), bearer(expired(house, "admin")), {"X-Page-Token": "0" * 64}]
        wrong += [{"Authorization": f"Basic {house.key}"}, {"Authorization": house.key}]
        wrong += [
            {"Cookie": f"page_{httpx.URL(house.url).port}={house.key}", "X-Page-Token": house.key}
        ]
        for headers in wrong:
            assert status(caller, path, method, headers=headers) == 401, (path, method, headers)
        assert status(caller, path, method, params={"key": house.key}) == 401
        changes = method != "get" and path != "/api/session"
        for role in ("read-only", "admin"):
            for kind in (bearer, lambda key: session(caller, key)):
                got = status(caller, path, method, headers=kind(house.keys.make(role)))
                caller.cookies.clear()
                if path == "/metrics" and kind is not bearer:
                    assert got == 401, "it is for programs; the cookie is for the API"
                    continue
                refused = changes and role == "read-only"
                assert (got == 403) is refused, (path, method, role, got)
                assert got not in (401, 405, 429, 500), (path, method, role, got)
    assert all(isinstance(event, JobCancelled | JobChanged) for event in house.source.posted)


def test_a_path_that_is_none_tells_a_stranger_nothing(house, caller):
    for path in ("/nowhere", "/docs", "/static/", "/openapi.json", "/view"):
        assert caller.get(path).status_code == 401
        assert caller.get(path, headers=bearer(house.key)).status_code == 404


def test_a_method_that_a_path_does_not_know_is_told_those_that_it_does(house, caller):
    answer = caller.delete("/api/view", headers=bearer(house.key))
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET")
    assert caller.post("/api/jobs/gpt-7f3a/logs", headers=bearer(house.key)).status_code == 405


def test_only_the_exchange_sets_a_cookie(house, caller):
    """It is hidden from scripts, for this site and the API alone, and bears the port in its name."""
    for path in ("/", f"/?key={house.key}", "/api/view", "/api/session"):
        assert "set-cookie" not in caller.get(path, headers=bearer(house.key)).headers
    made = caller.post("/api/session", headers=bearer(house.key)).headers["set-cookie"]
    words = {word.strip() for word in made.split(";")}
    assert {"HttpOnly", "SameSite=strict", "Path=/api"} <= words
    assert made.startswith(f"page_{httpx.URL(house.url).port}=")
    assert house.key not in made


def test_each_half_of_a_session_opens_nothing(house, caller):
    """A browser sends the cookie to every port of the address: who hears it there has half a key."""
    headers = session(caller, house.key)
    assert caller.get("/api/view", headers=headers).status_code == 200
    cookie = caller.cookies.get(f"page_{httpx.URL(house.url).port}")
    token = headers["X-Page-Token"]
    assert caller.get("/api/view").status_code == 401
    for key in (cookie, token, f"{cookie}.{token}"):
        assert caller.get("/api/view", headers=bearer(key)).status_code == 401
    caller.cookies.clear()
    assert caller.get("/api/view", headers=headers).status_code == 401
    other = session(caller, house.key)["X-Page-Token"]
    assert caller.get("/api/view", headers={"X-Page-Token": token}).status_code == 401
    assert caller.get("/api/view", headers={"X-Page-Token": other}).status_code == 200


def test_sessions_of_a_key_share_what_the_key_may_have_open(house, caller, monkeypatch):
    """A read-only key that opens session after session gets no more streams, and asks no faster."""
    access = house.keys.opened_by(house.keys.make("read-only"))
    name = f"page_{httpx.URL(house.url).port}"

    def opened() -> dict[str, str]:
        made = house.keys.exchange(access)
        return {"X-Page-Token": made.token, "Cookie": f"{name}={made.cookie}"}

    with ExitStack() as open_now:
        asked = [
            open_now.enter_context(caller.stream("GET", "/api/stream", headers=opened()))
            for _ in range(PAGES_OF_A_KEY_MAX + 2)
        ]
        assert [one.status_code for one in asked] == [200] * PAGES_OF_A_KEY_MAX + [503] * 2
        other = caller.stream("GET", "/api/stream", headers=bearer(house.key))
        assert open_now.enter_context(other).status_code == 200
    first, second = opened(), opened()
    path = "/api/jobs/nobody/what-if"
    monkeypatch.setattr(guard, "PER_S", 1e-6)  # or a slow machine would never ask too often
    assert any(caller.get(path, headers=first).status_code == 429 for _ in range(int(BURST)))
    assert caller.get(path, headers=second).status_code == 429


def test_a_key_has_a_bounded_number_of_sessions(tmp_path):
    keys = Keys(tmp_path / "dashboard.token")
    access = keys.opened_by(keys.make("read-only"))
    made = [keys.exchange(access) for _ in range(SESSIONS_MAX + 1)]
    assert [keys.opened_by(one.key) is None for one in made] == [True] + [False] * SESSIONS_MAX
    assert keys.opened_by(made[-1].key).root == access.sha256


def test_a_session_that_is_left_opens_nothing_any_more(house, caller):
    headers = session(caller, house.key)
    assert caller.post("/api/session", headers=headers).status_code == 409
    cookie = "; ".join(f"{name}={value}" for name, value in caller.cookies.items())
    assert caller.delete("/api/session", headers=headers).status_code == 200
    assert caller.get("/api/view", headers={**headers, "Cookie": cookie}).status_code == 401
    assert caller.get("/api/view", headers=bearer(house.key)).status_code == 200


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"Origin": "http://127.0.0.1:1"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
        ({"Origin": "OWN"}, 200),
    ],
)
def test_another_site_makes_the_browser_do_nothing(house, caller, headers, expected):
    """Not even with the right session, and another port is another site."""
    own = {key: value.replace("OWN", house.url.rstrip("/")) for key, value in headers.items()}
    opened = session(caller, house.key)
    path = "/api/jobs/gpt-7f3a/cancel"
    assert caller.post(path, headers={**opened, **own}).status_code == expected
    assert caller.get("/api/view", headers={**opened, **own}).status_code == expected
    assert len(house.source.posted) == (1 if expected == 200 else 0)


def test_only_hashes_lie_on_the_disk_and_sessions_end_with_the_house(tmp_path):
    path = tmp_path / "dashboard.token"
    keys = Keys(path)
    key = keys.make("read-only")
    made = keys.exchange(keys.opened_by(key))
    for secret in (key, made.cookie, made.token):
        assert secret not in path.read_text()
    assert path.stat().st_mode & 0o077 == 0
    again = Keys(path)
    assert again.opened_by(made.key).role == "read-only"
    Keys(path).begin()
    assert again.opened_by(made.key) is None
    assert again.opened_by(key).role == "read-only"


def test_a_key_that_an_earlier_version_kept_opens_nothing(tmp_path):
    """The file is replaced by one of hashes."""
    path = tmp_path / "dashboard.token"
    private.write(path, b"f" * 64)
    Keys(path).begin()
    assert "f" * 64 not in path.read_text()
    assert Keys(path).opened_by("f" * 64) is None
    assert Keys(path).opened_by(Keys(path).make("admin")).role == "admin"


def test_a_session_lasts_no_longer_than_its_key(tmp_path):
    keys = Keys(tmp_path / "dashboard.token")
    access = keys.opened_by(keys.make("admin", 60.0))
    assert keys.exchange(access).access.until_s == access.until_s
    longest = keys.opened_by(keys.make("admin"))
    assert keys.exchange(longest).access.until_s < longest.until_s


def test_the_file_of_keys_is_bounded_and_keys_outlast_sessions(tmp_path):
    path = tmp_path / "dashboard.token"
    keys = Keys(path)
    key = keys.make("admin")
    access = keys.opened_by(key)
    with keys._changed() as kept:
        kept += [replace(access, sha256=f"{n:064}", session=True) for n in range(2 * KEPT_MAX)]
    assert len(keys._read()) == KEPT_MAX
    assert keys.opened_by(key) is not None


def test_a_key_may_ask_only_so_often():
    """A burst, then a steady pace; a change costs more; one key in a hurry holds up no other."""
    now = [0.0]
    pace = Pace(lambda: now[0])
    assert all(pace.wait_s("a", 1.0) == 0.0 for _ in range(int(BURST)))
    assert pace.wait_s("a", 1.0) == pytest.approx(1 / PER_S)
    assert pace.wait_s("b", CHANGE_COST) == 0.0
    now[0] += CHANGE_COST / PER_S
    assert pace.wait_s("a", CHANGE_COST) == 0.0
    assert pace.wait_s("a", CHANGE_COST) > 0.0


def test_who_asks_too_often_is_answered_with_the_time_to_wait(house, caller):
    headers = bearer(house.key)
    answers = (caller.post("/api/jobs/nobody/cancel", headers=headers) for _ in range(1000))
    late = next(one for one in answers if one.status_code == 429)
    assert late.headers["retry-after"] == "1"
    assert caller.get("/api/session", headers=bearer(house.keys.make("read-only"))).is_success


# --- what a change would do, and does ------------------------------------------------------------


def test_a_change_is_explained_before_it_is_made(house, caller, make):
    """The question posts nothing, the change posts what the command line would, under the name of the page."""
    headers = bearer(house.key)
    said = caller.get("/api/jobs/gpt-7f3a/cancel", headers=headers).json()
    assert said["would"].startswith(
        "A checkpoint is written at step 2,412 or later, and 4 machines"
    )
    assert house.source.posted == []
    done = caller.post("/api/jobs/gpt-7f3a/cancel", headers=headers).json()
    assert done == {"would": said["would"], "done": True}
    [event] = house.source.posted
    assert (event.job, event.by) == ("gpt-7f3a", "the page")
    assert abs(event.at_s - time.time()) < 60


def test_another_budget_and_deadline(house, caller, make):
    """What stays is kept, 0 takes a bound away, and what is owed already cannot be taken back."""
    headers = bearer(house.key)
    path = "/api/jobs/gpt-7f3a/bounds"
    house.source.now = make.view(jobs=(make.job(eta_s=3600.0),))
    said = caller.get(path, params={"budget_usd": 0.3}, headers=headers).json()["would"]
    assert "at $0.1556/h; its last step is expected at $0.3396, so it would be stopped" in said
    said = caller.get(path, params={"budget_usd": 2}, headers=headers).json()["would"]
    assert "within the budget" in said
    assert "It has no deadline." in said
    refused = caller.post(path, json={"budget_usd": 0.1}, headers=headers)
    assert refused.status_code == 409
    assert "has spent or reserved $0.2152, more than $0.1000" in refused.json()["error"]
    assert caller.post(
        path, json={"budget_usd": 0, "deadline_s": time.time() + 3600}, headers=headers
    ).is_success
    [event] = house.source.posted
    assert (event.budget_usd, event.job) == (None, "gpt-7f3a")
    assert event.deadline_s > time.time()


def test_what_cannot_be_done_is_refused_with_its_reason(house, caller, make):
    headers = bearer(house.key)
    for what, path, word in [
        (409, "/api/jobs/gpt-7f3a/resume", "is RUNNING; only what failed"),
        (409, "/api/jobs/mlp-02cc/cancel", "has ended already"),
        (404, "/api/jobs/nobody/cancel", "no job"),
        (409, "/api/drill", "local cloud is off"),
        (404, "/api/jobs/gpt-7f3a/explode", "Not Found"),
    ]:
        got = caller.post(path, headers=headers, json={})
        assert (got.status_code, word in got.json()["error"]) == (what, True), got.text
    assert house.source.posted == []
    house.source.now = make.view(jobs=(make.job(status="FAILED", ended_at_s=make.at_s),))
    said = caller.post("/api/jobs/gpt-7f3a/resume", headers=headers).json()["would"]
    assert said.endswith("it goes on from step 2,412. Its budget has $0.8160 left.")
    assert isinstance(house.source.posted[0], JobResumed)


@pytest.mark.parametrize(
    ("what", "body"),
    [
        ("jobs/gpt-7f3a/bounds", {"budget_usd": True}),
        ("jobs/gpt-7f3a/resume-from", {"step": True}),
        ("drill", {"nodes": True}),
    ],
)
def test_truth_is_no_number(house, caller, what, body):
    """Taken as one, it would be a dollar, a step or a machine that nobody has named."""
    got = caller.post(f"/api/{what}", headers=bearer(house.key), json=body)
    assert (got.status_code, "are no numbers" in got.json()["error"]) == (422, True), got.text
    assert house.source.posted == []


def test_the_last_lines_of_a_log_are_found_by_a_word(house, caller):
    house.source.lines = [
        (f"{n}-0", "w-1", f"step {n} loss {n / 7:.3f}") for n in range(1000, 1900)
    ]
    headers = bearer(house.key)
    path = "/api/jobs/gpt-7f3a/logs"
    all_of_it = caller.get(path, headers=headers).json()
    assert (len(all_of_it["lines"]), all_of_it["more"]) == (500, True)
    assert all_of_it["lines"][-1] == {
        "id": "1899-0",
        "worker": "w-1",
        "line": "step 1899 loss 271.286",
    }
    found = caller.get(path, params={"contains": "STEP 1004"}, headers=headers).json()
    assert [line["id"] for line in found["lines"]] == ["1004-0"]
    earlier = caller.get(path, params={"before": "1003-0"}, headers=headers).json()
    assert (len(earlier["lines"]), earlier["more"]) == (3, False)
    for no_place in ("9" * 20, "5-" + "9" * 20, "\N{ARABIC-INDIC DIGIT FIVE}", "5\n", "-"):
        refused = caller.get(path, params={"before": no_place}, headers=headers)
        assert (refused.status_code, "before" in refused.json()["error"]) == (422, True)


def test_a_search_reads_the_newest_first_and_no_more_than_it_needs(house, caller, monkeypatch):
    """Looking for what is everywhere reads one page; for what is nowhere, a bounded number."""
    read = []

    def last_lines(job, before, count):
        newest = int(before.partition("-")[0]) if before else 10**9
        read.append(count)
        return [(f"{n}-0", "w-1", "step") for n in range(newest - count, newest)]

    monkeypatch.setattr(house.source, "last_lines", last_lines)
    path, headers = "/api/jobs/gpt-7f3a/logs", bearer(house.key)
    found = caller.get(path, params={"contains": "STEP"}, headers=headers).json()
    assert (len(found["lines"]), found["more"]) == (LINES_MAX, True)
    assert found["lines"][-1]["id"] == f"{10**9 - 1}-0"
    assert sum(read) <= 2 * LINES_MAX
    read.clear()
    assert caller.get(path, params={"contains": "x"}, headers=headers).json()["lines"] == []
    assert sum(read) == LINES_SEARCHED_MAX
