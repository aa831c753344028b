"""A worker as a node of a parameter server: its letters to the keeper go over its link.

Nodes reach each other on sockets, by the secret of their job.
"""

from typing import NoReturn

from agent.errors import WireError
from agent.messages import SERVED, WorkerOrder
from agent.net.link import Link
from agent.paramserver.api import Application
from agent.paramserver.live.node import Node
from agent.paramserver.live.plan import KEPT, plan_of
from agent.paramserver.live.post import Post, Reading
from agent.paramserver.messages import CONTROLLER, Loaded, Message, Section
from agent.protocol import Part, Ready, Serving


class Nowhere:
    """The store of a node that has no copies: the keeper has them all."""

    def write(self, partition: int, clock: int, sections: list[Section]) -> NoReturn:
        raise WireError(f"a worker is to keep partition {partition}, {clock}, {len(sections)}")

    def read(self, partition: int, clock: int) -> NoReturn:
        raise WireError(f"a worker is to have kept partition {partition} at {clock}")

    def drop(self, partition: int, before: int) -> None:
        """Do nothing, because there is nothing."""


class ServedNode(Node):
    def __init__(
        self, order: WorkerOrder, host: str, link: Link, application: Application, serving: Serving
    ) -> None:
        self._link, self._machine = link, order.machine_id
        self._connects, self._reading = link.connects, Reading()
        post = Post(order.worker, order.secret, host)
        post.routes = {CONTROLLER: self._carry, KEPT: self._carry}
        plan = plan_of(serving)
        super().__init__(order.worker, application, plan, post, Nowhere(), slack=serving.slack)

    def hear(self, part: Part, payload: memoryview) -> None:
        """Take what the keeper says, on the thread of the link."""
        self.post.open(CONTROLLER, self._reading, part, payload)

    def run(self) -> str:
        """Be a node until the job ends, or goes on without it; return why."""
        self.introduce(reliable=False, allocation=self._machine)
        self.work()
        self.post.close()
        return self.over

    def _read(self, wait_s: float) -> None:
        self._link.microbatch_s = self.member.worker.grain_s
        if self._link.connects != self._connects:  # the keeper was restarted
            self._connects = self._link.connects
            self.introduce(reliable=False, allocation=self._machine)
            blocks = sorted(self.member.worker.held)
            self.post.send(CONTROLLER, Loaded(blocks=blocks))
            for broken in self._broken:
                self.post.send(CONTROLLER, broken)
            self.post.flush()
        super()._read(wait_s)

    def _wait(self, wait_s: float) -> tuple[str, Message | None] | None:
        with self._link.stuck.aided():
            return super()._wait(wait_s)

    def _carry(self, part: Part, pieces: list[memoryview]) -> None:
        self._link.send(part, *pieces)


def ready(serving: Serving) -> Ready:
    """Return how a worker of such a job says that it waits for a layout."""
    size = sum(one.keys * one.columns * 8 for one in serving.tables)
    return Ready(
        microbatches=serving.blocks,
        steps_total=serving.clocks or 1_000_000,
        state_bytes=size,
        uncuttable=SERVED,
        serving=serving,
    )
