"""A view with realistic content, and a real browser to look at it with."""

import asyncio
import base64
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from past_hour import READY, T0, write_past

from agent.timeline import Timeline
from cloud.http_server import bound, url_of
from orchestrator.client import Checkpoint, House
from orchestrator.dashboard.app import create_app, serve
from orchestrator.dashboard.keys import Keys
from orchestrator.events import AnyEvent
from orchestrator.history.reader import History
from orchestrator.paths import Places
from orchestrator.state import State
from orchestrator.view import (
    CostView,
    JobView,
    MachineView,
    PoolView,
    SeatView,
    Sentence,
    ThoughtView,
    View,
)

CALL_S_MAX = 30
# Seconds ago, who, what, and why.
EVENTS = """\
640 | gpt-7f3a | was submitted | examples/gpt.py --steps 4000, at most $1.00
598 | m-19c2 | bought in local/local-a/local.small | $0.031 per slot-hour is the cheapest of 6 pools
521 | m-73aa | will be taken away in 120 s | the provider announced it
520 | m-d41b | bought in local/local-a/local.small | a replacement is ready before m-73aa goes
403 | gpt-7f3a | morphs to 1x3 at step 988 | m-73aa leaves at a step boundary; nothing is computed twice
203 | m-0e77 | is gone | its connection was reset; no notice had been given
203 | gpt-7f3a | morphs to 1x2 at step 1 703 | one worker of three is gone; the step is shared out again
120 | local/local-b/local.small | is avoided for 3 min | it has no machine left to give
31 | m-d41b | will be taken away in 120 s | the provider announced it
6 | m-f6d0 | bought in local/local-c/local.small | $0.034 per slot-hour; replaces m-d41b before it goes
"""


def make_job(**changes: Any) -> JobView:
    """A job in the middle of its run."""
    job = JobView(
        id="gpt-7f3a",
        script="examples/gpt.py",
        script_sha="0" * 64,
        argv=("--steps", "4000"),
        status="RUNNING",
        because="training on 3 workers; a fourth joins at the next step boundary",
        step=2_412,
        steps_total=4_000,
        loss=1.8734,
        step_s=0.231,
        slot_step_s=0.693,
        layout="1x3",
        generation=9,
        workers=3,
        preemptions=4,
        failures=0,
        steps_lost=0,
        machines=4,
        spent_usd=0.184,
        reserved_usd=0.0312,
        now_usd_per_h=0.1556,
        on_demand_usd=0.559,
        saved_usd=0.375,
        budget_usd=1.0,
        submitted_at_s=T0 - 640,
        ended_at_s=None,
        took_s=640.0,
        eta_s=371.0,
        recoveries_s=(0.081, 0.064, 1.92, 0.077),
        backup_step=2_410,
        checkpoint_step=2_180,
        export_uri="",
        state=(("best", "1.8421"), ("epoch", "3"), ("seen", "{'train': 77184, 'held': 4096}")),
        state_count=3,
        state_step=2_411,
        chains=tuple(
            (SeatView(machine=machine, slot=slot, microbatch_s=took_s, slow=slow),)
            for machine, slot, took_s, slow in (
                ("m-19c2", 0, 0.021, 1.0),
                ("m-88e0", 0, 0.022, 1.0),
                ("m-88e0", 1, 0.034, 1.56),
            )
        ),
    )
    return msgspec.structs.replace(job, **changes)


def make_machine(**changes: Any) -> MachineView:
    """A spot machine at work."""
    machine = MachineView(
        id="m-1",
        token="default-2-1",
        job="gpt-7f3a",
        pool="local/local-a/local.small",
        market="spot",
        state="working",
        price_usd_per_h=0.0312,
        on_demand_usd_per_h=0.096,
        cost_usd=0.0051,
        launched_at_s=T0 - 590,
        ended_at_s=None,
        why_bought="$0.031 per slot-hour, the cheapest of 6 pools; the job can use 2 more slots",
        why_ended="",
    )
    return msgspec.structs.replace(machine, **changes)


def make_view(**changes: Any) -> View:
    """A quarter of an hour of a small run: four preemptions, one machine about to go."""
    machines = (
        make_machine(id="m-19c2"),
        make_machine(
            id="m-88e0",
            pool="local/local-b/local.large",
            price_usd_per_h=0.0594,
            on_demand_usd_per_h=0.192,
            cost_usd=0.0083,
        ),
        make_machine(
            id="m-d41b",
            state="noticed",
            launched_at_s=T0 - 402,
            cost_usd=0.0034,
            why_bought="replaces m-73aa, taken away with 120 s of warning",
        ),
        make_machine(
            id="m-f6d0",
            pool="local/local-c/local.small",
            state="booting",
            boot={"admitted": 2.0, "node": 5.0},
            launched_at_s=T0 - 6,
            cost_usd=0.0001,
            price_usd_per_h=0.0338,
            why_bought="replaces m-d41b, which goes at 14:13:42; second cheapest pool",
        ),
        make_machine(
            id="m-73aa",
            state="ended",
            launched_at_s=T0 - 600,
            ended_at_s=T0 - 401,
            cost_usd=0.0017,
            why_ended="taken away by the provider, as announced 120 s before",
        ),
        make_machine(
            id="m-0e77",
            state="ended",
            launched_at_s=T0 - 610,
            ended_at_s=T0 - 203,
            cost_usd=0.0035,
            why_ended="taken away by the provider without notice",
        ),
    )
    pools = tuple(
        PoolView(
            pool=f"local/local-{zone}/local.{size}",
            slots=slots,
            spot_usd_per_h=spot,
            on_demand_usd_per_h=od,
            held=held,
            blocked_until_s=blocked,
            blocked_because="" if blocked is None else "NoCapacity: no machine left",
            evicted_in_1h=0.034,
            spot_usd_per_slot_h=work,
            on_demand_usd_per_slot_h=0.0983,
            spot_room=room,
            on_demand_blocked_until_s=T0 + 70 if room == 0 else None,
            on_demand_blocked_because="QuotaExceeded" if room == 0 else "",
        )
        for zone, size, slots, spot, od, held, blocked, work, room in (
            ("a", "small", 1, 0.0312, 0.096, 2, None, 0.0331, 14),
            ("a", "large", 2, 0.0671, 0.192, 0, None, 0.0356, 7),
            ("b", "small", 1, 0.0402, 0.096, 0, T0 + 130, 0.0427, None),
            ("b", "large", 2, 0.0594, 0.192, 1, None, 0.0315, None),
            ("c", "small", 1, 0.0338, 0.096, 1, None, 0.0359, 1),
            ("c", "large", 2, None, 0.192, 0, None, None, 0),
        )
    )
    events = tuple(
        Sentence(at_s=T0 - int(ago), who=who, what=what, because=because)
        for ago, who, what, because in (line.split(" | ") for line in EVENTS.splitlines())
    )
    done = make_job(
        id="mlp-02cc",
        script="examples/mlp.py",
        status="SUCCEEDED",
        because="all 500 steps are committed",
        step=500,
        steps_total=500,
        loss=0.4119,
        chains=(),
        workers=0,
        layout="1x2",
        preemptions=1,
        spent_usd=0.061,
        machines=0,
        reserved_usd=0.0,
        now_usd_per_h=0.0,
        on_demand_usd=0.183,
        saved_usd=0.122,
        budget_usd=None,
        submitted_at_s=T0 - 2400,
        ended_at_s=T0 - 1710,
        took_s=690.0,
        eta_s=None,
        recoveries_s=(0.071,),
        backup_step=500,
        checkpoint_step=500,
        export_uri=".orchestrator/checkpoints/mlp-02cc/model.safetensors",
    )
    cost = CostView(
        spent_usd=0.2451,
        reserved_usd=0.0312,
        budget_usd=5.0,
        now_usd_per_h=0.1556,
        on_demand_usd=0.7420,
        saved_usd=0.4969,
        manager_usd=0.0,
        machines=4,
    )
    view = View(
        at_s=T0,
        epoch=2,
        deployment="default",
        jobs=(make_job(), done),
        machines=machines,
        pools=pools,
        cost=cost,
        events=events,
        thought=ThoughtView(
            job="gpt-7f3a",
            at_s=T0 - 6,
            because="4 machines for $0.1556/h do 4.329 steps/s, $0.0100 per 1,000 steps; next best: 3 machines for "
            "$0.1244/h do 3.1 steps/s, $0.0111 per 1,000 steps",
        ),
    )
    return msgspec.structs.replace(view, **changes)


async def foretold(_: str) -> bytes:
    """The state of a manager that has no job."""
    from orchestrator.world import encode_state

    return encode_state(State())


class FakeSource:
    """Stands in for the connection to a house: says what the test last put there."""

    def __init__(self, view: View | None) -> None:
        self.now = view
        self.error: Exception | None = None
        self.posted: list[AnyEvent] = []
        self.lines: list[tuple[str, str, str]] = []
        self.stored: list[Checkpoint] = []
        self.asked: list[str] = []
        self.recorded: Timeline | None = None

    def view(self) -> View | None:
        if self.error:
            raise self.error
        return self.now

    def house(self) -> House:
        return House(
            pid=1,
            redis_url="",
            dashboard_url="",
            ray_address="",
            local_cloud="",
            deployment="default",
            started_at_s=T0,
        )

    def post(self, event: AnyEvent) -> None:
        self.posted.append(event)

    def has_script(self, sha: str) -> bool:
        return True

    def checkpoints(self, job: str) -> list[Checkpoint]:
        return self.stored

    def ask_timeline(self, job: str) -> None:
        self.asked.append(job)

    def timeline(self, job: str) -> Timeline | None:
        return self.recorded

    def profile(self, job: str) -> None:
        return None

    def last_lines(self, job: str, before: str, count: int) -> list[tuple[str, str, str]]:
        return [line for line in self.lines if not before or line[0] < before][-count:]


class Browser:
    """Chromium, spoken to over a pipe with its own debugging protocol."""

    def __init__(self, binary: str, profile: Path) -> None:
        commands, self._write = os.pipe()
        self._read, answers = os.pipe()
        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--disable-dev-shm-usage",
        ]
        launch = f"import os, sys; os.dup2({commands}, 103); os.dup2({answers}, 104); os.dup2(103, 3); os.dup2(104, 4); os.execv(sys.argv[1], sys.argv[1:])"
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                launch,
                binary,
                *flags,
                "--remote-debugging-pipe",
                f"--user-data-dir={profile}",
                "about:blank",
            ],
            env={**os.environ, "TMPDIR": str(profile)},
            pass_fds=(commands, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self._buffer, self._calls, self._session = b"", 0, None
        self.complaints: list[str] = []
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(one["targetId"] for one in targets if one["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        self._calls += 1
        message = {"id": self._calls, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._calls:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            if answer["method"] in {"Runtime.exceptionThrown", "Log.entryAdded"}:
                self.complaints.append(json.dumps(answer["params"]))

    def _next(self) -> Any:
        while b"\0" not in self._buffer:
            data = os.read(self._read, 1 << 20)
            assert data, "the browser has ended"
            self._buffer += data
        first, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(first)

    @contextmanager
    def other_tab(self) -> Iterator[None]:
        """Until the end of the block, everything is about a second tab of the same browser."""
        first, self._session = self._session, None
        made = self.call("Target.createTarget", url="about:blank")["targetId"]
        try:
            self._session = self.call("Target.attachToTarget", targetId=made, flatten=True)[
                "sessionId"
            ]
            yield
        finally:
            self._session = None
            self.call("Target.closeTarget", targetId=made)
            self._session = first

    def run(self, script: str) -> Any:
        answer = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def wait_for(self, condition: str) -> None:
        """Until an expression is true on the page; the browser watches, nobody sleeps."""
        self.run(
            "new Promise((resolve, reject) => {"
            f"const end = Date.now() + {CALL_S_MAX * 1000};"
            f"const look = () => {{ if ({condition}) resolve(true);"
            " else if (Date.now() > end) reject(new Error('never true: ' + document.body.innerText));"
            " else setTimeout(look, 20); }; look(); })"
        )

    def shape(self, width: int, height: int, *, dark: bool = False, scale: float = 1) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self) -> bytes:
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def close(self) -> None:
        os.close(self._write)
        self._process.terminate()
        self._process.wait(10)
        os.close(self._read)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    binary = shutil.which("chromium") or shutil.which("chromium-browser")
    if binary is None:
        pytest.skip("needs the program `chromium` (Debian: apt install chromium)")
    started = Browser(binary, tmp_path_factory.mktemp("chromium"))
    yield started
    started.close()


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    source, listening = FakeSource(make_view()), bound("127.0.0.1", 0)
    keys = Keys(tmp_path_factory.mktemp("keys") / "dashboard.token")
    url = f"{url_of(listening)}/"
    over, loops = asyncio.Event(), list[asyncio.AbstractEventLoop]()
    places = Places(tmp_path_factory.mktemp("history"))
    app = create_app(lambda: source, keys, History.open(places), 0.02, foretold)

    async def run() -> None:
        loops.append(asyncio.get_running_loop())
        await serve(app, listening, over)

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    yield SimpleNamespace(url=url, source=source, keys=keys, places=places)
    loops[0].call_soon_threadsafe(over.set)
    thread.join(30)


@pytest.fixture
def house(served: SimpleNamespace) -> SimpleNamespace:
    """The dashboard served for real: its address, its link with a new key, and its source."""
    source = served.source
    source.now, source.error = make_view(), None
    source.posted, source.lines = [], []
    source.stored, source.asked, source.recorded = [], [], None
    write_past(served.places)
    served.key = served.keys.make("admin")
    served.link = f"{served.url}#key={served.key}"
    return served


@pytest.fixture
def page(browser: Browser, house: SimpleNamespace) -> Iterator[Browser]:
    """The page, opened by its link and showing its first view."""
    browser.shape(1280, 900)
    browser.complaints.clear()
    browser.open("about:blank")
    browser.open(house.link)
    browser.wait_for(READY)
    yield browser
    browser.run("document.querySelectorAll('dialog').forEach(one => one.close())")


@pytest.fixture
def make() -> SimpleNamespace:
    """The makers of views, for tests that change a part."""
    makers: dict[str, Callable[..., Any]] = {
        "view": make_view,
        "job": make_job,
        "machine": make_machine,
    }
    return SimpleNamespace(**makers, at_s=T0, source=FakeSource)
