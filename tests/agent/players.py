"""A job with its vault and its commits, and workers that are played in this process: no torch, no sockets.

A player's model is eight integers. What it makes of a step depends on them and on the version only, unless its `twist` says
that it keeps something for itself.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from commit_logs import MemoryCommitLog

from agent.keeper.job import KeptJob
from agent.keeper.storage.vault import Place
from agent.layout import Layout, data_parallel
from agent.messages import JobOrder, Report, Unbuilt, WorkerFailed, WorkerReady
from agent.protocol import (
    PROVING,
    Commit,
    Computed,
    Digest,
    Enter,
    Hello,
    Holding,
    Prepared,
    Prove,
    Proved,
    Reached,
    Ready,
    Redo,
    RedoAsked,
    Slice,
    Snapshot,
    State,
)
from agent.store.encoding.format import lay_out
from agent.store.shares import Extent

SIZE = 64
FORM = lay_out("l", [("model/l", "I64", (8,))])
MICROBATCHES = 4
Twist = Callable[[str, int, int], int]  # what of, version, steps of its own: added to it


def straight(what: str, version: int, steps: int) -> int:
    return 0


class Said:
    """Where the job says what happens."""

    def __init__(self) -> None:
        self.reports: list[Report] = []
        self.said: list[str] = []

    def report(self, report: Report) -> None:
        self.reports.append(report)

    def lines(self, job: str, worker: str, lines: tuple[str, ...]) -> None:
        self.said += lines

    def flush(self, patience_s: float) -> bool:
        return True


class Line:
    """A connection on which nothing gets lost."""

    def __init__(self) -> None:
        self.came: list[tuple[Any, memoryview]] = []
        self.bytes_in, self.closed = 0, False
        self.changed = threading.Condition()

    def send_now(self, message: Any) -> bool:
        self.send(message)
        return True

    def send(self, message: Any, *payload: Any) -> None:
        data = b"".join(bytes(piece) for piece in payload)
        with self.changed:
            self.came.append((message, memoryview(data)))
            self.changed.notify_all()

    def close(self) -> None:
        self.closed = True


class House:
    """The job, and the players that are alive."""

    def __init__(self, folder: Path, *, phases: int = 1, **order: Any) -> None:
        self.folder, self.phases = folder, phases
        self.log, self.said = MemoryCommitLog(), Said()
        order = {"job": "job", "script": "train.py", "script_sha": "", **order}
        self.order = JobOrder(**order)
        self.players: dict[str, Player] = {}
        self.generation = 0
        self.memory: Path | None = None
        self.open()

    def open(self) -> None:
        place = Place(checkpoints=self.folder, memory=self.memory)
        self.job = KeptJob(self.order, b"", self.log, self.said, place, lambda _: None)  # type: ignore[arg-type]

    @property
    def version(self) -> int:
        return self.job.history.version

    @property
    def ready(self) -> list[str]:
        told = [one.worker for one in self.said.reports if isinstance(one, WorkerReady)]
        return list(dict.fromkeys(worker for worker in told if worker in self.players))

    @property
    def failed(self) -> list[str]:
        return [one.detail for one in self.said.reports if isinstance(one, WorkerFailed)]

    def joins(self, name: str, twist: Twist = straight, **hello: Any) -> "Player":
        self.players[name] = player = Player(self, name, twist, **hello)
        player.come()
        return player

    def dies(self, *names: str) -> None:
        for name in names:
            player = self.players.pop(name)
            self.job.leave(player.member, "connection", "it was killed")

    def lay_out(self, *names: str, when: Any = "boundary") -> Layout:
        self.generation += 1
        layout = data_parallel(self.generation, MICROBATCHES, names)
        self.job.regroup(layout, when)
        return layout

    def begins(self, *names: str) -> None:
        self.lay_out(*names, when="now")
        self.settles()

    def settles(self) -> None:
        """Until nobody has anything to say any more."""
        quiet = 0
        while quiet < 3:
            players = list(self.players.values())
            moved = [player.hear() for player in players]
            self.job.tick(time.monotonic(), 0.0)
            here = [p.member for p in players if not self.job.roster.is_gone(p.name)]
            coming = any(member._behind for member in here)
            coming |= self.job._regrouping._recalling
            quiet = 0 if coming or any(moved) else quiet + 1
            time.sleep(0.001)

    def until(self, what: str, look: Callable[[], Any]) -> Any:
        deadline_s = time.monotonic() + 20.0
        while time.monotonic() < deadline_s:
            self.settles()
            if found := look():
                return found
        raise AssertionError(f"waited in vain: {what}")

    def commits(self, count: int = 1) -> None:
        """So many commits by those who are inside."""
        for _ in range(count):
            before = self.version
            for player in list(self.players.values()):
                player.plays()
            self.settles()
            assert self.version == before + 1 or self.failed, self.said.reports[-5:]


class Player:
    def __init__(self, house: House, name: str, twist: Twist, **hello: Any) -> None:
        self.house, self.name, self.twist = house, name, twist
        self.unbuilt: Unbuilt | None = hello.pop("unbuilt", None)
        self.hardware: str = hello.pop("hardware", "")
        self.hello, self.machine = hello, "m"
        self.state, self.version = np.arange(SIZE // 8, dtype=np.int64), 0
        self.steps = 0  # that its script has been through by itself
        self.layout: Layout | None = None
        self.holds, self.redo_to = False, -1
        self.let_in = False  # a layout said that its workers have proven themselves
        self.unproven: tuple[str, ...] = ()  # in the layout that it is in
        self.asked_at: int | None = None
        self.proving: Prove | None = None
        self.answers, self.proved = True, 0
        self.sends_sums = True
        self.sums: dict[int, np.ndarray] = {}
        self.kept: dict[int, np.ndarray] = {}

    def come(self) -> None:
        self.line = Line()
        self.heard = 0
        hello = Hello(
            job="job", worker=self.name, machine_id=self.name, mesh_address="", **self.hello
        )
        member = self.house.job.join(self.line, hello)  # type: ignore[arg-type]
        assert member is not None
        self.member = member
        ready = Ready(
            microbatches=MICROBATCHES,
            steps_total=1000,
            state_bytes=SIZE,
            unbuilt=self.unbuilt,
            hardware=self.hardware,
        )
        self.say(ready)
        self.house.settles()

    def say(self, message: Any, payload: bytes = b"") -> None:
        self.house.job.receive(self.member, message, memoryview(payload))

    # --- what it computes ---------------------------------------------------------------------------

    def off(self, what: str, version: int) -> int:
        return self.twist(what, version, self.steps)

    def computed(self, version: int, microbatch: int) -> Computed:
        state = int(self.state.sum())
        loss = float(state + microbatch + self.off("loss", version))
        gradient = state * 31 + microbatch + 7 * version + self.off("gradient", version)
        return Computed(
            version=version,
            microbatch=microbatch,
            batch=Digest("batch", 100 * version + microbatch + self.off("batch", version)),
            loss=loss,
            gradients=(Digest("l", gradient, (float(abs(gradient)),)),),
            machine=self.machine,
        )

    def reached(self, version: int) -> Reached:
        bits = hash(tuple(self.state.tolist())) & ((1 << 64) - 1)
        norm = float(np.linalg.norm(self.state.astype(float)))
        return Reached(version=version, layers=(Digest("l", bits, (norm,)),), machine=self.machine)

    def sum_of(self, version: int) -> np.ndarray:
        return np.full(SIZE // 8, version + 1, dtype=np.int64)

    def apply(self, total: np.ndarray) -> None:
        """The optimizer's step, and what the script makes of it beside."""
        self.state = self.state * 3 % 1000003 + total + self.off("state", self.version)
        self.version, self.steps = self.version + 1, self.steps + 1

    # --- what it hears ------------------------------------------------------------------------------

    def hear(self) -> bool:
        self.line.bytes_in += 1  # it is alive
        with self.line.changed:
            came = self.line.came[self.heard :]
            self.heard += len(came)
        for message, payload in came:
            self.take(message, payload)
        return bool(came)

    def take(self, message: Any, payload: memoryview) -> None:
        match message:
            case Enter():
                self.enter(message)
            case Commit():
                self.commit(message)
            case Prove():
                self.proving, self.sums = message, {}
                self.end = message.version + message.commits
            case State(generation=generation):
                self.state = np.frombuffer(bytes(payload), dtype=np.int64).copy()
                self.version = message.version
                if generation == PROVING:
                    self.prove()
                else:
                    self.catch_up()
            case Redo(generation=generation):
                self.sums[message.step] = np.frombuffer(bytes(payload), dtype=np.int64)
                self.prove() if generation == PROVING else self.catch_up()
            case _:
                pass

    def prove(self) -> None:
        """Once all has come."""
        asked = self.proving
        assert asked is not None
        if not self.answers or any(v not in self.sums for v in range(asked.version, self.end)):
            return
        computed, reached = [], [self.reached(asked.version)]
        for phase in range(max(len(asked.microbatches), asked.commits)):
            microbatch = asked.microbatches[phase] if phase < len(asked.microbatches) else None
            if microbatch is not None:
                computed.append(self.computed(self.version, microbatch))
            if phase < asked.commits:
                self.apply(self.sums[asked.version + phase])
        if asked.reaches:
            reached.append(self.reached(self.version))
        self.proving, self.proved = None, self.proved + 1
        self.say(Proved(version=asked.version, computed=tuple(computed), reached=tuple(reached)))

    def enter(self, order: Enter) -> None:
        self.let_in |= order.proven
        self.layout = order.layout if self.name in order.layout.workers else None
        self.holds, self.redo_to, self.sums = self.name in order.holders, order.version, {}
        self.asked_at = order.version if order.snapshot else None
        self.unproven = order.unproven
        if self.layout is None or self.holds:
            return
        if order.holders and not order.catch_up:
            self.state, self.version = self.handed_over(order), order.version
            self.catch_up()

    def handed_over(self, order: Enter) -> np.ndarray:
        """The state of a holder, which is at the layout's version."""
        return self.house.players[order.holders[0]].state.copy()

    def catch_up(self) -> None:
        assert self.layout is not None
        while self.version < self.redo_to and self.version in self.sums:
            self.apply(self.sums.pop(self.version))
        generation = self.layout.generation
        if self.version < self.redo_to:
            self.say(RedoAsked(generation=generation, step=self.version))
        else:
            self.holds = True
            self.say(Holding(generation=generation, version=self.version))
            self.send_snapshot()

    def plays(self) -> None:
        """Its share of the commit in flight, up to being prepared."""
        layout = self.layout
        if layout is None or not self.holds:
            return
        self.send_snapshot()
        phase, version = self.version % self.house.phases, self.version
        start, end = self.share_in(layout)
        total = self.sum_of(version).tobytes()[start:end]
        message = Slice(generation=layout.generation, step=version, offset=start, total=SIZE)
        if self.sends_sums:
            self.say(message, total)
        replica = layout.replica_of(self.name)
        self.say(
            Prepared(
                generation=layout.generation,
                step=version,
                loss=1.0,
                present=b"\1",
                script_step=version // self.house.phases,
                phase=phase,
                computed=(self.computed(version, replica.first),),
                reached=self.reached(version) if phase == 0 else None,
                told=self.sends_sums,
            )
        )

    def share_in(self, layout: Layout) -> tuple[int, int]:
        at, count = layout.workers.index(self.name), len(layout.workers)
        return SIZE * at // count, SIZE * (at + 1) // count

    def commit(self, message: Commit) -> None:
        if message.snapshot:
            self.asked_at = message.version
        if self.holds and self.version == message.version - 1:
            self.apply(self.sum_of(self.version))
            self.send_snapshot()

    def send_snapshot(self) -> None:
        """At a boundary of the script only."""
        asked, layout = self.asked_at, self.layout
        if asked is None or layout is None or not self.holds or self.version < asked:
            return
        if self.version % self.house.phases:
            return
        self.asked_at = None
        start, end = self.share_in(layout)
        message = Snapshot(
            generation=layout.generation,
            version=self.version,
            forms=(FORM,) if start == 0 else (),
            extents=(Extent("l", start, end - start, SIZE),),
            last=True,
        )
        self.say(message, self.state.tobytes()[start:end])


def begun(house: House, *names: str, commits: int) -> House:
    """A house whose first layout is these workers, after so many commits."""
    for name in names:
        house.joins(name)
    house.begins(*names)
    house.commits(commits)
    return house
