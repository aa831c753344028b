"""Kill and stop every kind of process of a house while it trains: does anything get lost?

    python benchmarks/campaign.py [--kills 30] [--runs 1] [--seed 1] [--steps 400] [--folder DIR]

A run is one real house on the local cloud, in a folder that it makes. First a job (examples/gpt.py) is left in peace;
then the same job is trained, again and again, while processes are killed: one at a time with recovery awaited, in
pairs, in a storm that waits for nothing, and stopped (SIGSTOP) for 8 to 28 s. At the end of a run these are compared:
the weights, bit for bit; the cloud's books with the manager's ledger, its launch intents and tokens; and what is left
after `down`. Printed for each kind: the longest time without a committed step, and the sentences of the slowest.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import redis

from agent.keeper.storage.memory_log import root_of
from agent.keys import JOURNAL, commit_key
from cloud.local.books import Page
from orchestrator.actions import AnyAction, Launch
from orchestrator.client import Client, NotRunning
from orchestrator.events import JobSpec, JobSubmitted, ShutdownAsked
from orchestrator.paths import Places
from orchestrator.redis_client import connect
from orchestrator.supervisor import processes

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "gpt.py"
PATIENCE_S = 150.0
DOWN_S = 60.0
STORM = 5  # kills in one
STORM_PAUSE_S = (0.1, 2.0)
STOP_S = (8.0, 28.0)
WINK_S = 0.02  # between two looks at the step
LOOK_S = 0.3  # between two looks at the processes
COMMITS_AFTER = 2
SETTLED_STEPS = 50  # after so many, fewer workers are what the manager wants
SLOTS = 3
USD_APART = 1e-4  # of one machine: it ends a moment before the manager hears of it

CONFIG = """\
[manager]
state_dir = "state"
deployment = "campaign"

[budget]
total_usd = 10.0

[local]
seed = 11
"""

FORKS = "-m agent.machine.fork_server"
KINDS = {  # what a command line has to contain, and what it must not
    "manager": ("ray::ManagerActor", ""),
    "redis": ("redis-server", ""),
    "keeper": ("ray::KeeperActor", ""),
    "fork server": (FORKS, ""),
    "worker": (FORKS, ""),  # a fork of the one before, so it has the same words
    "agent": ("ray::AgentActor", ""),
    "machine init": ("cloud.local.machine_init", "ray_head"),
    "raylet of a machine": ("raylet/raylet", "--head"),
    "raylet of the head": ("raylet/raylet", ""),
    "gcs": ("gcs_server", ""),
    "ray head": ("supervisor.ray_head", "machine_init"),
    "local cloud": ("-m cloud.local ", ""),
    "house": ("-m orchestrator.supervisor --config", ""),
}


class Stuck(Exception):  # noqa: N818 - it names what happened
    """Something did not come back in time."""


def until(what: str, look: Callable[[], Any], patience_s: float = PATIENCE_S) -> Any:
    deadline_s = time.monotonic() + patience_s
    while time.monotonic() < deadline_s:
        with contextlib.suppress(redis.RedisError, NotRunning, OSError):
            if found := look():
                return found
        time.sleep(0.01)
    raise Stuck(f"waited {patience_s:.0f} s in vain for {what}")


def words_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _is_of(kind: str, line: str, above: str) -> bool:
    """Whether a process with this command line, and this one of its parent, is of a kind."""
    needed, barred = KINDS[kind]
    if needed == FORKS and (FORKS in above) != (kind == "worker"):
        return False
    if "raylet" in kind and ("--head" in line) != (kind == "raylet of the head"):
        return False
    return needed in line and not (barred and barred in line)


class House:
    """One house, killed and started again."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder, self.places = folder, Places(folder / "state")
        (folder / "orchestrator.toml").write_text(CONFIG)
        self.process: subprocess.Popen[bytes] | None = None
        self._store = redis.Redis(unix_socket_path=str(self.places.redis_socket), socket_timeout=1)
        self.up()

    def up(self) -> None:
        words = [
            "-m",
            "orchestrator.supervisor",
            "--config",
            str(self.folder / "orchestrator.toml"),
        ]
        self.process = processes.start(
            [sys.executable, *words],
            env={**os.environ, processes.MARK: self.places.identity},
            log=self.folder / "house.log",
        )

    def client(self) -> Client:
        return Client.connect(self.places.state_dir)

    def pids(self) -> dict[str, list[int]]:
        """The live processes of each kind."""
        found: dict[str, list[int]] = {kind: [] for kind in KINDS}
        for pid in processes.marked(self.places.identity):
            with contextlib.suppress(OSError):
                line, above = words_of(pid), words_of(parent_of(pid))
                for kind in KINDS:
                    if _is_of(kind, line, above):
                        found[kind].append(pid)
        return found

    def step(self, job: str) -> int:
        """The newest committed step, as Redis has it; -1 while it is away."""
        with contextlib.suppress(redis.RedisError):
            said: Any = self._store.hget(commit_key(job), "step")
            return int(said or 0)
        return -1

    def job(self, name: str) -> Any:
        view = self.client().view()
        return next((job for job in view.jobs if job.id == name), None) if view else None

    def submit(self, name: str, steps: int) -> None:
        client = until("the house", self.client)
        sha = client.put_script(EXAMPLE.read_bytes())
        argv = ("--steps", str(steps), "--eval-every", "1000000")
        spec = JobSpec(
            job=name, script="gpt.py", script_sha=sha, argv=argv, slots_max=SLOTS, haste=1000.0
        )
        client.post(JobSubmitted(at_s=time.time(), spec=spec))

    def ended(self, name: str) -> Any:
        def look() -> Any:
            job = self.job(name)
            return job if job is not None and job.ended_at_s is not None else None

        return until(f"the end of {name}", look, 600.0)

    def down(self) -> None:
        self.client().post(ShutdownAsked(at_s=time.time(), by="the campaign"))
        assert self.process is not None
        self.process.wait(DOWN_S)

    def close(self) -> None:
        if self.process is not None:
            processes.end(self.process, 20.0)
        processes.sweep(self.places.identity)
        self._store.close()
        self.places.remove_links()


class Campaign:
    """The kills of one run; what it finds wrong is in `violations`."""

    def __init__(self, house: House, seed: int, steps: int) -> None:
        self.house, self.steps = house, steps
        self.dice = random.Random(seed)
        self.taken: dict[str, list[tuple[float, list[str]]]] = defaultdict(list)
        self.done = self.jobs = 0
        self.violations: list[str] = []
        self.peaceful = ""
        self.killed_at = 0  # the step that was committed then
        self.bag: list[str] = []

    def run(self, kills: int) -> None:
        self.house.submit("in-peace", self.steps)
        self.peaceful = self.house.ended("in-peace").export_uri
        self._next_job()
        while self.done < kills:
            if self._is_over():
                self._compare()
                self._next_job()
            self._calm()
            mode = self.dice.choices(("alone", "stop", "pair", "storm"), (6, 1, 2, 1))[0]
            try:
                getattr(self, f"_{mode}")()
            except Stuck as error:
                self.violations.append(f"after {mode}, kill {self.done}: {error}")
                show(f"  {self.violations[-1]}")
                return
        self.house.ended(self.name)
        self._compare()
        self._look_at_money()
        self.house.down()
        self._look_for_leftovers()

    @property
    def name(self) -> str:
        return f"job-{self.jobs}"

    def _next_job(self) -> None:
        self.jobs, self.killed_at = self.jobs + 1, 0
        self.house.submit(self.name, self.steps)
        until("its first steps", lambda: self.house.step(self.name) > 2)

    def _calm(self) -> None:
        """Wait until as many workers are there as there shall be, or the job is over.

        On a busy machine a change of layout may cost more than it brings, so one worker goes on.
        """
        until("the house to be whole", self._is_calm)

    def _is_calm(self) -> bool:
        job = self.house.job(self.name)
        if job is None or job.ended_at_s is not None:
            return job is not None
        settled = self.house.step(self.name) >= self.killed_at + SETTLED_STEPS
        enough = job.workers >= (1 if settled else SLOTS - 1)
        return enough and all(self.house.pids().values())

    def _is_over(self) -> bool:
        job = until("the job in the view", lambda: self.house.job(self.name))
        return job.ended_at_s is not None

    # --- kills ------------------------------------------------------------------------------------

    def _kind(self) -> str:
        """Each kind once, in any order, before one comes a second time."""
        if not self.bag:
            self.bag = list(KINDS)
            self.dice.shuffle(self.bag)
        return self.bag.pop()

    def _kill(self, kind: str) -> None:
        pids = self.house.pids()[kind]
        if not pids:
            return
        self.killed_at = max(self.killed_at, self.house.step(self.name))
        show(f"      kill {self.done + 1}: {kind}")
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.dice.choice(pids), signal.SIGKILL)
        self.done += 1
        if kind == "house":
            self.house.up()

    def _timed(self, what: str, act: Callable[[], None]) -> None:
        """Do it, and note the longest time without a committed step until all is whole again.

        The step that was about to be committed may still come after the kill, so the next one alone
        would say nothing.
        """
        begun_s = last_s = looked_s = time.time()
        step, pause_s, commits, calm = self.house.step(self.name), 0.0, 0, False
        act()
        while not (calm and commits >= COMMITS_AFTER):
            time.sleep(WINK_S)
            now_s, newest = time.time(), self.house.step(self.name)
            pause_s = max(pause_s, now_s - last_s)
            if newest > step:
                step, last_s, commits = newest, now_s, commits + calm
            if not calm and now_s > looked_s + LOOK_S:
                with contextlib.suppress(redis.RedisError, NotRunning, OSError):
                    calm, looked_s = self._is_calm(), time.time()
                    if calm and self._is_over():
                        return
            if calm and now_s > last_s + 5.0 and self._is_over():
                return
            if now_s > last_s + PATIENCE_S:
                raise Stuck(f"no step for {PATIENCE_S:.0f} s since {what}")
        said = self.house.client().sentences(f"{int(1000 * begun_s)}")
        lines = [f"{s.at_s - begun_s:6.2f} {s.who} {s.what}: {s.because}" for _, s in said]
        self.taken[what].append((pause_s, [line for line in lines if line[:6].strip()[0] != "-"]))
        whole_s = time.time() - begun_s
        show(f"  {self.done:3} {what}: {pause_s:.2f} s without a step, whole after {whole_s:.1f} s")

    def _alone(self) -> None:
        kind = self._kind()
        self._timed(kind, lambda: self._kill(kind))

    def _pair(self) -> None:
        pair = self._kind(), self._kind()
        label = "a pair with cloud or house" if {*pair} & {"local cloud", "house"} else "a pair"
        show(f"      {pair[0]} + {pair[1]}")
        self._timed(label, lambda: [self._kill(kind) for kind in pair] and None)

    def _storm(self) -> None:
        def storm() -> None:
            for _ in range(STORM):
                self._kill(self._kind())
                time.sleep(self.dice.uniform(*STORM_PAUSE_S))

        self._timed("a storm", storm)

    def _stop(self) -> None:
        kind, stop_s = self.dice.choice([*KINDS]), self.dice.uniform(*STOP_S)
        pid = self.dice.choice(self.house.pids()[kind] or [0])
        if not pid:
            return
        before = self.house.step(self.name)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(stop_s)
        meanwhile = max(0, self.house.step(self.name) - before)  # 0 while Redis does not answer
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        self.done += 1
        show(f"      {kind} stopped for {stop_s:.0f} s, {meanwhile} steps meanwhile")
        self._timed(f"{kind} goes on", lambda: None)

    # --- what is compared -------------------------------------------------------------------------

    def _compare(self) -> None:
        job = self.house.ended(self.name)
        if job.status != "SUCCEEDED" or job.steps_lost:
            self.violations.append(
                f"{job.id}: {job.status}, {job.steps_lost} steps lost: {job.because}"
            )
            return
        uris = job.export_uri, self.peaceful
        ours, theirs = (Path(uri.removeprefix("file:")).read_bytes() for uri in uris)
        show(f"      {job.id}: {job.step} steps, weights {'equal' if ours == theirs else 'DIFFER'}")
        if ours != theirs:
            self.violations.append(f"{job.id}: its weights are not those of the job in peace")

    def _look_at_money(self) -> None:
        """Every launch has one intent and one token, and costs what the cloud has in its books."""
        store = connect(self.house.client().house().redis_url)
        rows: Any = store.xrange(JOURNAL)
        actions = [msgspec.json.decode(row[b"a"], type=list[AnyAction]) for _, row in rows]
        intents = Counter(
            a.request.token for turn in actions for a in turn if isinstance(a, Launch)
        )
        page = msgspec.json.decode(
            (self.house.places.cloud_dir / "ledger.json").read_bytes(), type=Page
        )
        sold = Counter(entry.machine.token for entry in page.books.entries)
        twice = [token for token, count in (sold | intents).items() if count > 1]
        unknown = [token for token in sold if token not in intents]
        if twice or unknown:
            self.violations.append(f"tokens launched twice: {twice}; unknown: {unknown}")
        view = self.house.client().view()
        assert view is not None
        for machine in view.machines:
            bill = [e.cost_usd for e in page.books.entries if e.machine.token == machine.token]
            if bill and machine.ended_at_s and not abs(bill[0] - machine.cost_usd) <= USD_APART:
                self.violations.append(f"{machine.id}: {machine.cost_usd} and {bill[0]} are owed")
        show(f"      {len(sold)} machines, one intent and one token each")

    def _look_for_leftovers(self) -> None:
        places = self.house.places
        left = [f"process {pid}" for pid in processes.marked(places.identity)]
        left += [str(path) for path in (root_of(places.checkpoints), places.house) if path.exists()]
        if places.run != places.state_dir / "run" and places.run.exists():
            left.append(str(places.run))
        if left:
            self.violations.append(f"left after down: {left}")


def show(line: str) -> None:
    print(line, flush=True)


def report(taken: dict[str, list[tuple[float, list[str]]]]) -> None:
    show(f"\n{'kind':32} {'times':>5} {'median s':>9} {'worst s':>8}  without a step")
    for kind, all_taken in sorted(taken.items()):
        times = [took_s for took_s, _ in all_taken]
        show(f"{kind:32} {len(times):5} {statistics.median(times):9.2f} {max(times):8.2f}")
    for kind in ("local cloud", "house"):
        if taken.get(kind):
            took_s, said = max(taken[kind])
            show(f"\n{kind}, the slowest ({took_s:.2f} s):")
            show("\n".join(line[:150] for line in said))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--folder", type=Path, help="kept afterwards; else one that is removed")
    parser.add_argument("--only", choices=[*KINDS], help="kill nothing but this kind, alone")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="campaign-"))
    taken: dict[str, list[tuple[float, list[str]]]] = defaultdict(list)
    violations: list[str] = []
    for nth in range(options.runs):
        show(f"run {nth + 1}, seed {options.seed + nth}")
        house = House(folder / f"run-{nth}")
        campaign = Campaign(house, options.seed + nth, options.steps)
        if options.only:
            campaign._kind = lambda: options.only  # type: ignore[method-assign]
            campaign._stop = campaign._pair = campaign._storm = campaign._alone  # type: ignore[method-assign]
        try:
            campaign.run(options.kills)
        except Exception as error:  # what was measured is shown all the same
            campaign.violations.append(f"{type(error).__name__}: {error}")
            show(f"  {campaign.violations[-1]}")
        finally:
            house.close()
        for kind, times in campaign.taken.items():
            taken[kind] += times
        violations += campaign.violations
    report(taken)
    (folder / "times.json").write_text(json.dumps(taken, indent=1))
    show(f"\n{len(violations)} violations")
    show("\n".join(violations))
    if not (options.folder or violations):
        shutil.rmtree(folder)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
