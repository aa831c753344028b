"""The reports of a job to the manager, and the little that must be remembered for them."""

import time
from collections.abc import Callable

from agent.keeper.member import Member
from agent.messages import (
    JobCompleted,
    JobProfiled,
    LossCause,
    Paced,
    Progress,
    Recalled,
    RecallFailed,
    Regrouped,
    Report,
    SumsKept,
    WorkerFailed,
    WorkerLost,
    WorkerProving,
    WorkerReady,
)
from agent.profile import Profile
from agent.protocol import Failed, Ready
from cloud.clock import CLOCK

PACES_S = 2.0
PACE_MOVED = 0.1


class Reports:
    def __init__(self, job: str, report: Callable[[Report], None], loss: float | None) -> None:
        self.job, self._report = job, report
        self.loss = loss
        self._disturbed_s: float | None = None
        self._committed_s: float | None = None
        self._committed = 0  # steps
        self._generation = -1  # of the newest commit that was reported
        self._pause_s = 0.0  # the longest time without a commit since the disturbance
        self.step_s = 0.0  # smoothed; 0 until a whole step of the layout was seen
        self._given = self._computed = 0  # parts of the work, in this layout
        # `kept` and `stored`; None: it is unknown what another keeper has reported
        self.sums_told: tuple[bool, bool] | None = (True, False)
        self._paces: dict[str, float] = {}  # as reported last
        self._paced_s = 0.0

    def disturbed(self) -> None:
        """Note that from now on something holds the running layout up, unless it did already."""
        if self._disturbed_s is None:
            self._disturbed_s = time.monotonic()

    def regrouping(self) -> None:
        """Forget the paces, because the previous layout's say nothing about the next one."""
        self.step_s, self._paces = 0.0, {}
        self._given = self._computed = 0
        self.disturbed()

    def ready(self, member: Member, ready: Ready) -> None:
        self._report(
            WorkerReady(
                at_s=CLOCK.now_s(),
                job=self.job,
                worker=member.worker,
                machine_id=member.machine_id,
                microbatches=ready.microbatches,
                steps_total=ready.steps_total,
                state_bytes=ready.state_bytes,
                uncuttable=ready.uncuttable,
                stages_max=ready.stages_max,
                unbuilt=ready.unbuilt,
                exact=ready.exact,
                exchange=ready.exchange,
                hardware=ready.hardware,
            )
        )

    def proving(self, member: Member) -> None:
        self._report(
            WorkerProving(
                at_s=CLOCK.now_s(),
                job=self.job,
                worker=member.worker,
                machine_id=member.machine_id,
                hardware="" if member.ready is None else member.ready.hardware,
            )
        )

    def profiled(self, worker: str, profile: Profile) -> None:
        self._report(JobProfiled(at_s=CLOCK.now_s(), job=self.job, worker=worker, profile=profile))

    def lost(self, worker: str, cause: LossCause, detail: str, *, owed_state: bool) -> None:
        self._report(
            WorkerLost(
                at_s=CLOCK.now_s(),
                job=self.job,
                worker=worker,
                cause=cause,
                detail=detail,
                owed_state=owed_state,
            )
        )

    def failed(self, worker: str, failed: Failed) -> None:
        self._report(
            WorkerFailed(
                at_s=CLOCK.now_s(),
                job=self.job,
                worker=worker,
                kind=failed.kind,
                detail=failed.detail,
                step=failed.step,
            )
        )

    def recalled(self, step: int, because: str) -> None:
        self._report(Recalled(at_s=CLOCK.now_s(), job=self.job, step=step, because=because))

    def recall_failed(self, error: str) -> None:
        self._report(RecallFailed(at_s=CLOCK.now_s(), job=self.job, error=error))

    def worked(self, given: int, computed: int) -> None:
        """Count parts of the work: those that slower workers gave to faster ones, and all."""
        self._given += min(given, computed)
        self._computed += computed

    def progress(self, generation: int, step: int, steps_total: int) -> None:
        """Report a committed step; for the first of a layout, also how long there was none.

        Of a job whose workers go on before the next layout, that is the longest time without one.
        """
        now_s, at_s = time.monotonic(), CLOCK.now_s()
        if self._disturbed_s is not None:
            since_s = max(self._disturbed_s, self._committed_s or 0.0)
            self._pause_s = max(self._pause_s, now_s - since_s)
        if self._disturbed_s is not None and generation > self._generation:
            self._report(
                Regrouped(
                    at_s=at_s,
                    job=self.job,
                    generation=generation,
                    step=step,
                    pause_s=self._pause_s,
                )
            )
            self._disturbed_s, self._pause_s = None, 0.0
        elif self._committed_s is not None:
            took_s = (now_s - self._committed_s) / max(1, step - self._committed)
            self.step_s = took_s if not self.step_s else 0.8 * self.step_s + 0.2 * took_s
        self._committed_s, self._committed, self._generation = now_s, step, generation
        self._report(
            Progress(
                at_s=at_s,
                job=self.job,
                generation=generation,
                step=step,
                steps_total=steps_total,
                loss=self.loss,
                step_s=self.step_s,
                given=self._given,
                computed=self._computed,
            )
        )

    def sums(self, copies: int, sum_bytes: int, *, kept: bool, stored: bool) -> None:
        """Report whether the keeper gets the sum of every step, when that has changed."""
        if (kept, stored) != self.sums_told:
            self.sums_told = kept, stored
            self._report(
                SumsKept(
                    at_s=CLOCK.now_s(),
                    job=self.job,
                    kept=kept,
                    copies=copies,
                    sum_bytes=sum_bytes,
                    stored=stored,
                )
            )

    def paces(self, generation: int, members: list[Member]) -> None:
        """Report what a microbatch takes on each worker, if that has changed, and not too often."""
        now_s = time.monotonic()
        if now_s < self._paced_s + PACES_S:
            return
        self._paced_s = now_s
        paces = {member.worker: member.microbatch_s for member in members if member.microbatch_s}
        moved = [w for w, s in paces.items() if abs(s - self._paces.get(w, 0.0)) > PACE_MOVED * s]
        if moved:
            self._paces = paces
            self._report(
                Paced(at_s=CLOCK.now_s(), job=self.job, generation=generation, microbatch_s=paces)
            )

    def completed(
        self,
        step: int,
        weights_sha: str,
        export_uri: str,
        aside: tuple[str, ...] = (),
        why: str = "",
    ) -> JobCompleted:
        return JobCompleted(
            at_s=CLOCK.now_s(),
            job=self.job,
            step=step,
            loss=self.loss,
            weights_sha=weights_sha,
            export_uri=export_uri,
            aside=aside,
            why=why,
        )
