"""A keeper with its Redis, workers as real processes, and somebody who plays the manager's part."""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, TextIO

import explain
import msgspec
import redis
import waiting
from keeper_process import Start
from nursery import Birth, Play

from agent import messages
from agent.keeper.keeper import Keeper, connect
from agent.keeper.storage.offsite import Storage
from agent.keeper.storage.vault import Place
from agent.layout import Layout, data_parallel
from agent.machine.crashes import DISK_VARIABLE
from agent.messages import UNRECORDED, AnyReport, JobOrder, WorkerOrder
from agent.net.handshake import job_secret
from agent.worker import rerecording
from cloud import private
from orchestrator.supervisor.redis_server import find_server

SECRET = "a secret of the deployment, and no short one"
PATIENCE_S = 60.0
ENOUGH_S = 0.5  # for a proof, before one more step is done
SOON_S = 0.02  # for the question that a step has made possible; twice as long after each step
REPORTS_SHOWN = 20


def seeds(*few: int) -> Sequence[int]:
    """Return the seeds from which a chaos of losses is drawn: these few, or so many as CHAOS says."""
    return range(int(os.environ["CHAOS"])) if "CHAOS" in os.environ else few


def until(what: str, look: Callable[[], Any], patience_s: float = PATIENCE_S) -> Any:
    """Return what `look` finds, as soon as it does; a failure says what became of each crew."""
    try:
        return waiting.until(what, look, patience_s, 0.01)
    except AssertionError as error:
        if str(error).startswith("waited "):
            for crew in list(Crew.alive):
                error.add_note(crew.what_happened())
        raise


def played_alone(
    script: Path, out: Path, *arguments: str, cwd: Path | None = None
) -> tuple[list[str], bytes]:
    """What a script prints and saves alone, without any manager. `out` is the last of its arguments."""
    out.parent.mkdir(exist_ok=True)
    printed = Nursery.at_hand[-1].play([str(script), *arguments, str(out)], cwd or Path.cwd())
    return printed.splitlines(), out.read_bytes()


class RedisProcess:
    """A real server on a socket of its own, with every write on the disk before the answer."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "redis.sock"
        self.url = f"unix://{self.socket}"
        self._arguments = [
            find_server(),
            *("--port", "0", "--unixsocket", str(self.socket), "--dir", str(folder)),
            *("--appendonly", "yes", "--appendfsync", "always", "--save", ""),
        ]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._arguments, stdout=subprocess.DEVNULL)
        client = redis.Redis.from_url(self.url)

        def answers() -> bool:
            with contextlib.suppress(redis.ConnectionError, redis.BusyLoadingError):
                return bool(client.ping())
            return False

        until("Redis to answer", answers)
        client.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Nursery:
    """Forks of one process that has imported everything: workers, and scripts alone. It starts when it is needed."""

    at_hand: ClassVar[list["Nursery"]] = []

    def __init__(self, disk: Path, within: Sequence[str] = ()) -> None:
        """`within` is a command that runs it, and so its workers, somewhere else."""
        self._disk, self._within = disk, within
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self.pids: list[int] = []

    @classmethod
    @contextlib.contextmanager
    def shared(cls, disk: Path) -> Iterator["Nursery"]:
        """The one that is at hand, or a new one."""
        if cls.at_hand:
            yield cls.at_hand[-1]
            return
        nursery = cls(disk)
        cls.at_hand.append(nursery)
        yield nursery
        cls.at_hand.remove(nursery)
        nursery.close()

    def start(self, order: WorkerOrder, host: str = "127.0.0.1", faults: str = "") -> int:
        pid = self._ask(Birth(order=order, host=host, faults=faults))
        self.pids.append(pid)
        return pid

    def play(self, argv: list[str], folder: Path) -> str:
        """What a script prints that is played alone in this folder."""
        code, printed, complained = self.try_out(argv, folder)
        assert code == 0, f"{argv} ended with {code}: {complained}"
        return printed

    def try_out(self, argv: list[str], folder: Path) -> tuple[int, str, str]:
        """Return with which status a script ends that may fail, what it prints, and its complaints."""
        printed, complained = self._disk / "printed", self._disk / "complained"
        code = self._ask(Play(argv, str(folder), str(printed), str(complained)))
        return code, printed.read_text(), complained.read_text()

    def _ask(self, what: Birth | Play) -> int:
        with self._lock:
            if self._process is None:
                self._process = subprocess.Popen(
                    [*self._within, sys.executable, str(Path(__file__).with_name("nursery.py"))],
                    env={**os.environ, DISK_VARIABLE: str(self._disk)},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            self._process.stdin.write(msgspec.json.encode(what).decode() + "\n")
            self._process.stdin.flush()
            return int(self._process.stdout.readline())

    def kill_all(self) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.pids.clear()

    def close(self) -> None:
        self.kill_all()
        if self._process is not None:
            self._process.stdin.close()
            self._process.wait(60)  # it waits for a core like everybody else
            self._process.stdout.close()


class Forked:
    """A process that another one has forked, with a handle that no other process can ever have."""

    def __init__(self, pid: int) -> None:
        self.pid, self._handle = pid, os.pidfd_open(pid)

    def ended(self, patience_s: float = 0.0) -> bool:
        """Return whether it has ended, or does in this time."""
        return bool(select.select([self._handle], [], [], patience_s)[0])

    def send_signal(self, number: signal.Signals) -> None:
        signal.pidfd_send_signal(self._handle, number)

    def kill(self) -> None:
        """It may have ended before."""
        if self._handle >= 0:
            with contextlib.suppress(ProcessLookupError):
                self.send_signal(signal.SIGKILL)
            assert self.ended(PATIENCE_S), f"{self.pid} does not end"
            os.close(self._handle)
            self._handle = -1


class KeeperForks:
    """Starts keepers: forks of one process, which begins with the first of them."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, start: Start) -> tuple[Forked, TextIO, TextIO]:
        """Return a keeper, the pipe for its orders, and the one with its answers."""
        if self._process is None:
            self._door, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            program = Path(__file__).with_name("keeper_process.py")
            with theirs:
                self._process = subprocess.Popen([sys.executable, str(program)], stdin=theirs)
        (takes, orders), (answers, gives) = os.pipe(), os.pipe()
        socket.send_fds(self._door, [msgspec.json.encode(start)], [takes, gives])
        os.close(takes)
        os.close(gives)
        forked = Forked(int(self._door.recv(64)))
        return forked, os.fdopen(orders, "w"), os.fdopen(answers)

    def close(self) -> None:
        if self._process is not None:
            self._door.close()
            self._process.wait(60)  # it waits for a core like everybody else
            self._process = None


class KeeperProcess:
    """A keeper that can be killed. The same calls as `Keeper` has."""

    forks: ClassVar[KeeperForks] = KeeperForks()

    def __init__(
        self,
        redis_process: RedisProcess,
        folder: Path,
        *,
        lasting: bool = False,
        host: str = "127.0.0.1",
    ) -> None:
        private.write(folder / "secret", SECRET.encode())
        self.storage = Storage(url=(folder / "elsewhere").as_uri(), every_s=0.5)
        self._start = Start(
            redis_url=redis_process.url,
            checkpoints=str(folder / "checkpoints"),
            host=host,
            secret=str(folder / "secret"),
            storage=msgspec.json.encode(self.storage).decode(),
            lasting=lasting,
        )
        self.address = ""
        self.faults = ""  # the encoded plan that the next process is armed with
        self.start()

    def start(self) -> None:
        asked = msgspec.structs.replace(self._start, faults=self.faults)
        self.process, self._orders, self._answers = self.forks.start(asked)
        address = self._call("ping")
        assert self.address in ("", address), "a restarted keeper listens where it did before"
        self.address = address

    def _call(self, *words: str) -> str:
        """Calls are lost with a killed keeper, as they are with an actor."""
        with contextlib.suppress(
            BrokenPipeError, ValueError
        ):  # the latter of a pipe that is closed
            self._orders.write("\t".join(words) + "\n")
            self._orders.flush()
            return self._answers.readline().strip()
        return ""

    def kill(self) -> None:
        self.process.kill()
        self._answers.close()
        with contextlib.suppress(BrokenPipeError):
            self._orders.close()

    def open_job(self, order: JobOrder, script: bytes) -> None:
        self._call("open_job", f"hex:{msgspec.json.encode(order).hex()}", f"hex:{script.hex()}")

    def regroup(self, job: str, layout: Layout, when: messages.When) -> None:
        self._call("regroup", job, f"hex:{msgspec.json.encode(layout).hex()}", when)

    def write_checkpoint(self, job: str) -> None:
        self._call("write_checkpoint", job)

    def close_job(self, job: str) -> None:
        self._call("close_job", job)

    def close(self) -> None:
        self.kill()


class Crew:
    """One job. Reports come out of Redis; whoever is lost or ready makes a new layout, as in the brain."""

    alive: ClassVar[list["Crew"]] = []

    def __init__(
        self, redis_process: RedisProcess, nursery: Nursery, folder: Path, keeper: Any = None
    ) -> None:
        self.redis = redis_process
        self.client = connect(redis_process.url)
        self.nursery, self.folder = nursery, folder
        self.keeper = keeper or Keeper(
            connect(redis_process.url),
            Place(checkpoints=folder / "checkpoints"),
            "127.0.0.1",
            SECRET,
        )
        self.job = "job"
        self.reports: list[AnyReport] = []
        self.pids: dict[str, int] = {}
        self.ready: list[str] = []
        self.generation = 0
        self.microbatches = 0
        self.settle = 0  # how many have to be ready for the first layout
        self.depth = 1  # what is asked for, as far as the workers go
        self.owned = False  # whether deep layouts keep no more than their own
        self.options: dict[str, Any] = {}  # how deep layouts are played
        self._serial = 0
        self._lock = threading.Lock()
        self._held = False
        self._after = "0"
        self._closed = threading.Event()
        self.alive.append(self)
        self._thread = threading.Thread(target=self._manage, daemon=True)
        self._thread.start()

    # --- orders -------------------------------------------------------------------------------------

    def open(self, script: str | bytes, *argv: str, **options: Any) -> None:
        order = JobOrder(job=self.job, script="train.py", script_sha="", argv=argv, **options)
        self.keeper.open_job(order, script if isinstance(script, bytes) else script.encode())

    def start(self, count: int, faults: str = "", host: str = "127.0.0.1") -> list[str]:
        started = []
        for _ in range(count):
            self._serial += 1
            worker = f"w{self._serial}"
            order = WorkerOrder(
                job=self.job,
                worker=worker,
                machine_id=f"m{self._serial}",
                slot=0,
                keeper_address=self.keeper.address,
                secret=job_secret(SECRET, self.job),
            )
            self.pids[worker] = self.nursery.start(order, host, faults)
            started.append(worker)
        return started

    def let_in(self, hold: Path, *workers: str) -> None:
        """Let a script that waits at the step in `hold` go on, until these take part."""

        def inside() -> bool:
            self._well()
            return {*workers} <= {*self.ready}

        self.step_on(hold, f"{workers} to take part", inside, *workers)

    def step_on(self, hold: Path, what: str, look: Callable[[], Any], *workers: str) -> Any:
        """Let a script that waits at the step in `hold` go on step by step while these join, until `look` finds something.

        A joining worker reproduces a committed step, and how a step ends is known when the next one is prepared.
        """
        known = isinstance(self.keeper, Keeper)
        members = self.keeper._jobs[self.job].roster.members if known else {}
        for worker in workers if known else ():
            self._until(
                f"{worker} to come to its loop",
                lambda worker=worker: worker in members and members[worker].ready,
            )
        began_s, soon_s = time.monotonic(), SOON_S

        def lacks_a_question() -> bool:
            """Return whether one more step is all they need, as none was asked to prove itself."""
            waiting = [members[worker] for worker in workers if worker in members]
            return bool(waiting) and not any(m.question or m.proven for m in waiting)

        def go_on() -> Any:
            nonlocal began_s, soon_s
            at = int(hold.read_text())
            enough_s = soon_s if lacks_a_question() else ENOUGH_S
            if self.step >= at and time.monotonic() > began_s + enough_s:
                self.hold(hold, at + 1)
                began_s, soon_s = time.monotonic(), min(2 * soon_s, ENOUGH_S)
            return look()

        return until(what, go_on)

    @staticmethod
    def hold(path: Path, step: int) -> None:
        waiting.write_whole(path, step)

    def begin(self, count: int, script: str | bytes, *argv: str, **options: Any) -> list[str]:
        self.settle = count
        self.open(script, *argv, **options)
        return self.start(count)

    def kill(self, *workers: str, how: signal.Signals = signal.SIGKILL) -> None:
        """All at one moment: none does anything once another of them is gone.

        Who was declared lost, on a busy machine, may have ended already.
        """
        for each in (signal.SIGSTOP, how) if how == signal.SIGKILL else (how,):
            for worker in workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pids[worker], each)

    def leave(self, worker: str) -> None:
        """A machine that is given back: out at the next boundary, then ended."""
        with self._lock:
            if worker in self.ready:
                self.ready.remove(worker)
                self.regroup("boundary")

    def close_job(self) -> int:
        """Until it is begun again; how far it was."""
        self.keeper.close_job(self.job)
        committed = self.step
        self.ready.clear()
        self.client.delete("orch:keeper:ports")
        return committed

    # --- what is known ------------------------------------------------------------------------------

    def of(self, kind: type) -> list[Any]:
        return [report for report in self.reports if isinstance(report, kind)]

    @property
    def step(self) -> int:
        held = self.client.hget(f"orch:commit:{self.job}", "step")
        return int(held or 0)

    def reach(self, step: int) -> None:
        self._until(f"step {step}", lambda: self.step >= step)

    def _well(self) -> None:
        assert not self.of(messages.WorkerFailed), self.of(messages.WorkerFailed)[0].detail

    def completed(self) -> messages.JobCompleted:
        return self._until("the end", lambda: self.of(messages.JobCompleted))[0]

    def _until(self, what: str, look: Callable[[], Any]) -> Any:
        """A failure of a script ends it."""

        def look_well() -> Any:
            self._well()
            return look()

        return until(what, look_well)

    def what_happened(self) -> str:
        """For whoever waits in vain: what was told last, and what each process is about."""
        told = [r for r in self.reports if not isinstance(r, messages.JobProfiled)]
        lines = ["the last that was told:", *(repr(r)[:300] for r in told[-REPORTS_SHOWN:])]
        pids = [*self.pids.items()]
        if isinstance(self.keeper, Keeper):
            lines += ["=== the keeper", *explain.of_keeper(self.keeper), explain.own_threads()]
        else:
            pids.append(("the keeper", self.keeper.process.pid))
        return "\n".join([*lines, explain.ask(pids)])

    def printed(self) -> list[str]:
        """What scripts have said; not what the keeper says of them."""
        return [line for worker, line in self._said() if worker != "keeper"]

    def noted(self) -> list[str]:
        """What the keeper says of scripts."""
        return [line for worker, line in self._said() if worker == "keeper"]

    def _said(self) -> list[tuple[str, str]]:
        rows = self.client.xrange(f"orch:log:{self.job}")
        return [(fields[b"worker"].decode(), fields[b"line"].decode()) for _, fields in rows]

    # --- the manager's part -------------------------------------------------------------------------

    def _manage(self) -> None:
        while not self._closed.is_set():
            try:
                answer = self.client.xread({"orch:inbox": self._after}, block=20, count=100)
            except redis.RedisError:
                continue
            for _, rows in answer or []:
                for key, fields in rows:
                    self._after = key.decode()
                    report = msgspec.json.decode(fields[b"e"], type=AnyReport)
                    with self._lock:
                        self._decide(report)
                    self.reports.append(report)

    def _decide(self, report: AnyReport) -> None:
        match report:
            case messages.WorkerReady():
                if report.worker not in self.ready:
                    self.ready.append(report.worker)
                    self.microbatches = report.microbatches
                    if len(self.ready) >= self.settle:
                        self.regroup("boundary")
                elif self.depth > 1 and self.step and report.uncuttable not in ("", UNRECORDED):
                    self.depth = 1
                    self.regroup("now")
            case messages.WorkerLost(owed_state=True) if report.worker not in self.ready:
                self.regroup("now")
            case messages.WorkerLost() | messages.WorkerFailed():
                if report.worker in self.ready:
                    self.ready.remove(report.worker)
                    self.regroup("now")
            case messages.Rewound():
                self.regroup("now")
            case _:
                pass

    @contextlib.contextmanager
    def on_hold(self) -> Iterator[None]:
        """Meanwhile no layout is asked for; afterwards one that fits, at once."""
        self._held = True
        yield
        self._held = False
        with self._lock:
            self.regroup("now")

    def regroup(self, when: messages.When) -> None:
        if self.ready and not self._held:
            self.generation += 1
            layout = self._layout()
            self.keeper.regroup(self.job, layout, when)

    def _layout(self) -> Layout:
        """Chains of `depth` workers, or of all if there are fewer; who is over waits."""
        depth = min(self.depth, len(self.ready))
        width = min(len(self.ready) // depth, self.microbatches)
        even = data_parallel(
            self.generation, self.microbatches, tuple(str(i) for i in range(width))
        )
        replicas = tuple(
            msgspec.structs.replace(
                replica, workers=tuple(self.ready[depth * index : depth * (index + 1)])
            )
            for index, replica in enumerate(even.replicas)
        )
        options = self.options if depth == self.depth else {}
        owned = self.owned and depth > 1
        return msgspec.structs.replace(even, replicas=replicas, owned=owned, **options)

    def shape(self, depth: int, when: messages.When = "boundary", **options: Any) -> None:
        """Another depth from now on."""
        with self._lock:
            self.depth, self.options = depth, options
            self.regroup(when)

    def close(self) -> None:
        self.alive.remove(self)
        self._closed.set()
        self.keeper.close()
        self.nursery.kill_all()
        self._thread.join(10)
        self.client.close()


@contextlib.contextmanager
def held_back(crew: Crew, step: int) -> Iterator[None]:
    """The toy does not go beyond this step meanwhile, so it does not end before a late test has acted."""
    hold = crew.folder / "out.pt.hold"
    hold.write_text(str(step))
    yield
    hold.unlink()


def ends_alike(
    crew: Crew, alone: tuple[list[str], bytes], steps: int, besides: tuple[str, ...] = ()
) -> None:
    """The job ends, no step was done twice by anyone who prints, and the bits are the same.

    Lines that begin with one of `besides` may have been printed, too.
    """
    lines, weights = alone
    assert crew.completed().step == steps
    printed = [line for line in crew.printed() if not line.startswith((rerecording.SAID, *besides))]
    assert set(printed) <= set(lines)
    assert len(printed) == len(set(printed))
    assert (crew.folder / "out.pt").read_bytes() == weights
    assert crew.of(messages.Rewound) == []


def ends_alike_in_two(crew: Crew, script: str, folder: Path, steps: int) -> None:
    """Cut in two, each with its own layers only; one is killed and replaced: it ends as in one process, and stays cut."""
    (folder / "train.py").write_text(script)
    by_hand = played_alone(folder / "train.py", folder / "alone" / "out.pt")
    crew.depth, crew.owned = 2, True
    workers = crew.begin(2, script, str(folder / "out.pt"))
    crew.reach(6)
    crew.kill(workers[1])
    crew.start(1)
    ends_alike(crew, by_hand, steps)
    recorded = [told for told in crew.of(messages.WorkerReady) if told.stages_max > 1]
    assert [told.uncuttable for told in recorded] == [""]
    assert crew.depth == 2
