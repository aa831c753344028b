"""The timeline of a step, recorded by all workers for a person. No torch here."""

from agent.layout import Layout
from agent.protocol import Traced
from agent.timeline import Timeline
from cloud.clock import CLOCK


class Tracing:
    def __init__(self, job: str) -> None:
        self._job = job
        self.wanted = False
        self._step: tuple[int, int] | None = None  # generation and step that are recorded
        self._found: dict[str, Traced] = {}

    def begin(self, generation: int, step: int) -> None:
        """Collect this step, after every worker was asked to record it."""
        self._step, self._found = (generation, step), {}

    def take(self, worker: str, traced: Traced, layout: Layout) -> Timeline | None:
        """Return the timeline of the whole step once all workers have sent their part."""
        if (traced.generation, traced.step) != self._step:
            return None
        self._found[worker] = traced
        if set(self._found) != set(layout.workers):
            return None
        self.wanted, self._step = False, None
        return Timeline(
            job=self._job,
            step=traced.step,
            at_s=CLOCK.now_s(),
            layout=layout,
            cuts=max((each.cuts for each in self._found.values()), key=len),
            workers={name: each.moments for name, each in self._found.items()},
        )
