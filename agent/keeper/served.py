"""A kept job whose tables are served: the kept job's side of `agent.keeper.tables`. No torch here."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

from agent.errors import Fenced
from agent.keeper.commits import Commit, History
from agent.keeper.completion import Tail
from agent.keeper.member import Member
from agent.keeper.reports import Reports
from agent.keeper.roster import PEER_GRACE_S, Roster
from agent.keeper.storage.vault import Vault
from agent.keeper.tables import Tables
from agent.layout import Layout
from agent.messages import (
    CheckpointFailed,
    CheckpointWritten,
    FailureKind,
    JobCompleted,
    Report,
    TablesNode,
    TablesServed,
)
from agent.paramserver.controller import Part as ServingPart
from agent.protocol import Failed, Serving
from cloud.clock import CLOCK

NODES_TOLD_MAX = 64
WRITTEN_S = 5.0  # between two reports of what is on the disk
UNWRITTEN_S = 60.0  # between two reports of what the disk does not take


class ServedJob:
    """All but `tables` belongs to the lock of the kept job."""

    def __init__(  # noqa: PLR0913, PLR0917 - the kept job's parts
        self,
        history: History,
        roster: Roster,
        reports: Reports,
        lock: threading.Condition,
        fail: Callable[[Member, Failed], None],
        give_up: Callable[[Fenced], None],
        report: Callable[[Report], None],
        completed: Callable[[JobCompleted], None],
        tail: Tail,
        vault: Vault,
    ) -> None:
        self._history, self._roster, self._reports = history, roster, reports
        self._lock, self._fail, self._give_up = lock, fail, give_up
        self._report, self._completed, self._tail = report, completed, tail
        self._vault, self._written_s, self._unwritten_s = vault, 0.0, -UNWRITTEN_S
        self._broken: Failed | None = None  # why the tables cannot go on
        self.tables: Tables
        self.serving: Serving

    def begin(self, serving: Serving, folder: Path, every_s: float) -> None:
        """Go on from what is kept, with the layout of an earlier keeper if there was one."""
        self.serving = serving
        self.tables = Tables(serving, self._history, folder, self, self._vault, every_s)
        if self._roster.layout is not None:
            self.tables.enter(self._roster.layout)

    def regroup(self, layout: Layout) -> None:
        before = self._roster.layout
        if before is not None and layout.generation <= before.generation:
            return
        self._roster.layout = layout
        self._reports.regrouping()
        for worker in self._roster.absent():
            self._roster.lose(worker, "connection", "it is not connected")
        self.tables.enter(layout)

    def notice(self, machine_id: str, deadline_s: float) -> None:
        members = self._roster.members.values()
        going = [member.worker for member in members if member.machine_id == machine_id]
        if going:
            self.tables.notice(going, deadline_s)

    # --- what the tables say ----------------------------------------------------------------------

    def present(self) -> dict[str, Member]:
        with self._lock:
            return dict(self._roster.members)

    def reached(self, commit: Commit, size: int, where: str, *, newest: bool) -> None:
        with self._lock:
            self._history.note(commit)
            if not newest:  # commits that come together say nothing of how long each took
                return
            self._reports.loss = commit.loss
            total = self.serving.clocks or commit.version
            self._reports.progress(commit.generation, commit.version, total)
            self._reports.paces(commit.generation, self._roster.inside())
            now_s = time.monotonic()
            if now_s < self._written_s + WRITTEN_S:
                return
            self._written_s = now_s
            self._report(
                CheckpointWritten(
                    at_s=CLOCK.now_s(),
                    job=self._reports.job,
                    step=commit.version,
                    state_bytes=size,
                    uri=where,
                )
            )

    def worked(self, given: int, computed: int) -> None:
        with self._lock:
            self._reports.worked(given, computed)

    def application_failed(self, worker: str, why: str) -> None:
        with self._lock:
            member = self._roster.members.get(worker)
            if member is not None:
                self._fail(member, Failed(kind="exception", detail=why))

    def broken(self, why: str, *, unlike: bool = False) -> None:
        with self._lock:
            kind: FailureKind = "refused" if unlike else "setup"
            self._broken = Failed(kind=kind, detail=why)
            self.look()

    def look(self) -> None:
        """Fail the job if its tables cannot go on, for whoever is here: they wait in vain."""
        if self._broken is not None:
            for member in list(self._roster.members.values()):
                self._fail(member, self._broken)

    def gave_up(self, error: Fenced) -> None:
        self._give_up(error)

    def absent(self, workers: list[str], why: str) -> None:
        with self._lock:
            for worker in workers:
                self._roster.lose(worker, "connection", why)

    def placed(self, stage: int, parts: list[ServingPart]) -> None:
        nodes = tuple(
            TablesNode(
                worker=part.node,
                reliable=part.reliable,
                serves=part.serves,
                copies=part.copies,
                blocks=part.blocks,
            )
            for part in parts[:NODES_TOLD_MAX]
        )
        self._report(
            TablesServed(
                at_s=CLOCK.now_s(),
                job=self._reports.job,
                stage=stage,
                partitions=self.serving.partitions,
                nodes=nodes,
            )
        )

    def unwritten(self, why: str) -> None:
        with self._lock:
            now_s, step = time.monotonic(), self._history.version + 1
            if now_s < self._unwritten_s + UNWRITTEN_S:
                return
            self._unwritten_s = now_s
            job, at_s = self._reports.job, CLOCK.now_s()
            self._report(CheckpointFailed(at_s=at_s, job=job, step=step, error=why))

    def recall_failed(self, error: str) -> None:
        self._reports.recall_failed(error)

    def recalled(self, version: int, because: str) -> None:
        self._reports.recalled(version, because)

    def suspect(self, worker: str, by: str) -> None:
        with self._lock:
            if self._roster.layout is not None:
                self._roster.suspect(worker, by, time.monotonic() + PEER_GRACE_S)

    def served(self, sha: str, where: str, why: str) -> None:
        """Let the scripts end, because all clocks are done, and report it."""
        thread = threading.Thread(
            target=self._wind_up, args=(sha, where, why), name="wind-up", daemon=True
        )
        thread.start()

    def _wind_up(self, sha: str, where: str, why: str) -> None:
        with self._lock:
            if self._tail.closed():
                return
            layout = self._roster.layout
            inside = set(layout.workers) if layout is not None else set()
            finishing = self._roster.finishing = inside & set(self._roster.members)
            self._tail.wait(finishing)
        self._completed(self._reports.completed(self._history.version, sha, where, why=why))
