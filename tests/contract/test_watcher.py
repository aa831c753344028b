"""The watcher that runs in production, against both dialects, on good days and bad ones."""

import asyncio
import json
import queue
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from running_cloud import POOLS, RunningCloud, request, until
from scripted_metadata import Answer, scripted

from agent.machine.notices import EC2_ACTION, EC2_REBALANCE, EC2_TOKEN, Watcher
from cloud.clock import Clock, VirtualClock
from cloud.model import Machine, Notice

AT = "2026-01-02T03:04:05Z"
AT_S = 1767323045.0
HTTP_AT = "Fri, 02 Jan 2026 03:04:05 GMT"


def patient(machine_id: str, url: str, clock: Clock | None = None) -> Watcher:
    """A watcher that bears with a machine that has a lot to do."""
    return Watcher(machine_id, url, clock=clock, timeout_s=20.0)


def preempt(**changes: object) -> dict[str, object]:
    said = {"EventId": "E-1", "EventType": "Preempt", "Resources": ["vm-1"], "NotBefore": HTTP_AT}
    return {**said, **changes}


class Ec2:
    """EC2's service with whatever it has to say; a session token lasts until it is changed."""

    def __init__(self) -> None:
        self.token = "token-1"
        self.says: dict[str, Answer] = {}

    def __call__(self, method: str, path: str, headers: dict[str, str]) -> Answer:
        if (method, path) == ("PUT", EC2_TOKEN):
            return 200, self.token
        if headers.get("x-aws-ec2-metadata-token") != self.token:
            return 401, ""
        return self.says.get(path, (404, ""))


class Azure:
    """Azure's service with these events."""

    def __init__(self) -> None:
        self.events: list[dict[str, object]] = []

    def __call__(self, method: str, path: str, headers: dict[str, str]) -> Answer:
        if headers.get("metadata") != "true" or not path.startswith("/metadata/scheduledevents"):
            return 404, ""
        return 200, json.dumps({"DocumentIncarnation": 1, "Events": self.events})


# Against the local cloud


def bought(running: RunningCloud, dialect: str) -> tuple[Machine, str]:
    async def buy() -> Machine:
        provider = running.provider()
        (machine,) = await provider.launch(request(f"t-{dialect}", POOLS[dialect]))
        await provider.close()
        return machine

    machine = asyncio.run(buy())
    return machine, running.metadata_url(machine)


def drilled(running: RunningCloud, warning_s: float, only_hint: bool = False) -> list[str]:
    async def drill() -> list[str]:
        provider = running.provider()
        taken = await provider.drill(warning_s=warning_s, nodes="all", only_hint=only_hint)
        await provider.close()
        return taken

    return asyncio.run(drill())


@pytest.mark.processes
@pytest.mark.parametrize("dialect", ["ec2", "azure"])
@pytest.mark.parametrize("warning_s", [120, 30])
def test_a_warning_reaches_the_watcher(running: RunningCloud, dialect: str, warning_s: int):
    """The deadline is the one that the cloud gave, to the second and never later; it is told once."""
    machine, url = bought(running, dialect)
    watcher = patient(machine.id, url)
    assert watcher.poll() is None
    assert (watcher.dialect, watcher.failures) == (dialect, 0)
    before_s = time.time()
    assert drilled(running, warning_s) == [machine.id]
    after_s = time.time()
    notice = watcher.poll()
    assert notice is not None
    assert (notice.machine_id, notice.kind) == (machine.id, "terminate")
    assert before_s + warning_s - 1 <= notice.deadline_s <= after_s + warning_s
    assert watcher.poll() is None


@pytest.mark.processes
def test_no_warning_is_silence_and_no_crash(running: RunningCloud):
    """A machine that goes at once says nothing; its watcher counts the silence."""
    machine, url = bought(running, "ec2")
    watcher = patient(machine.id, url)
    watcher.poll()
    drilled(running, 0)
    until("the metadata service to be gone", lambda: watcher.poll() is None and watcher.failures)


@pytest.mark.processes
def test_a_hint_is_told_and_a_notice_after_it_too(running: RunningCloud):
    """A rebalance hint comes first, once; when the machine does go, that is told as well."""
    machine, url = bought(running, "ec2")
    watcher = patient(machine.id, url)
    drilled(running, 0, only_hint=True)
    hint = watcher.poll()
    assert hint is not None
    assert hint.kind == "rebalance"
    assert watcher.poll() is None
    drilled(running, 120)
    notice = watcher.poll()
    assert notice is not None
    assert notice.kind == "terminate"


@pytest.mark.processes
def test_azure_does_not_wait_for_a_machine_that_is_ready(running: RunningCloud):
    """An acknowledged event takes the machine at once, long before its deadline."""
    machine, url = bought(running, "azure")
    watcher = patient(machine.id, url)
    assert not watcher.acknowledge()
    drilled(running, 600)
    assert watcher.poll() is not None
    watcher.acknowledge()
    until("the machine to be gone", lambda: running.init_of(machine.id) is None)


@pytest.mark.processes
def test_a_watch_gives_an_idle_azure_machine_up_early(running: RunningCloud):
    """As long as somebody works there it stays; idle, it is gone long before its deadline."""
    machine, url = bought(running, "azure")
    watcher, stop, told = patient(machine.id, url), threading.Event(), queue.SimpleQueue[Notice]()
    asked, idle = threading.Semaphore(0), threading.Event()

    def is_idle() -> bool:
        asked.release()
        return idle.is_set()

    watching = threading.Thread(target=watcher.watch, args=(told.put, stop, 0.01, is_idle))
    watching.start()
    try:
        drilled(running, 600)
        assert told.get(timeout=60).machine_id == machine.id
        for _ in range(3):
            assert asked.acquire(timeout=60)
        assert running.init_of(machine.id) is not None
        idle.set()
        until("the machine to be gone", lambda: running.init_of(machine.id) is None)
    finally:
        stop.set()
        watching.join(60)
    assert told.empty()


# Against scripted services


def test_an_acknowledged_event_is_acknowledged_once_and_ec2_is_never_bothered():
    """Azure hears one request for its event; EC2, which knows no such thing, is only asked."""
    azure, ec2 = Azure(), Ec2()
    azure.events = [preempt()]
    ec2.says[EC2_ACTION] = (200, json.dumps({"action": "terminate", "time": AT}))
    for service, posts in ((azure, 1), (ec2, 0)):
        seen: list[str] = []

        def answer(method: str, path: str, headers: dict[str, str], service=service, seen=seen):
            seen.append(method)
            return service(method, path, headers)

        with scripted(answer) as url:
            machine_id = "vm-1" if service is azure else "i-1"
            watcher, stop = patient(machine_id, url), threading.Event()

            def idle(seen=seen, stop=stop) -> bool:
                return True

            def enough(seen=seen) -> bool:
                return seen.count("GET") >= 8

            watching = threading.Thread(
                target=watcher.watch, args=(lambda _: None, stop, 0.005, idle)
            )
            watching.start()
            until("some looks", enough)
            stop.set()
            watching.join(60)
        assert seen.count("POST") == posts


def test_a_watch_tells_from_its_own_thread_and_stops_when_told():
    """`watch` hands every notice over once and ends soon after its stop is set."""
    service, told, stop = Ec2(), queue.SimpleQueue[Notice](), threading.Event()
    service.says[EC2_REBALANCE] = (200, json.dumps({"noticeTime": AT}))
    with scripted(service) as url:
        watcher = patient("i-1", url)
        thread = threading.Thread(target=watcher.watch, args=(told.put, stop, 0.01))
        thread.start()
        first = told.get(timeout=20)
        service.says[EC2_ACTION] = (200, json.dumps({"action": "terminate", "time": AT}))
        second = told.get(timeout=20)
        stop.set()
        thread.join(20)
    assert first == Notice(machine_id="i-1", kind="rebalance", deadline_s=AT_S)
    assert second == Notice(machine_id="i-1", kind="terminate", deadline_s=AT_S)
    assert told.empty()
    assert not thread.is_alive()


def test_a_new_deadline_is_told_again():
    """A notice whose time has changed is news."""
    service = Ec2()
    with scripted(service) as url:
        watcher = patient("i-1", url)
        for at in (AT, AT, "2026-01-02T03:04:00Z"):
            service.says[EC2_ACTION] = (200, json.dumps({"action": "stop", "time": at}))
            last = watcher.poll()
    assert last == Notice(machine_id="i-1", kind="terminate", deadline_s=AT_S - 5)


def test_an_expired_session_token_is_renewed():
    """A 401 costs one more request, and no notice."""
    service = Ec2()
    with scripted(service) as url:
        watcher = patient("i-1", url)
        watcher.poll()
        service.token = "token-2"
        service.says[EC2_ACTION] = (200, json.dumps({"action": "terminate", "time": AT}))
        assert watcher.poll() is not None
        assert watcher.failures == 0


def test_events_that_do_not_concern_the_machine_are_left_out():
    """Azure names every machine of a set, and a freeze takes nothing away."""
    service = Azure()
    service.events = [preempt(Resources=["vm-2"]), preempt(EventType="Freeze")]
    with scripted(service) as url:
        watcher = patient("vm-1", url)
        assert watcher.poll() is None
        assert watcher.dialect == "azure"
        service.events.append(preempt())
        assert watcher.poll() == Notice(machine_id="vm-1", kind="terminate", deadline_s=AT_S)


@pytest.mark.parametrize("kind", ["Preempt", "Terminate", "Reboot", "Redeploy"])
def test_an_event_that_takes_the_memory_takes_the_machine(kind: str):
    """A machine that starts again has lost its workers, as one that is taken away has."""
    service = Azure()
    service.events = [preempt(EventType=kind)]
    with scripted(service) as url:
        notice = patient("vm-1", url).poll()
    assert notice == Notice(machine_id="vm-1", kind="terminate", deadline_s=AT_S)


def test_the_first_call_to_azure_has_patience_and_no_other_has():
    """Azure switches its events on at the first call, which may take two minutes."""
    service, asked, ready = Azure(), threading.Event(), threading.Event()
    service.events = [preempt()]

    def slow(method: str, path: str, headers: dict[str, str]) -> Answer:
        if method == "GET":
            asked.set()
            ready.wait(30)
        return service(method, path, headers)

    heard: list[Notice | None] = []
    with scripted(slow) as url:
        watcher = Watcher("vm-1", url, timeout_s=1.0)
        thread = threading.Thread(target=lambda: heard.append(watcher.poll()))
        thread.start()
        assert asked.wait(20)
        thread.join(1.5)
        assert thread.is_alive()
        ready.set()
        thread.join(20)
        assert [notice.kind for notice in heard if notice] == ["terminate"]
        ready.clear()
        assert watcher.poll() is None
        assert watcher.failures == 1
        ready.set()


def test_an_event_that_has_started_is_due_now():
    """Azure leaves the time blank then; it is told once, with the time of the machine."""
    service = Azure()
    service.events = [preempt(NotBefore="")]
    with scripted(service) as url:
        watcher = patient("vm-1", url, VirtualClock(77.0))
        assert watcher.poll() == Notice(machine_id="vm-1", kind="terminate", deadline_s=77.0)
        assert watcher.poll() is None


def test_of_several_events_the_one_that_comes_first_counts():
    """A reboot that is planned for later hides no eviction, and holds again if that is withdrawn."""
    service = Azure()
    later = preempt(EventId="E-0", EventType="Reboot", NotBefore="Fri, 02 Jan 2026 03:19:05 GMT")
    with scripted(service) as url:
        watcher = patient("vm-1", url, VirtualClock(77.0))
        for events, deadline_s in (
            ([later], AT_S + 900),
            ([later, preempt()], AT_S),
            ([later, preempt(NotBefore="")], 77.0),
            ([later], AT_S + 900),
        ):
            service.events = events
            notice = Notice(machine_id="vm-1", kind="terminate", deadline_s=deadline_s)
            assert watcher.poll() == notice


def test_an_event_that_was_withdrawn_and_came_again_is_told_again():
    """A second event has an id of its own."""
    service = Azure()
    with scripted(service) as url:
        watcher = patient("vm-1", url)
        service.events = [preempt()]
        assert watcher.poll() is not None
        service.events = []
        assert watcher.poll() is None
        assert not watcher.acknowledge()
        service.events = [preempt(EventId="E-2")]
        assert watcher.poll() is not None


GARBAGE = [
    (200, ""),
    (200, "<html>busy</html>"),
    (200, "[]"),
    (200, '{"action": 7}'),
    (200, "{" * 70_000),
    (429, ""),
    (500, "oops"),
    (503, ""),
]


@pytest.mark.parametrize("answer", GARBAGE, ids=lambda answer: f"{answer[0]} {answer[1][:8]}")
def test_nonsense_is_counted_and_asked_again(answer: Answer):
    """Whatever EC2's service says instead of a notice, the watcher does not raise, and hears the next."""
    service = Ec2()
    with scripted(service) as url:
        watcher = patient("i-1", url)
        service.says[EC2_ACTION] = answer
        assert [watcher.poll(), watcher.poll()] == [None, None]
        assert watcher.failures == 2
        service.says[EC2_ACTION] = (200, json.dumps({"action": "terminate", "time": AT}))
        assert watcher.poll() is not None
        assert watcher.failures == 0


@pytest.mark.parametrize("body", ["", "null", '{"Events": null}', '{"Events": [{}]}', "\udcff"])
def test_nonsense_from_azure_is_counted_too(body: str):
    """A document that is not one of scheduled events is no notice and no crash."""
    service = Azure()

    def script(method: str, path: str, headers: dict[str, str]) -> Answer:
        status, said = service(method, path, headers)
        return status, body.encode("utf-8", "replace").decode() if broken else said

    broken = False
    with scripted(script) as url:
        watcher = patient("vm-1", url)
        watcher.poll()
        broken = True
        assert watcher.poll() is None
        assert watcher.failures == 1


def test_a_time_that_nobody_can_read_is_a_notice_all_the_same():
    """The machine goes; the watcher takes it as due now rather than not at all."""
    service = Ec2()
    service.says[EC2_ACTION] = (200, json.dumps({"action": "terminate", "time": "soon"}))
    with scripted(service) as url:
        watcher = patient("i-1", url, VirtualClock(77.0))
        notice = watcher.poll()
    assert notice == Notice(machine_id="i-1", kind="terminate", deadline_s=77.0)


@pytest.fixture
def hanging() -> Iterator[str]:
    """A service that takes connections and never answers."""
    listener = socket.create_server(("127.0.0.1", 0))
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    listener.close()


def test_a_service_that_hangs_costs_a_time_out_and_no_more(hanging: str):
    """A poll of a service that never answers ends by itself, and so does a watch that is told to stop."""
    watcher, stop = Watcher("i-1", hanging, timeout_s=0.05), threading.Event()
    assert watcher.poll() is None
    assert watcher.failures == 1
    thread = threading.Thread(target=watcher.watch, args=(lambda _: None, stop, 0.01))
    thread.start()
    until("some polls to have failed", lambda: watcher.failures > 3)
    stop.set()
    thread.join(20)
    assert not thread.is_alive()


def test_nothing_that_listens_is_no_crash():
    """On a machine without any metadata service the watcher goes on asking."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    watcher = Watcher("i-1", f"http://127.0.0.1:{port}")
    assert [watcher.poll(), watcher.poll()] == [None, None]
    assert (watcher.failures, watcher.dialect) == (2, None)


def test_where_it_asks_comes_from_the_environment():
    """SPOT_METADATA_URL if set, the clouds' own address if not; anything else is refused by name."""
    Watcher.of_this_machine({"SPOT_MACHINE_ID": "i-1"})
    with scripted(Ec2()) as url:
        watcher = Watcher.of_this_machine({"SPOT_MACHINE_ID": "i-1", "SPOT_METADATA_URL": url})
        watcher.poll()
        assert watcher.dialect == "ec2"
    with pytest.raises(ValueError, match="SPOT_METADATA_URL"):
        Watcher.of_this_machine({"SPOT_METADATA_URL": "file:///etc/passwd"})


def test_the_machines_own_end_is_a_notice(tmp_path: Path):
    """Its dead man announces it by a file; it is told once, and the cloud is not asked any more."""
    sign = tmp_path / "ends"
    with scripted(Ec2()) as url:
        variables = {"SPOT_MACHINE_ID": "i-1", "SPOT_METADATA_URL": url, "SPOT_END_SIGN": str(sign)}
        watcher = Watcher.of_this_machine(variables)
        assert watcher.poll() is None
        sign.touch()
        notice = watcher.poll()
        assert notice is not None
        assert (notice.machine_id, notice.kind) == ("i-1", "terminate")
        assert watcher.poll() is None
