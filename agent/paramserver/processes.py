"""The machines in separate processes on one machine, with the controller in this one."""

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgspec

from agent.errors import AgentError
from agent.paramserver.api import Application, checked, even
from agent.paramserver.controller import Controller, Plan
from agent.paramserver.live.node import LOOK_S, Node
from agent.paramserver.live.post import Book, Broken, Introduced, Post
from agent.paramserver.live.store import Folder
from agent.paramserver.messages import CONTROLLER, Beat, Message, Out
from agent.paramserver.server import put
from agent.paramserver.tables import Rows, keys_of
from agent.store.memory import keep_memory

BEAT_S = 1.0
START_S = 60.0


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What every process of a job needs to know."""

    module: str
    kind: str
    folder: str  # of the module
    arguments: dict[str, Any] = {}
    blocks: int = 12
    grains: int = 20
    batches: int = 1
    partitions: int = 4
    expected: int = 2
    slack: int | None = 0
    help_size: int = 0
    save_every: int = 1
    store: str = ""
    dead_s: float = 5.0  # without a sign of life
    stuck_s: float = 600.0  # in one call of the application, after which there is none
    grain_s: float = 0.0  # of sleep, in place of computing that other processes would be slowed by

    def application(self) -> Application:
        if self.folder not in sys.path:
            sys.path.insert(0, self.folder)
        made: Application = getattr(importlib.import_module(self.module), self.kind)(
            **self.arguments
        )
        checked(made)
        return made

    def plan(self, application: Application) -> Plan:
        return Plan(
            work=even(application.items, self.blocks, self.grains, self.batches),
            stop=application.stop,
            partitions=self.partitions,
            expected=self.expected,
            help_size=self.help_size,
            save_every=self.save_every,
            dead_s=self.dead_s,
        )


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """What one node is given on its standard input."""

    job: Job
    name: str
    secret: str
    controller: str
    reliable: bool
    allocation: str
    slow: float = 1.0


class Single(Node):
    """A node that is a process, and ends with its controller."""

    def __init__(self, start: Start) -> None:
        post = Post(start.name, start.secret)
        post.book[CONTROLLER] = start.controller
        job, application = start.job, start.job.application()
        super().__init__(
            start.name,
            application,
            job.plan(application),
            post,
            Folder(job.store),
            slack=job.slack,
            grain_s=job.grain_s * start.slow,
        )
        self._job = job
        self._reliable, self._allocation = start.reliable, start.allocation

    def run(self) -> None:
        threading.Thread(target=self._beat, name="paramserver-beat", daemon=True).start()
        self.introduce(self._reliable, self._allocation)
        self.work()
        self.post.close()

    def _lost(self, sender: str) -> None:
        if sender == CONTROLLER:
            self.over = self.over or "the controller is gone"
        else:
            super()._lost(sender)

    def _beat(self) -> None:
        """Give signs of life, in a thread, because the loop may compute or load for long."""
        job = self._job
        while not self.ended.wait(min(BEAT_S, job.dead_s / 4)):
            if time.monotonic() - self.turned_s < job.stuck_s:
                self.post.send(CONTROLLER, Beat())
                self.post.flush()


class Spawned(NamedTuple):
    process: subprocess.Popen[bytes]
    reliable: bool


class Awaited:
    """What somebody waits for; the controller's thread looks, so it wakes nobody in vain."""

    def __init__(self, until: Callable[[Controller], object]) -> None:
        self._until, self.over = until, threading.Event()
        self.error: Exception | None = None

    def look(self, controller: Controller) -> bool:
        """Return whether it is over: true by now, or an error."""
        try:
            if self._until(controller):
                self.over.set()
        except Exception as error:  # which is for whoever waits
            self.error = error
            self.over.set()
        return self.over.is_set()


class House:
    """The controller in this process, and nodes in others, all on this machine."""

    def __init__(self, job: Job, secret: str = "") -> None:
        self.job, self._secret = job, secret or os.urandom(16).hex()
        self.controller = Controller(job.plan(job.application()))
        self.nodes: dict[str, Spawned] = {}
        self.closed_s: list[float] = []
        self._post = Post(CONTROLLER, self._secret)
        self._lock = threading.Lock()
        self._awaited: list[Awaited] = []
        self._thread = threading.Thread(
            target=self._run, name="paramserver-controller", daemon=True
        )
        self._thread.start()

    def start(
        self, name: str, reliable: bool, allocation: str = "first", slow: float = 1.0
    ) -> None:
        """Start a node."""
        start = Start(
            job=self.job,
            name=name,
            secret=self._secret,
            controller=self._post.address,
            reliable=reliable,
            allocation=allocation,
            slow=slow,
        )
        process = subprocess.Popen(
            [sys.executable, "-m", "agent.paramserver.processes"], stdin=subprocess.PIPE
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(start))
        process.stdin.close()
        self.nodes[name] = Spawned(process, reliable)

    def kill(self, names: Iterable[str]) -> None:
        """End nodes as a machine ends that is taken away without a word of warning."""
        for name in names:
            self.nodes[name].process.send_signal(signal.SIGKILL)

    def stop(self, names: Iterable[str]) -> None:
        for name in names:
            self.nodes[name].process.send_signal(signal.SIGSTOP)

    def go_on(self, names: Iterable[str]) -> None:
        for name in names:
            self.nodes[name].process.send_signal(signal.SIGCONT)

    def evict(self, names: Iterable[str], warning_s: float) -> None:
        with self._lock:
            self._say(self.controller.evicted(names, warning_s, time.monotonic()))
            self._post.flush()

    def wait(self, until: Callable[[Controller], object], limit_s: float = 120.0) -> None:
        """Wait until something is true of the controller, or raise."""
        awaited = Awaited(until)
        with self._lock:
            if not awaited.look(self.controller):
                self._awaited.append(awaited)
        if not awaited.over.wait(limit_s):
            raise AgentError(f"it did not happen within {limit_s:g} s: {self.controller.notes}")
        if awaited.error is not None:
            raise awaited.error

    def result(self, limit_s: float = 300.0) -> dict[str, Any]:
        """Wait for the end, and return the tables as the store has them, and keys where any may be."""
        self.wait(lambda controller: controller.ended, limit_s)
        folder, clock = Folder(self.job.store), self.controller.saved
        rows = {table.name: Rows(table) for table in self.job.application().tables}
        for partition in range(self.job.partitions if clock >= 0 else 0):
            put(rows, folder.read(partition, clock))
        keys = {name: held.keys() for name, held in rows.items()}
        found = {name: held.get(keys[name]) for name, held in rows.items()}
        return found | {keys_of(name): keys[name] for name in rows if not rows[name].table.keys}

    def close(self) -> None:
        for spawned in self.nodes.values():
            spawned.process.kill()
            spawned.process.wait()
        self._post.put(CONTROLLER, None)
        self._thread.join(START_S)
        self._post.close()

    def _run(self) -> None:
        while True:
            came = self._all_that_came()
            if (CONTROLLER, None) in came:
                return
            with self._lock:
                for sender, message in came:
                    self._take(sender, message)
                self._say(self.controller.tick(time.monotonic()))
                self._post.flush()
                self._awaited = [one for one in self._awaited if not one.look(self.controller)]

    def _all_that_came(self) -> list[tuple[str, Message | None]]:
        """Return all that waits, because nobody is silent whose signs of life are among it."""
        found, came = [], self._post.take(LOOK_S)
        while came is not None:
            found.append(came)
            came = self._post.take()
        return found

    def _take(self, sender: str, message: Message | None) -> None:
        now_s, brain = time.monotonic(), self.controller
        if message is None:
            self._post.drop(sender)
            self._say(brain.lost([sender], now_s))
        elif isinstance(message, Introduced):
            self._post.learn({sender: message.address})
            book = Book(addresses=dict(self._post.book))
            for name in list(self._post.book):
                self._post.send(name, book)
        elif isinstance(message, Broken):
            if {sender, message.peer} <= set(brain.nodes):  # of two that live, the first to say it
                self._say(brain.lost([message.peer], now_s))
        else:
            self._say(brain.handle(sender, message, now_s))
        while len(self.closed_s) <= brain.ledger.closed:
            self.closed_s.append(now_s)

    def _say(self, out: Out) -> None:
        for target, message in out:
            self._post.send(target, message)


def main() -> None:
    """Run one node, as its standard input says."""
    keep_memory()
    Single(msgspec.convert(json.load(sys.stdin), Start)).run()


if __name__ == "__main__":
    main()
