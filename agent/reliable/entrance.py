"""Who may take part: a worker that has reproduced a step which is committed. No torch here.

A worker that connects behind the first commit is no more than a process that says it runs the same script. It is sent the
state of a backup and the sums of the step behind that, and what it makes of them is compared with what is known: see
`agent.reliable.proofs`. Until then the manager does not hear that it is ready, and no layout begins with it.

    bringing further    there are workers inside who can commit: a better step to prove is only a few commits away
    origin              the version behind which steps are committed that somebody could prove. What an earlier job did, and
                        what software did that kept no records, can be proven by nobody: the first workers behind it begin
                        as those do that begin a job

No wait is without an end. While the job is brought further, a step becomes known soon. While it is not, any step will do
whatever is known of it; with no step here, what is stored is read; if nothing is known there either, the workers inside go
on without those who wait, and where nobody is inside the job goes on from that version as from a beginning. The last is
said in the job's log.

The job that owns it holds its lock.
"""

import logging
import time
from collections.abc import Callable

from agent.layout import Layout
from agent.protocol import PROVING, Failed, Prove, Proved, Redo, State
from agent.reliable import proofs
from agent.reliable.commits import History
from agent.reliable.member import Member
from agent.reliable.reports import Reports
from agent.reliable.roster import Roster
from agent.reliable.vault import Base, Vault
from agent.store.shares import bodies

log = logging.getLogger(__name__)

# A job whose first workers cannot begin without the next one begins with it.
HOLD_BACK_S = 10.0
UNPROVABLE = (
    "step {}: nothing is stored by which a worker could prove that it does what was done before, since it was written by "
    "earlier software or for another script: the job goes on from there as from a beginning"
)
PARTLY = (
    "{}: it holds only its own layers of the model and cannot reproduce a step alone: before its first commit its stage is "
    "compared with the same stage of another chain, or its chain reproduces a step; in a single chain whose other workers "
    "have the state only what was recorded of loss_of is compared"
)


class Entrance:
    def __init__(
        self,
        history: History,
        roster: Roster,
        vault: Vault,
        reports: Reports,
        fail: Callable[[Member, Failed], None],
        say: Callable[[str], None],
    ) -> None:
        self._history, self._roster, self._vault = history, roster, vault
        self._reports, self._fail, self._say = reports, fail, say
        self.origin = 0
        # Of the workers that come behind so many one joins a few steps later, and since when it waits for that.
        self.begins_with = 0
        self._held: str | None = None
        self._held_s = 0.0
        self._said_partly = False
        self.tried = False  # somebody who did not begin with the job has reproduced a step of it
        # Told by the regrouping, which knows of us: see `attach`.
        self._recall: Callable[[], bool] = lambda: False
        self._again: Callable[[], None] = lambda: None
        self._rests: Callable[[], bool] = lambda: False

    def attach(
        self, recall: Callable[[], bool], again: Callable[[], None], rests: Callable[[], bool]
    ) -> None:
        """`recall` reads what is stored, and says whether it does; `again` begins a layout that has waited for a proof;
        `rests` says that something else is waited for first."""
        self._recall, self._again, self._rests = recall, again, rests

    def needs(self, member: Member) -> bool:
        """Whether this worker has to prove itself first."""
        if member.proven or self._history.version <= self.origin:
            return False
        return not self._is_partial(member)

    def _is_partial(self, member: Member) -> bool:
        return member.ready is not None and member.ready.unbuilt is not None

    def blocks(self, layout: Layout | None) -> bool:
        """Whether a layout has somebody in it who has not proven itself yet."""
        return bool(self._unproven(layout))

    def partly(self, layout: Layout) -> tuple[str, ...]:
        """Name the workers of a layout that could not prove themselves alone, and have not done so with others."""
        if self._history.version <= self.origin:
            return ()
        members = self._roster.members
        return tuple(w for w in layout.workers if w in members and not members[w].proven)

    def _unproven(self, layout: Layout | None) -> list[Member]:
        members = self._roster.members
        inside = layout.workers if layout is not None else ()
        return [members[w] for w in inside if w in members and self.needs(members[w])]

    def ready(self, member: Member) -> None:
        """Its script has reached its loop, or says so again."""
        if not self.needs(member) and not self._holds_back(member):
            self._let_in(member)
            return
        # The manager has its patience with whoever is not ready; this one is not idle.
        self._reports.proving(member)
        self.look()

    def _holds_back(self, member: Member) -> bool:
        """Whether this worker shall join as a newcomer, so that a script shows in its first seconds what it keeps to itself.

        It is the first behind those with whom the job can begin. It begins with them after all if they do not.
        """
        others = [m for m in self._roster.members.values() if m.told and m is not member]
        if self._held is None and 0 < self.begins_with <= len(others):
            if member.told or self._is_partial(member) or self._history.version > 0:
                return False
            self._held, self._held_s = member.worker, time.monotonic()
        if self._held != member.worker or self._history.version > self.origin:
            return False
        # The others compute their first step, however long it takes; or they could not begin without it.
        return self._roster.started or time.monotonic() < self._held_s + HOLD_BACK_S

    def _let_in(self, member: Member) -> None:
        if member.ready is None:
            return
        if self._history.version > self.origin and not member.proven and not self._said_partly:
            self._said_partly = True
            self._say(PARTLY.format(member.worker))
        member.told = True
        self._reports.ready(member, member.ready)

    def committed(self) -> None:
        """Who was inside has done what all have done."""
        for member in self._roster.inside():
            member.proven = True
        self.look()

    def went_back(self, before: int, version: int) -> None:
        """The history goes on from another version. A later one is what an earlier job has done."""
        self.origin = version if version > before else min(self.origin, version)

    # --- questions ----------------------------------------------------------------------------------

    def look(self) -> None:
        """Ask those who wait, if there is something to ask."""
        held = self._roster.members.get(self._held or "")
        if held is None:
            self._held = None
        if held is not None and not (held.told or self.needs(held) or self._holds_back(held)):
            self._let_in(held)
        self._vault.look()
        waiting = [m for m in self._roster.members.values() if self._waits(m)]
        self._vault.awaited = bool(waiting)
        for member in waiting:
            if (base := self._base()) is not None:
                pose(member, base)
        if waiting and waiting[0].question is None and not self._brought_further:
            self._find_a_way(waiting)

    def _waits(self, member: Member) -> bool:
        """Whether it is outside of what runs, has come to its loop, and was not asked yet."""
        layout, running = self._roster.layout, self._roster.started
        inside = running and layout is not None and member.worker in layout.workers
        return (
            self.needs(member)
            and member.ready is not None
            and member.question is None
            and not inside
        )

    @property
    def _brought_further(self) -> bool:
        """Whether somebody commits steps, or something else is waited for."""
        if self._rests():
            return True
        running = self._roster.started and self._roster.complete and bool(self._roster.inside())
        return running and not any(map(self.needs, self._roster.inside()))

    def _base(self) -> Base | None:
        return self._vault.asked(partly=not self._brought_further)

    def _find_a_way(self, waiting: list[Member]) -> None:
        """There is nothing to ask, and nobody who makes anything known."""
        if self._recall():
            return
        if any(member.proven for member in self._roster.members.values()):
            for member in self._unproven(self._roster.pending or self._roster.layout):
                why = "it has not proven itself, and the layout that it is in cannot wait for that"
                self._roster.lose(member.worker, "connection", why)
            return
        self.origin = self._history.version
        self._say(UNPROVABLE.format(self.origin))
        for member in waiting:
            if not member.told:
                self._let_in(member)
        self._again()

    def proved(self, member: Member, proved: Proved) -> None:
        """What it has made of the step. An answer to an earlier question, of a connection that broke, is none."""
        question = member.question
        if question is None or question.version != proved.version:
            return
        if why := proofs.judge(member.worker, question, proved):
            self._fail(member, Failed(kind="refused", detail=why, step=question.script_step))
            return
        member.question, member.proven, self.tried = None, True, True
        if not member.told:
            self._let_in(member)
        self._again()


def pose(member: Member, base: Base) -> None:
    """Ask a worker to reproduce the step behind this backup."""
    question, backup = base.question, base.backup
    assert question is not None
    member.question, member.version, member.fresh = question, None, False
    member.post(
        Prove(
            version=question.version,
            script_step=question.script_step,
            microbatches=question.microbatches,
            commits=question.commits,
            reaches=question.complete,
        )
    )
    state = State(generation=PROVING, version=backup.version, layers=backup.layers)
    member.post(state, *bodies(backup.layers, backup.bodies))
    for logged in base.redo[: question.commits]:
        redo = Redo(generation=PROVING, step=logged.step, present=logged.present)
        member.post(redo, logged.body)
