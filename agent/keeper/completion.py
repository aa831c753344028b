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

TAIL_S = 30.0  # for what the script does after its loop


class Ending:
    def __init__(
        self,
        roster: Roster,
        vault: Vault,
        changed: threading.Condition,
        reports: Reports,
        completed: Callable[[JobCompleted], None],
        closed: Callable[[], bool],
    ) -> None:
        self._roster, self._vault, self._changed = roster, vault, changed
        self._reports, self._completed, self._closed = reports, completed, closed
        self._stored: set[str] | None = None  # the finishing workers whose result is stored

    def begin(self, final: Backup) -> None:
        """Begin the end of the job, because its last state has arrived whole."""
        roster = self._roster
        if roster.finishing is None:
            assert roster.layout is not None
            finishing = roster.finishing = set(roster.layout.workers)
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
            return self._closed() or self._roster.finishing is not finishing

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
                else:
                    member.dismiss("the job is done")
            self._changed.wait_for(lambda: over() or not finishing, TAIL_S)
        sha, uri = result
        self._completed(self._reports.completed(final.version, sha, uri))
