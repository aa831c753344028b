"""One process of a parameter server: a worker and a server, and the loop that runs them.

It looks for messages between grains.
"""

import os
import threading
import time
from collections.abc import Callable

from agent.paramserver.api import Application, checked
from agent.paramserver.controller import Plan
from agent.paramserver.help import Settings
from agent.paramserver.live.post import Book, Broken, Introduced, Post
from agent.paramserver.member import Member, join
from agent.paramserver.messages import CONTROLLER, End, Gone, Leave, Message, Out
from agent.paramserver.server import Server, Store
from agent.paramserver.worker import Bound, Worker
from cloud.clock import CLOCK

LOOK_S = 0.2
GRAINS = 4  # computed between two looks for messages


class Node:
    def __init__(  # noqa: PLR0913 - what a node consists of
        self,
        name: str,
        application: Application,
        plan: Plan,
        post: Post,
        store: Store,
        *,
        slack: int | None,
        grain_s: float = 0.0,
    ) -> None:
        """`grain_s` is how long to sleep in each grain."""
        tables, helping = checked(application), Settings(size=plan.help_size)
        bound = Bound(slack, plan.stop.clocks)
        worker = Worker(name, application, plan.work, bound, helping, plan.partitions)
        self.name, self.post, self._grain_s = name, post, grain_s
        server = Server(name, tables, plan.partitions, store, plan.work.blocks)
        self.member = Member(worker, server)
        self.turned_s = time.monotonic()
        self._broken: list[Broken] = []  # connections, which a later controller hears of again
        self.over = ""  # why it has ended
        self.done = False  # the job has ended, too
        self.ended = threading.Event()

    def introduce(self, reliable: bool, allocation: str) -> None:
        self.post.send(CONTROLLER, Introduced(address=self.post.address, pid=os.getpid()))
        self._say(join(reliable, self.name, allocation))

    def work(self) -> None:
        """Compute and answer until the job ends, or goes on without this node."""
        worker = self.member.worker
        while not self.over:
            self.turned_s = time.monotonic()
            run, out = worker.next_run(CLOCK.now_s())
            self._say(self.member.marked(out))
            if run is None:
                self._read(LOOK_S)
            else:
                self.post.flush()
                grains = 1 if worker.application.grainwise or self._grain_s else GRAINS
                grains = min(grains, run.span.last - run.span.first)
                since_s = _stopwatch()
                if self._grain_s:
                    time.sleep(self._grain_s * grains)
                out = worker.finish(run, grains, since_s, CLOCK.now_s())
                self._say(self.member.marked(out))
                self._read(0.0)
        self.ended.set()

    def _read(self, wait_s: float) -> None:
        """Take all that has come, and answer it at once; wait a little if nothing has."""
        self.post.flush()
        came = self._wait(wait_s) if wait_s else self.post.take()
        while came is not None:
            self._take(*came)
            came = None if self.over else self.post.take()
        self.post.flush()

    def _wait(self, wait_s: float) -> tuple[str, Message | None] | None:
        return self.post.take(wait_s)

    def _take(self, sender: str, message: Message | None) -> None:
        self.turned_s = time.monotonic()
        if message is None:
            self._lost(sender)
        elif isinstance(message, Book):
            self.post.learn(message.addresses)
        elif isinstance(message, End):
            self.over, self.done = message.why, True
        elif isinstance(message, Leave):
            self.over = "nothing depends on this node any more"
        else:
            if isinstance(message, Gone):
                for name in message.nodes:
                    self.post.drop(name)
            self._say(self.member.handle(sender, message, CLOCK.now_s()))

    def _lost(self, sender: str) -> None:
        """Report that a connection has broken, which nobody else sees if both nodes live."""
        self._broken.append(Broken(peer=sender))
        self.post.send(CONTROLLER, self._broken[-1])

    def _say(self, out: Out) -> None:
        for target, message in out:
            self.post.send(target, message)


def _stopwatch() -> Callable[[], float]:
    """Return what says how long ago this was."""
    begun_s = time.monotonic()
    return lambda: time.monotonic() - begun_s
