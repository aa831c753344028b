"""Which workers may take part: those that have reproduced a committed step. No torch here.

A worker that connects after the first commit is no more than a process that claims to run the same
script. So it gets the state of a backup and the sums of the step after that, and what it computes
from them is compared with the records: see `agent.keeper.proofs`. Until then it is not reported
to the manager as ready, and no layout begins with it.

    bringing further    workers inside can commit: a better step to prove is only a few commits away
    origin              the version after which there are commits that a worker could prove. The
                        steps of an earlier job, or of software that kept no records, can be proven
                        by no worker: so the first workers after them begin as those of a new job

No wait is without an end. While the job is brought further, the records of a step are soon
complete. While it is not, any step with any records will do. If there is none here, what is stored
is read. If there are no records there either, the workers inside go on without those that wait; if
no worker is inside, the job goes on from that version as from a beginning, and the job's log says
so.

The job that owns the entrance holds its lock.
"""

import logging
import time
from collections.abc import Callable

from agent.keeper import proofs
from agent.keeper.commits import History
from agent.keeper.member import Member
from agent.keeper.reports import Reports
from agent.keeper.roster import Roster
from agent.keeper.storage.vault import Base, Vault
from agent.layout import Layout
from agent.protocol import PROVING, Failed, Prove, Proved, Redo

log = logging.getLogger(__name__)

# If the first workers cannot begin without the held one, it begins with them after this time.
HOLD_BACK_S = 10.0
UNPROVABLE = (
    "step {}: nothing is stored by which a worker could prove that it does what was done before, since it was written by "
    "earlier software or for another script: the job goes on from there as from a beginning"
)
WITHOUT_FILES = (
    "it came to something else than others without the files that earlier steps wrote, which were not stored in time: another "
    "worker takes its place"
)
EXCUSED_MAX = 3  # for a script that differs with its files as well, each costs a worker
NOTHING_STORED = "step {}: no state of the job is stored any more, so it begins again"
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
        # The worker that comes after this many joins later; `_held_s` is when it began to wait.
        self.begins_with = 0
        self._held: str | None = None
        self._held_s = 0.0
        self._said_partly = False
        self._excused = 0
        self.exact = True  # the workers of a layout round alike
        self.tried = False  # a worker that did not begin with the job has reproduced a step of it
        # Set by the regrouping, which holds a reference to us: see `attach`.
        self._recall: Callable[[], bool] = lambda: False
        self._again: Callable[[], None] = lambda: None
        self._rests: Callable[[], bool] = lambda: False

    def attach(
        self, recall: Callable[[], bool], again: Callable[[], None], rests: Callable[[], bool]
    ) -> None:
        """Set the calls into the regrouping.

        `recall` reads what is stored, and returns whether it is being read; `again` begins a layout
        that has waited for a proof; `rests` returns whether something else is waited for first.
        """
        self._recall, self._again, self._rests = recall, again, rests

    def needs(self, member: Member) -> bool:
        """Whether this worker has to prove itself before it counts."""
        if member.proven or self._history.version <= self.origin:
            return False
        return not self._is_partial(member)

    def _is_partial(self, member: Member) -> bool:
        return member.ready is not None and member.ready.unbuilt is not None

    def blocks(self, layout: Layout | None) -> bool:
        """Whether a worker of the layout has not proven itself yet."""
        return bool(self._unproven(layout))

    def partly(self, layout: Layout) -> tuple[str, ...]:
        """Return the workers of a layout that have not proven themselves.

        Those could not prove themselves alone, and have not done so with others.
        """
        if self._history.version <= self.origin:
            return ()
        members = self._roster.members
        return tuple(w for w in layout.workers if w in members and not members[w].proven)

    def _unproven(self, layout: Layout | None) -> list[Member]:
        members = self._roster.members
        inside = layout.workers if layout is not None else ()
        return [members[w] for w in inside if w in members and self.needs(members[w])]

    def ready(self, member: Member) -> None:
        """Let in a worker whose script has reached its loop, unless it must prove itself first."""
        if not self.needs(member) and not self._holds_back(member):
            self._let_in(member)
            return
        # The manager waits only so long for a worker that is not ready; this one is not idle.
        self._reports.proving(member)
        self.look()

    def _holds_back(self, member: Member) -> bool:
        """Whether this worker shall join later, as a newcomer.

        Then state that the script keeps outside of the session shows in its first seconds. It is
        the first worker beyond those with which the job can begin. It begins with them after all
        if they do not begin without it.
        """
        others = [m for m in self._roster.members.values() if m.told and m is not member]
        if self._held is None and 0 < self.begins_with <= len(others):
            if member.told or self._is_partial(member) or self._history.version > 0:
                return False
            self._held, self._held_s = member.worker, time.monotonic()
        if self._held != member.worker or self._history.version > self.origin:
            return False
        # The others compute their first step, however long that takes; or cannot begin without it.
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
        """Count the workers inside as proven, because they took part in a commit."""
        for member in self._roster.inside():
            member.proven = True
        self.look()

    def went_back(self, before: int, version: int) -> None:
        """Move the origin when the history goes on from another version.

        A later version is what an earlier job has done.
        """
        self.origin = version if version > before else min(self.origin, version)

    # --- questions --------------------------------------------------------------------------------

    def look(self) -> None:
        """Ask the waiting workers to reproduce a step, if there is one."""
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
        """Whether it has come to its loop outside of the running layout, and was not asked yet."""
        layout, running = self._roster.layout, self._roster.started
        inside = running and layout is not None and member.worker in layout.workers
        return (
            self.needs(member)
            and member.ready is not None
            and member.question is None
            and not inside
            and not self._is_left_out(member)
        )

    def _is_left_out(self, member: Member) -> bool:
        """Whether it rounds differently from those that are here, so that no layout will have it.

        It has nothing to prove, and the manager gives its machine back.
        """
        others = (m.ready for m in self._roster.members.values() if m.proven and m is not member)
        keys = {ready.hardware for ready in others if ready is not None and ready.hardware}
        ready = member.ready
        if not self.exact or ready is None or not ready.exact or not ready.hardware:
            return False
        return bool(keys) and ready.hardware not in keys

    @property
    def _brought_further(self) -> bool:
        """Whether workers commit steps, or something else is waited for."""
        if self._rests():
            return True
        running = self._roster.started and self._roster.complete and bool(self._roster.inside())
        return running and not any(map(self.needs, self._roster.inside()))

    def _base(self) -> Base | None:
        return self._vault.asked(partly=not self._brought_further)

    def _find_a_way(self, waiting: list[Member]) -> None:
        """End the wait of workers for which there is no step to prove, now or soon."""
        if self._recall():
            return
        if any(member.proven for member in self._roster.members.values()):
            for member in self._unproven(self._roster.pending or self._roster.layout):
                why = "it has not proven itself, and the layout that it is in cannot wait for that"
                self._roster.lose(member.worker, "connection", why)
            return
        self.origin = self._history.version
        why = NOTHING_STORED if self._vault.backup is None else UNPROVABLE
        self._say(why.format(self.origin))
        for member in waiting:
            if not member.told:
                self._let_in(member)
        self._again()

    def proved(self, member: Member, proved: Proved) -> None:
        """Judge a worker's answer; ignore one to an earlier question, from before a reconnect."""
        question = member.question
        if question is None or question.version != proved.version:
            return
        if why := proofs.judge(member.worker, question, proved):
            self.differs(member, why, question.script_step)
            return
        member.question, member.proven, self.tried = None, True, True
        if not member.told:
            self._let_in(member)
        self._again()

    def differs(self, member: Member, why: str, step: int) -> None:
        """Refuse the script, whose workers differ; but lose those that lack files of their state.

        Where such a worker was the first to say something, it is another one that differs from it.
        """
        inside = self._roster.inside()
        whole = any(not one.lacks_files for one in inside)
        sources = inside if member in inside else [member]  # a proof is compared with what is known
        lacking = [one for one in sources if one.lacks_files]
        if not (whole and lacking and self._excused < EXCUSED_MAX):
            self._fail(member, Failed(kind="refused", detail=why, step=step))
            return
        self._excused += 1
        self._vault.proofs.drop(self._history.version)
        for one in lacking:
            self._roster.lose(one.worker, "exited", WITHOUT_FILES)


def pose(member: Member, base: Base) -> None:
    """Ask a worker to reproduce the step after this backup."""
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
    state, payload = backup.told(PROVING)
    member.post(state, *payload)
    for logged in base.redo[: question.commits]:
        redo = Redo(generation=PROVING, step=logged.step, present=logged.present)
        member.post(redo, logged.body)
