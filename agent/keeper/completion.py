"""The end of a job: store its result, let its scripts end, and report it. No torch here."""

import threading
from collections.abc import Callable

from agent.keeper.layouts import RETRY_S
from agent.keeper.member import Member
from agent.keeper.reports import Reports
from agent.keeper.roster import Roster
from agent.keeper.storage.backup import Backup
from agent.keeper.storage.vault import Vault
from agent.messages import JobCompleted
from agent.protocol import Done

UNSEEN = (
    "no worker came to the end of the script, so what it does after its loop is not done; for that: "
    "orchestrator resume {} --from {}"
)
GOES_ON = "the script of {} has not ended {:g} s after its loop (job.tail_s), and is ended now"


class Tail:
    """What scripts may do after their loops."""

    def __init__(
        self,
        tail_s: float,
        roster: Roster,
        changed: threading.Condition,
        closed: Callable[[], bool],
        say: Callable[[str], None],
    ) -> None:
        self._tail_s, self._roster, self._changed = tail_s, roster, changed
        self.closed, self.say = closed, say

    def over(self, finishing: set[str]) -> bool:
        """Whether nothing is left to wait for; called with the job's lock."""
        return self.closed() or self._roster.finishing is not finishing

    def wait(self, finishing: set[str]) -> None:
        """Wait until these scripts have ended; called with the job's lock."""
        self._changed.wait_for(lambda: self.over(finishing) or not finishing, self._tail_s)
        if finishing and not self.over(finishing):
            self.say(GOES_ON.format(", ".join(sorted(finishing)), self._tail_s))


class Ending:
    def __init__(
        self,
        tail: Tail,
        roster: Roster,
        vault: Vault,
        changed: threading.Condition,
        reports: Reports,
        completed: Callable[[JobCompleted], None],
    ) -> None:
        self._tail, self._roster, self._vault, self._changed = tail, roster, vault, changed
        self._reports, self._completed = reports, completed
        self._stored: set[str] | None = None  # the finishing workers whose result is stored

    def begin(self, final: Backup) -> None:
        """Begin the end of the job, because its last state has arrived whole."""
        roster = self._roster
        if roster.finishing is None:
            assert roster.layout is not None
            finishing = roster.finishing = set(roster.layout.workers)
            roster.came_to_end = False
            threading.Thread(
                target=self._wind_up, args=(final, finishing), name="wind-up", daemon=True
            ).start()

    def joined(self, member: Member) -> None:
        """Tell a worker that has dialled again that the result is stored, if it is."""
        finishing = self._roster.finishing
        if finishing is not None and finishing is self._stored and member.worker in finishing:
            member.post(Done())

    def _wind_up(self, final: Backup, finishing: set[str]) -> None:
        """Put the result on the disk, let the scripts end, then report that the job is complete."""

        def over() -> bool:
            return self._tail.over(finishing)

        while (result := self._vault.store(final)) is None:
            with self._changed:
                if self._changed.wait_for(over, RETRY_S):
                    return
        with self._changed:
            if over():
                return
            self._stored = finishing
            for member in self._roster.members.values():
                if member.worker in finishing:
                    member.post(Done())
            self._tail.wait(finishing)
            why = self._unseen(final.version) if not finishing else ""
        sha, uri = result
        aside = self._vault.proofs.aside
        self._completed(self._reports.completed(final.version, sha, uri, aside, why))

    def _unseen(self, version: int) -> str:
        """Return what is not done if all workers were lost after their loops, and say so."""
        if self._roster.came_to_end:
            return ""
        why = UNSEEN.format(self._reports.job, version)
        self._tail.say(why)
        return why
