"""A job whose tables are served, in the keeper: its controller, and a copy of every table.

The keeper is the reliable machine of such a job. It runs no script, so it neither serves nor
computes: workers do both, and any of them, or all, may be taken away. Each clock is a commit of the
job. It is written down when every partition of it is on the disk, so a keeper that starts, or a job
that is resumed, goes on from there. No torch here.

One thread decides, and another keeps the copies, because writing them takes time.
"""

import hashlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
import numpy as np

from agent.checksum import seal, unseal
from agent.errors import AgentError, CheckpointError, Fenced, WireError
from agent.keeper.clocks import (
    Clock,
    Copying,
    Measures,
    clock_of,
    demand_alike,
    saved_of,
    write_result,
)
from agent.keeper.commits import Commit, History
from agent.keeper.layouts import RECALLS_PATIENT
from agent.keeper.member import Member
from agent.keeper.storage.backup import Saved
from agent.keeper.storage.vault import Vault
from agent.layout import Layout
from agent.paramserver import messages
from agent.paramserver.controller import Controller, Resumed
from agent.paramserver.controller import Part as ServingPart
from agent.paramserver.live.plan import KEPT, copies_of, plan_of
from agent.paramserver.live.post import Book, Broken, Introduced, Letters, Reading
from agent.paramserver.live.store import Folder
from agent.paramserver.member import FOR_SERVERS
from agent.paramserver.messages import CONTROLLER, Join, Message, Out
from agent.paramserver.server import Server
from agent.paramserver.tables import keys_of
from agent.protocol import Part, Serving, Shape
from agent.store.errors import Unknown
from cloud import private
from cloud.clock import CLOCK

log = logging.getLogger(__name__)

LOOK_S = 0.1
ABSENT_S = 20.0  # for workers of a layout that have not come back
END_S = 10.0  # for threads of ours
PLACED_S = 0.5  # between two looks at who does what
AGAIN_S = 2.0  # until a clock that the disk did not take is tried again
RESULT, REACHED = "tables.npz", "reached.json"

T = TypeVar("T")


class Owner(Protocol):
    """The kept job, as its tables see it. Each call is safe from any thread."""

    def present(self) -> dict[str, Member]:
        """Return the workers that are here, by name."""

    def reached(self, commit: Commit, size: int, where: str, *, newest: bool) -> None:
        """Take note of a clock that is written down; of several at once, only one is the newest."""

    def worked(self, given: int, computed: int) -> None:
        """Count grains of closed clocks: those that slower workers gave to faster ones, and all."""

    def application_failed(self, worker: str, why: str) -> None: ...

    def broken(self, why: str, *, unlike: bool = False) -> None:
        """Fail the job, because the keeper cannot go on with it, or its script is `unlike` before."""

    def gave_up(self, error: Fenced) -> None: ...

    def absent(self, workers: list[str], why: str) -> None:
        """Lose workers that are waited for in vain."""

    def placed(self, stage: int, parts: list[ServingPart]) -> None:
        """Report who does what, because that has changed."""

    def suspect(self, worker: str, by: str) -> None:
        """Note that the connection between two nodes has broken; one of them is to be lost."""

    def unwritten(self, why: str) -> None:
        """Report, now and then, that the disk does not take a clock, so that commits wait."""

    def recall_failed(self, error: str) -> None:
        """Report that what lies in the archives cannot be taken; it is tried again."""

    def recalled(self, version: int, because: str) -> None:
        """Report that the job goes on from this version of the archives."""

    def served(self, sha: str, where: str, why: str) -> None:
        """Let the scripts end, because all clocks are done, and report it."""


class Reached(msgspec.Struct, frozen=True):
    """Beside the files of the store: the newest clock that is whole in it."""

    clock: int = -1
    measures: tuple[float, ...] = ()  # of an earlier version, which had no file for them
    elapsed_s: float = 0.0  # in which the job was served so far
    tables: tuple[Shape, ...] = ()  # as they were declared; of an earlier version, nothing
    partitions: int = 0  # of an earlier version, 0
    job: str = ""  # as the next one: of an earlier version, nothing
    checksum: int | None = None  # of the file of measures up to this clock


class Copies:
    """The copies of the tables, on a thread that also writes them to the disk."""

    def __init__(
        self,
        server: Server,
        say: Callable[[Out], None],
        refuse: Callable[[str, Message, Exception], None],
        unwritten: Callable[[Exception], None],
        broken: Callable[[str], None],
    ) -> None:
        self.server, self._say, self._refuse = server, say, refuse
        self._unwritten, self._broken = unwritten, broken
        self._orders: queue.SimpleQueue[tuple[str, Message] | None] = queue.SimpleQueue()
        self.epoch = -1
        self._thread = threading.Thread(target=self._run, name="copies", daemon=True)
        self._thread.start()

    def take(self, sender: str, message: Message) -> None:
        self._orders.put((sender, message))

    def end(self) -> None:
        self._orders.put(None)

    def close(self) -> None:
        self.end()
        self._thread.join(END_S)

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            sender, message = order
            if isinstance(message, messages.Roll):
                self.epoch = message.epoch
            if message.epoch != self.epoch:
                continue  # a roll-back came between
            try:
                out = self.server.handle(sender, message)
            except (OSError, CheckpointError) as error:  # what is not saved is ordered again
                if isinstance(message, messages.Roll):
                    self._broken(f"a clock that was written cannot be read: {error}")
                    return
                log.warning("a clock could not be written: %s", error)
                self._unwritten(error)
                continue
            except (LookupError, ValueError, TypeError) as error:
                if sender != CONTROLLER:
                    self._refuse(sender, message, error)
                    continue
                self._broken(f"the copies could not be kept: {error!r}")
                return
            except Exception as error:
                log.exception("the copies cannot go on")
                self._broken(f"the keeper cannot go on with the copies: {error!r}")
                return
            self._say([(to, msgspec.structs.replace(one, epoch=self.epoch)) for to, one in out])


class Tables:
    def __init__(
        self,
        serving: Serving,
        history: History,
        folder: Path,
        owner: Owner,
        vault: Vault,
        every_s: float,
    ) -> None:
        """Keep tables in `folder`, and every so often copy them into the vault's archives."""
        self._serving, self._history, self._owner = serving, history, owner
        self._folder, self._vault = folder, vault
        self._disk = Folder(str(folder))
        self._letters = Letters(CONTROLLER)
        self._readings: dict[str, Reading] = {}
        self._acts: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._joined: dict[str, Join] = {}
        self._addresses: dict[str, str] = {}
        self._left: set[str] = set()
        self._broken: set[tuple[str, str]] = set()  # connections: to whom, and who says so
        self._layout: Layout | None = None
        self._entered_s = 0.0
        self._measures = Measures(folder / "measures")
        self._reached, self._damage = Reached(), ""
        self._caught_up = False
        self._copying = Copying(vault, every_s, self._clock)
        self._epochs = history.term << 32
        self.brain: Controller | None = None
        self._placed: tuple[int, list[ServingPart]] = (0, [])
        self._placed_s = -PLACED_S
        self._over = False
        self._closed = threading.Event()
        server = Server(KEPT, copies_of(serving), serving.partitions, self._disk)
        self._copies = Copies(
            server,
            lambda out: self._acts.put(lambda: self._say(KEPT, out)),
            self._refuse,
            self._write_again,
            self._owner.broken,
        )
        self._thread = threading.Thread(target=self._run, name="tables", daemon=True)
        self._thread.start()

    # --- what the kept job says, on any thread ----------------------------------------------------

    def enter(self, layout: Layout) -> None:
        """Go over to these workers."""
        self._acts.put(lambda: self._enter(layout))

    def hear(self, member: Member, part: Part, payload: memoryview) -> None:
        """Take a frame of a worker's, on the thread that listens to it."""
        reading = self._readings.setdefault(member.worker, Reading())
        self._letters.open(member.worker, reading, part, payload)
        self._acts.put(self._read_letters)

    def notice(self, workers: list[str], deadline_s: float) -> None:
        """Have workers leave whose machine will be taken away (seconds since the epoch)."""
        warning_s = deadline_s - CLOCK.now_s()
        self._acts.put(lambda: self._evict(workers, warning_s))

    def write_checkpoint(self) -> None:
        """Have the newest clock written into the archive, and copied."""
        self._acts.put(self._copying.ask)

    def leave(self) -> None:
        """End without waiting, because another keeper goes on."""
        self._closed.set()

    def close(self) -> None:
        self._closed.set()
        self._acts.put(lambda: None)
        if threading.current_thread() is not self._thread:
            self._thread.join(END_S)
        self._copies.close()

    def put_away(self) -> None:
        """Write the newest clock into the archive, of a job that is closed.

        If the archives could not be read until then, they may have a newer one.
        """
        if self._caught_up:
            self._copying.close(self._reached.clock)

    # --- the thread that decides ------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._catch_up()
            while not self._closed.is_set():
                self._turn()
        except Fenced as error:
            self._owner.gave_up(error)
        except WireError as error:  # the keeper is closed while Redis is away
            log.info("the tables are left: %s", error)
        except CheckpointError as error:
            self._owner.broken(str(error), unlike=isinstance(error, Unknown))
        except Exception as error:
            log.exception("the tables cannot go on")
            self._owner.broken(f"the keeper cannot go on with the tables: {error!r}")
        finally:
            self._copies.end()

    def _turn(self) -> None:
        try:
            acts = [self._acts.get(timeout=LOOK_S)]
        except queue.Empty:
            acts = []
        acts += [self._acts.get() for _ in range(self._acts.qsize())]
        for act in acts:
            act()
        self._look()
        self._tell()
        self._letters.flush()
        try:
            self._note()
        except OSError as error:  # the disk is full, or the like; all goes on when it takes it
            log.warning("a clock could not be written down: %s", error)
            self._owner.unwritten(str(error))
            self._closed.wait(AGAIN_S)

    def _read_letters(self) -> None:
        while not self._letters.inbox.empty():
            sender, message = self._letters.inbox.get()
            if message is None:
                continue
            try:
                self._take(sender, message)
            except (LookupError, ValueError, TypeError) as error:
                self._refuse(sender, message, error)

    def _refuse(self, sender: str, message: Message, error: Exception) -> None:
        """Lose a worker that says what makes no sense, because the others can go on without it."""
        log.warning("a %s of %s: %r", type(message).__name__, sender, error)
        why = f"its {type(message).__name__} could not be taken in: {error!r}"
        self._owner.absent([sender], why)

    def _take(self, sender: str, message: Message) -> None:
        now_s, brain = time.monotonic(), self.brain
        if isinstance(message, FOR_SERVERS):
            self._copies.take(sender, message)
        elif isinstance(message, Introduced):
            self._addresses[sender] = message.address
            self._introduce()
        elif isinstance(message, Join):
            self._joined[sender] = message
            if brain is not None and self._is_inside(sender):
                self._say(CONTROLLER, brain.handle(sender, message, now_s))
        elif isinstance(message, Broken):
            self._broken.add((message.peer, sender))
        elif isinstance(message, messages.Failed):
            told = f"{message.traceback}\n{message.why}"
            self._owner.application_failed(sender, told.strip())
        elif brain is not None:
            self._say(CONTROLLER, brain.handle(sender, message, now_s))

    def _write_again(self, error: Exception) -> None:
        """Have the newest clock written after a while, because the disk did not take one."""
        self._owner.unwritten(str(error))

        def write() -> None:
            if self.brain is not None:
                self._say(CONTROLLER, self.brain.save_again())

        timer = threading.Timer(AGAIN_S, lambda: self._acts.put(write))
        timer.daemon = True
        timer.start()

    def _introduce(self) -> None:
        """Send all nodes the addresses of all."""
        present = self._owner.present()
        book = Book(addresses={w: a for w, a in self._addresses.items() if w in present})
        for worker in book.addresses:
            self._route(worker)
            self._letters.send(worker, book)

    def _route(self, worker: str) -> None:
        def carry(part: Part, pieces: list[memoryview]) -> None:
            member = self._owner.present().get(worker)
            if member is not None:
                member.post(part, *pieces)

        self._letters.routes[worker] = carry

    def _is_inside(self, worker: str) -> bool:
        return self._layout is not None and worker in self._layout.workers

    def _enter(self, layout: Layout) -> None:
        self._layout, self._entered_s = layout, time.monotonic()
        if self._over:
            return
        if self.brain is None or self.brain.ended or self.brain.begun_s is None:
            self._begin(layout)
            return
        brain, now_s = self.brain, time.monotonic()
        going = [name for name in brain.nodes if name not in layout.workers and name != KEPT]
        self._left |= set(going)
        again = [worker for worker in layout.workers if worker in self._left]
        if again:
            why = "it has left the servers, which know it no more"
            self._owner.absent(again, why)
        for worker in layout.workers:
            if worker in self._joined and worker not in brain.nodes:
                self._say(CONTROLLER, brain.handle(worker, self._joined[worker], now_s))
        if going:  # the newcomers are here before others leave
            self._say(CONTROLLER, brain.evicted(going, float("inf"), now_s))

    def _begin(self, layout: Layout) -> None:
        """Make a controller that begins with these workers, where the disk says or memory."""
        self._epochs += 1 << 16
        now_s, measures = time.monotonic(), self._measures.up_to(self._reached.clock)
        elapsed_s = self._reached.elapsed_s if self.brain is None else self.brain.elapsed_s(now_s)
        resumed = Resumed(self._epochs, measures, elapsed_s)
        self.brain = brain = Controller(plan_of(self._serving, len(layout.workers)), resumed)
        if measures and (why := brain.plan.stop.reached([*measures], elapsed_s)):
            brain.ended = why  # an earlier keeper has died before it could say so
            for worker in self._joined:
                self._letters.send(worker, messages.End(why=why))
            return
        keeper = Join(reliable=True, machine=KEPT, allocation=KEPT)
        self._say(CONTROLLER, brain.handle(KEPT, keeper, now_s))
        for worker in layout.workers:
            if worker in self._joined:
                self._say(CONTROLLER, brain.handle(worker, self._joined[worker], now_s))

    def _evict(self, workers: list[str], warning_s: float) -> None:
        brain = self.brain
        if brain is not None and brain.begun_s is not None:
            self._left |= set(workers)
            self._say(CONTROLLER, brain.evicted(workers, warning_s, time.monotonic()))

    def _look(self) -> None:
        """Go on without workers that are gone, and lose those that do not come."""
        present, brain = self._owner.present(), self.brain
        for worker in [one for one in self._joined if one not in present]:
            del self._joined[worker]
            self._addresses.pop(worker, None)
            self._letters.routes.pop(worker, None)
            self._readings.pop(worker, None)
        if brain is None or brain.ended:
            return
        gone = [name for name in brain.nodes if name not in present and name != KEPT]
        now_s = time.monotonic()
        if gone:
            self._say(CONTROLLER, brain.lost(gone, now_s))
        self._say(CONTROLLER, brain.tick(now_s))
        self._broken = {pair for pair in self._broken if pair[1] in present}
        for peer, by in self._broken:  # of a node that has left, it was the end
            if {peer, by} <= set(brain.nodes):
                self._owner.suspect(peer, by)
        if brain.begun_s is None and self._layout and now_s > self._entered_s + ABSENT_S:
            absent = [worker for worker in self._layout.workers if worker not in present]
            if absent:
                self._owner.absent(absent, "it did not come back")
                self._entered_s = now_s

    def _tell(self) -> None:
        """Say who does what, if that has changed, and not too often."""
        now_s = time.monotonic()
        if self.brain is None or self.brain.begun_s is None or now_s < self._placed_s + PLACED_S:
            return
        self._placed_s = now_s
        placed = self.brain.stage, self.brain.parts()
        if placed != self._placed:
            self._placed = placed
            self._owner.placed(*placed)

    def _say(self, sender: str, out: Out) -> None:
        """Send what the controller or the copies say; what they say to each other stays here."""
        for target, message in out:
            if target == KEPT:
                if isinstance(message, messages.Save):
                    self._save(sender, message)
                elif isinstance(message, (messages.Roll, *FOR_SERVERS)) or _is_order(message):
                    self._copies.take(sender, message)
                elif isinstance(message, messages.Load) and self.brain is not None:
                    blocks = messages.Loaded(blocks=message.blocks)
                    self._say(CONTROLLER, self.brain.handle(KEPT, blocks, time.monotonic()))
            elif target == CONTROLLER:
                if self.brain is not None:
                    self._say(CONTROLLER, self.brain.handle(sender, message, time.monotonic()))
            else:
                self._letters.send(target, message)

    def _save(self, sender: str, message: messages.Save) -> None:
        """Have a clock written; the newest whole one that the disk names stays, and what is read."""
        kept = self._copying.pinned(self._reached.clock)
        self._copies.take(sender, msgspec.structs.replace(message, saved=kept))

    # --- what is written down ---------------------------------------------------------------------

    def _note(self) -> None:
        """Write down the clocks that the disk has whole, each as a commit."""
        brain, layout = self.brain, self._layout
        if brain is None or layout is None:
            return
        if brain.saved > self._reached.clock:
            first = self._reached.clock + 1
            fresh = brain.ledger.measures[first : brain.saved + 1]
            self._reach(first, fresh, brain.elapsed_s(time.monotonic()))
            self._owner.worked(*brain.ledger.take_worked())
        self._commit_up_to(layout.generation)
        self._copying.look(self._reached.clock)
        done = brain.ended and not brain.failed and brain.saved >= brain.ledger.closed
        if done and not self._over:
            result = self._result()
            self._over = True
            self._copying.close(self._reached.clock)
            planned = len(brain.ledger.measures) == brain.plan.stop.clocks
            self._owner.served(*result, "" if planned else brain.ended)

    def _commit_up_to(self, generation: int) -> None:
        while self._history.version <= self._reached.clock:
            measure = self._measures[self._history.version]
            commit = Commit(
                generation=generation,
                version=self._history.version + 1,
                loss=measure / self._serving.items,
            )
            self._history.write(commit)
            size = sum(one.keys * one.columns * 8 for one in self._serving.tables)
            newest = commit.version > self._reached.clock
            self._owner.reached(commit, size, str(self._folder), newest=newest)

    def _reach(self, first: int, measures: Sequence[float], elapsed_s: float) -> None:
        """Write down that the clocks from `first` on are whole; their measures come before that."""
        self._measures.add(first, measures)
        serving, clock = self._serving, first + len(measures) - 1
        reached = Reached(
            clock,
            (),
            elapsed_s,
            serving.tables,
            serving.partitions,
            self._history.job,
            self._measures.checksum,
        )
        private.write(self._folder / REACHED, seal(msgspec.json.encode(reached)))
        self._reached = reached

    def _catch_up(self) -> None:
        """Bring the commits and the disk to one version, after an earlier keeper.

        What the disk does not have of the commits is looked for where its copies are. As long as
        that cannot be read, the commits stay as they are.
        """
        reached = self._insist(lambda _: self._read())
        if reached is None:
            return
        self._reached = reached
        demand_alike(reached.tables, reached.partitions, self._serving, str(self._folder))
        here, committed = self._reached.clock + 1, self._history.version
        if (not here or here < committed) and not self._recall(committed):
            return
        if self._history.version > self._reached.clock + 1:
            self._history.rewind(self._reached.clock + 1)
        self._vault.begin_anew(self._history.version)
        self._caught_up = True

    def _recall(self, committed: int) -> bool:
        """Take the newest clock of the archives, if it is newer than that of the disk.

        Return False if they could not be read, or it not be written, before the job was closed.
        """
        self._vault.drop()
        found = self._insist(
            lambda tries: self._vault.recall(committed, patient=tries < RECALLS_PATIENT)
        )
        if found is None:
            return False
        if found.saved is None and committed and self._reached.clock < 0:
            self._say_from(0, "step 0, because nothing else is stored")
        if found.saved is None or found.saved.reached <= self._reached.clock + 1:
            return True
        clock = clock_of(found.saved, self._serving)
        if not self._insist(lambda _: self._take_clock(clock)):
            return False
        self._say_from(found.saved.reached, found.because)
        return True

    def _say_from(self, version: int, because: str) -> None:
        self._owner.recalled(version, "; ".join(filter(None, (because, self._damage))))

    def _take_clock(self, clock: Clock) -> bool:
        for partition, sections in enumerate(clock.partitions):
            self._disk.write(partition, clock.number, sections)
        elapsed_s = max(clock.elapsed_s, self._reached.elapsed_s)
        self._reach(0, clock.measures, elapsed_s)
        return True

    def _insist(self, act: Callable[[int], T]) -> T | None:
        """Try, and report why it fails, until it does not; None if the job is closed before."""
        for tries in count():
            try:
                return act(tries)
            except (CheckpointError, OSError, MemoryError) as error:
                self._owner.recall_failed(str(error) or type(error).__name__)
                if self._closed.wait(AGAIN_S):
                    break
        return None

    def _clock(self, number: int) -> Clock:
        """Read a clock that is whole on the disk."""
        reached, every = self._reached, range(self._serving.partitions)
        partitions = [self._disk.read(partition, number) for partition in every]
        return Clock(
            self._measures.up_to(number), partitions, reached.elapsed_s, self._serving.tables
        )

    def _read(self) -> Reached:
        """Return what the disk has whole; nothing if a file of it is damaged or another job's."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / REACHED
        if not path.exists():
            return Reached()
        try:
            reached = _reached_in(path, self._history.job, self._measures)
            for partition in range(reached.partitions or self._serving.partitions):
                self._disk.read(partition, reached.clock)
        except ValueError as error:
            self._damage = f"{path} is damaged: {error}"
        except AgentError as error:
            self._damage = str(error)
        else:
            return msgspec.structs.replace(reached, measures=())
        log.warning("%s", self._damage)
        return Reached()

    def _result(self) -> tuple[str, str]:
        """Put the values of all tables into one file. Return its checksum, and where it is."""
        arrays: dict[str, list[np.ndarray]] = {}
        for partition in range(self._serving.partitions):
            for section in self._disk.read(partition, self._reached.clock):
                arrays.setdefault(keys_of(section.table), []).append(section.keys)
                arrays.setdefault(section.table, []).append(section.values)
        whole = {name: np.concatenate(parts) for name, parts in arrays.items()}
        digest = hashlib.sha256()
        for table in self._serving.tables:
            keys = keys_of(table.name)
            order = np.argsort(whole[keys])
            whole[keys] = whole[keys][order]
            whole[table.name] = np.ascontiguousarray(whole[table.name][order][:, : table.width])
            digest.update(whole[table.name].tobytes())
        path = self._folder / RESULT
        write_result(path, whole)
        return digest.hexdigest(), str(path)


def left(folder: Path, job: str) -> Saved | None:
    """Return the newest clock that the disk has of a job, of which no worker has come yet."""
    path, measures = folder / REACHED, Measures(folder / "measures")
    if not path.exists():
        return None
    try:
        one, disk = _reached_in(path, job, measures), Folder(str(folder))
        if not one.partitions:
            raise CheckpointError(f"{path} is of an earlier version")
        partitions = [disk.read(partition, one.clock) for partition in range(one.partitions)]
        return saved_of(Clock(measures.up_to(one.clock), partitions, one.elapsed_s, one.tables))
    except (ValueError, AgentError) as error:
        # Resuming the job looks elsewhere, and says so.
        log.warning("the tables of %s stay as they are: %s", job, error)
        return None


def _reached_in(path: Path, job: str, measures: Measures) -> Reached:
    reached = msgspec.json.decode(unseal(str(path), path.read_bytes()), type=Reached)
    if reached.job not in ("", job):
        raise CheckpointError(f"{path} is of {reached.job}")
    measures.recall(reached.clock, reached.measures, reached.checksum)
    return reached


def _is_order(message: Message) -> bool:
    return isinstance(
        message, messages.Route | messages.Committed | messages.Report | messages.Gone
    )
