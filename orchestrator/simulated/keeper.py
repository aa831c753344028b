"""A simulated job, which commits steps as long as all workers of its layout are there."""

from collections.abc import Callable, Mapping

from agent.layout import Layout
from agent.messages import (
    BackupHeld,
    CheckpointWritten,
    JobCompleted,
    JobOrder,
    JobProfiled,
    Paced,
    Progress,
    Regrouped,
    Rewound,
    When,
    WorkerLost,
)
from cloud.model import Pool
from orchestrator.simulated.scenario import (
    STATE_BYTES,
    Scenario,
    gradient_bytes,
    profile_of,
)
from orchestrator.simulated.timeline import Inbox, Timeline


class SimulatedJob:
    """One job with its steps; planned events of an outdated `_version` do not happen."""

    def __init__(
        self,
        order: JobOrder,
        scenario: Scenario,
        around: tuple[Timeline, Inbox],
        crash: Callable[[str], None],
        pools: Mapping[str, Pool],
    ) -> None:
        """Make a job that has no worker yet; `crash` ends the process of a worker.

        `pools` says where each machine is, for the count of what steps send between zones.
        """
        self.sent_usd = self._step_usd = 0.0
        self._pools = pools
        self.id = order.job
        self.steps_total = scenario.steps
        self._crash, self._crashes_at = crash, scenario.crashes_at_step
        self.microbatches = scenario.microbatches
        self.present: dict[str, str] = {}  # worker -> machine
        self.slow: dict[str, float] = {}  # worker -> factor on its time per microbatch
        self.done = False
        self.step = 0  # committed
        self.checkpoint_step = 0
        self.lost_steps = 0
        self._timeline, self._inbox = around
        self._scenario, self._pace = scenario, scenario.pace
        self._measured = scenario.sections == 0
        self._checkpoint_every_s = order.checkpoint_every_s
        self._checkpoint_at_s = self._timeline.now_s
        self._generation = 0
        self._layout: Layout | None = None
        self._began_s: float | None = None  # when the running step began; None: it stands still
        self._step_s = 0.0
        self._version = 0

    def reopen(self) -> None:
        self.done = False

    def regroup(self, layout: Layout, when: When) -> None:
        """Apply a layout at the next boundary, or at once; refuse an older generation."""
        if layout.generation <= self._generation or self.done:
            return
        self._generation = layout.generation
        for worker in layout.workers:
            if worker not in self.present:
                self._inbox.report(
                    WorkerLost(at_s=0.0, job=self.id, worker=worker, cause="connection"),
                    self._pace.detect_s,
                )
        self._advance()
        if when == "now" or self._began_s is None:
            self._apply(layout, self._pace.morph_s)
            return

        def at_boundary() -> None:
            if self._generation == layout.generation and not self.done:
                self._advance()
                self._apply(layout, self._pace.morph_s)

        self._timeline.at(self._began_s + self._step_s, at_boundary)

    def leave(self, worker: str) -> bool:
        """Remove a worker, and return whether it was there.

        If it was in the layout, the running step stops; committed steps stay.
        """
        self.slow.pop(worker, None)
        if self.present.pop(worker, None) is None:
            return False
        if self._layout is not None and worker in self._layout.workers:
            self._stand_still()
        return True

    def run_at(self, worker: str, slow: float) -> None:
        """Let this worker take `slow` times as long from now on."""
        if worker not in self.present:
            return
        self.slow[worker] = slow
        if self._began_s is not None and self._layout is not None:
            self._advance()
            self._apply(self._layout, 0.0)

    def lose_memory(self) -> None:
        """Let the keeper die and come back with the last checkpoint."""
        if self.done or self._layout is None:
            return
        self._stand_still()
        before, self.step = self.step, self.checkpoint_step
        self.lost_steps += before - self.step
        event = Rewound(at_s=0.0, job=self.id, from_step=before, to_step=self.step)
        self._inbox.report(event, 0.0, may_be_lost=False)

    def checkpoint(self) -> None:
        self._advance()
        self.checkpoint_step, self._checkpoint_at_s = self.step, self._timeline.now_s
        event = CheckpointWritten(
            at_s=0.0,
            job=self.id,
            step=self.step,
            state_bytes=STATE_BYTES,
            uri=f"memory:{self.id}",
        )
        self._inbox.report(event, self._pace.answer_s, may_be_lost=False)

    def halt(self) -> None:
        self._stand_still()
        self.done, self._layout = True, None

    def _stand_still(self) -> None:
        self._advance()
        self._began_s = None
        self._version += 1

    def _advance(self) -> None:
        """Commit the steps that have been finished by now."""
        now_s = self._timeline.now_s
        if self._began_s is None or now_s <= self._began_s:
            return
        last = self.steps_total if self._crashes_at is None else self._crashes_at
        steps = min(int((now_s - self._began_s) / self._step_s), last - self.step)
        self.step += steps
        self.sent_usd += steps * self._step_usd
        self._began_s += steps * self._step_s

    def _apply(self, layout: Layout, pause_s: float) -> None:
        self._version += 1
        self._layout = layout
        if any(worker not in self.present for worker in layout.workers):
            self._began_s = None
            return
        now_s, version = self._timeline.now_s, self._version
        if self.step == self.steps_total:
            self._timeline.at(now_s + pause_s, lambda: self._last_commit(version))
            return
        self._step_s, self._step_usd = self._step_of(layout), self._traffic_usd(layout)
        self._began_s = now_s + pause_s
        left_s = (self.steps_total - self.step) * self._step_s
        first_s = self._began_s + self._step_s * 1.001
        told_s = pause_s + self._step_s
        if self._crashes_at is not None:
            self._crash_in(version, (self._crashes_at - self.step + 0.5) * self._step_s + pause_s)
            if self.step == self._crashes_at:
                return
        self._timeline.at(first_s, lambda: self._first_commit(version, layout.generation, told_s))
        self._timeline.at(self._began_s + left_s + 1e-3, lambda: self._last_commit(version))

    def _crash_in(self, version: int, delay_s: float) -> None:
        """Let a worker of the layout crash after `delay_s`, which stops the running step."""

        def crash() -> None:
            if self._version == version and self._layout is not None:
                self._crash(self._layout.workers[0])

        self._timeline.after(delay_s, crash)

    def _step_of(self, layout: Layout) -> float:
        """Return the seconds of a step.

        A chain fills once, then its slowest stage sets the pace; the slowest chain ends the step.
        """
        each_s = self._pace.slot_step_s / self.microbatches / layout.depth
        longest_s = max(
            (replica.count + layout.depth - 1) * max(self._factor(w) for w in replica.workers)
            for replica in layout.replicas
        )
        return each_s * longest_s + self._pace.overhead_s

    def _factor(self, worker: str) -> float:
        """Return how many times as long the worker takes as one of speed one."""
        kind = self._pools[self.present[worker]].type
        return self.slow.get(worker, 1.0) / self._scenario.speeds.get(kind, 1.0)

    def _traffic_usd(self, layout: Layout) -> float:
        """Return the cost of what a step sends, message by message: replicas exchange sums."""
        traits = self._scenario.traits
        if traits is None or not (traits.zone_usd_per_gb or traits.region_usd_per_gb):
            return 0.0
        total, width = 0.0, layout.width
        for stage in range(layout.depth):
            pools = [self._pools[self.present[r.workers[stage]]] for r in layout.replicas]
            for one in pools:
                for other in pools:
                    near = one.region == other.region
                    price = traits.zone_usd_per_gb if near else traits.region_usd_per_gb
                    total += 0.0 if one.zone == other.zone else price
        return total * 2 * gradient_bytes(self._scenario) / layout.depth / width / 1e9

    def _first_commit(self, version: int, generation: int, pause_s: float) -> None:
        if self._version != version:
            return
        self._advance()
        event = Regrouped(
            at_s=0.0,
            job=self.id,
            generation=generation,
            step=self.step,
            pause_s=pause_s,
        )
        self._inbox.report(event, 0.0, may_be_lost=False)
        if not self._measured and self._layout is not None:
            self._measured = True
            profiled = JobProfiled(
                at_s=0.0,
                job=self.id,
                worker=self._layout.workers[0],
                profile=profile_of(self._scenario),
            )
            self._inbox.report(profiled, self._pace.answer_s, may_be_lost=False)
        self._progress(version)

    def _progress(self, version: int) -> None:
        if self._version != version or self._layout is None:
            return
        self._advance()
        self._tell_step(self._layout)
        each_s = self._pace.slot_step_s / self.microbatches / self._layout.depth
        paced = Paced(
            at_s=0.0,
            job=self.id,
            generation=self._layout.generation,
            microbatch_s={w: each_s * self._factor(w) for w in self._layout.workers},
        )
        self._inbox.report(paced, 0.0)
        backup = BackupHeld(at_s=0.0, job=self.id, step=self.step, state_bytes=STATE_BYTES)
        self._inbox.report(backup, 0.0, may_be_lost=False)
        if self._timeline.now_s >= self._checkpoint_at_s + self._checkpoint_every_s:
            self.checkpoint()
        self._timeline.after(self._pace.progress_every_s, lambda: self._progress(version))

    def _tell_step(self, layout: Layout) -> None:
        event = Progress(
            at_s=0.0,
            job=self.id,
            generation=layout.generation,
            step=self.step,
            steps_total=self.steps_total,
            loss=1.0 / (1 + self.step),
            step_s=self._step_s,
        )
        self._inbox.report(event, 0.0, may_be_lost=False)

    def _last_commit(self, version: int) -> None:
        if self._version != version or self._layout is None:
            return
        self._stand_still()
        self.sent_usd += (self.steps_total - self.step) * self._step_usd
        self.step, version = self.steps_total, self._version
        self._tell_step(self._layout)
        self._timeline.after(self._pace.result_s, lambda: self._result(version))

    def _result(self, version: int) -> None:
        """Complete the job, if no worker has left since the last commit.

        Otherwise the next layout completes it.
        """
        if self._version != version:
            return
        self.halt()
        event = JobCompleted(
            at_s=0.0,
            job=self.id,
            step=self.step,
            loss=1.0 / (1 + self.step),
            weights_sha="",
            export_uri=f"memory:{self.id}",
        )
        self._inbox.report(event, self._pace.detect_s, may_be_lost=False)
