"""Layouts of a job: how each begins, and where its workers get the state. No torch here.

The job that owns the regrouping holds its lock. Stored versions are read on a separate thread.
"""

import logging
import threading
import time
from collections.abc import Callable
from itertools import count

from agent.errors import Fenced, WireError
from agent.keeper.admission import Entrance
from agent.keeper.commits import History
from agent.keeper.member import Member
from agent.keeper.reports import Reports
from agent.keeper.roster import HUNG_S, SILENT_EARLY_S, Roster, moved_s
from agent.keeper.storage.backup import Saved
from agent.keeper.storage.vault import Vault
from agent.layout import Layout
from agent.messages import When
from agent.protocol import Commit, Enter, Redo, RedoAsked

log = logging.getLogger(__name__)

RECONNECT_S = 3.0  # for the workers of the layout that was running when the keeper was restarted
RETRY_S = 5.0
EVERYTHING = ((0, None),)
RECALLS_PATIENT = 3  # tries; after these, what cannot be read is left out
LATE = "it alone has no state {:.0f} s after the layout began, so nothing is committed: its network is slow or broken"


class Regrouping:
    def __init__(
        self,
        history: History,
        roster: Roster,
        vault: Vault,
        reports: Reports,
        entrance: Entrance,
        changed: threading.Condition,
    ) -> None:
        self._history, self._roster, self._vault = history, roster, vault
        self._entrance = entrance
        entrance.attach(self._recall_proof, self._again, lambda: self.waits or self._recalling)
        self._reports, self._changed = reports, changed
        self.gave_up: Callable[[Fenced], None] = lambda _: None
        self.committing: Callable[[], bool] = lambda: False
        self._now = False  # the layout that is asked for does not wait for a commit
        self._waiting = False  # the workers of a layout that was running are expected back
        self._waiting_since_s = 0.0  # 0 until the first look
        self._recalling = self._recalled = False  # stored versions are being read; were read
        self._nothing = False  # is stored: they were read while no state was here, and in vain
        self._lost = False  # the backup, while they are being read
        self._told: Enter | None = None  # as it was sent to the workers of the layout
        self._told_at_s = 0.0
        self._closed = False
        self.begun: Callable[[], None] = lambda: None  # called when a layout begins
        self.resumed: Callable[[], None] = lambda: None  # called when a restarted keeper goes on

    @property
    def waits(self) -> bool:
        return self._waiting

    def ask(self, layout: Layout, when: When) -> None:
        """Set the next layout.

        It begins now, or after the step in flight if there is one, but not before all of its
        workers have proven themselves.
        """
        roster = self._roster
        newest = roster.pending or roster.layout
        if newest is not None and layout.generation <= newest.generation:
            return
        if when == "now":
            self._lose_the_late(layout)
        roster.pending, self._now = layout, when == "now"
        self._entrance.look()
        self._again()

    def _lose_the_late(self, asked: Layout) -> None:
        """Lose workers that lack the state which others of the layout have, if it is asked for again.

        The manager does that when nothing was committed for longer than a transfer takes. One that
        began anew would not come to its end either, and after some of these the job has failed.
        """
        roster, told, newest = self._roster, self._told, self._history.version
        if told is None or not roster.started or told.layout is not roster.layout:
            return
        since_s = time.monotonic() - self._told_at_s
        inside = roster.inside()
        late = [member for member in inside if member.version != newest]
        again = told.version == newest and {*asked.workers} == {*told.layout.workers}
        bound_s = HUNG_S + max(map(moved_s, late), default=0.0)
        if again and len(late) < len(inside) and since_s > bound_s:
            for member in late:
                roster.lose(member.worker, "silent", LATE.format(since_s))

    def _again(self) -> None:
        """Begin the requested layout, or the current one if it has not begun, if it can now."""
        roster = self._roster
        if self.committing() or self.waits or self._closed:
            return
        if roster.pending is not None:
            idle = roster.layout is None or not roster.started or not roster.complete
            if self._now or idle:
                self.apply()
        elif roster.layout is not None and not roster.started and roster.complete:
            self._start()

    def restore(self, layout: Layout) -> None:
        """Set the layout that was running before the keeper was restarted."""
        roster = self._roster
        roster.layout, roster.started, roster.sources = layout, True, None
        self._waiting = True

    def forget(self) -> None:
        """Forget all layouts, because workers that come from now on take the job up again."""
        roster = self._roster
        roster.layout = roster.pending = None
        self._waiting = self._recalled = self._nothing = self._closed = False

    def rest(self) -> None:
        """Wait for nobody, because this job has no steps: see `agent.keeper.served`."""
        self._waiting = False

    def close(self) -> None:
        self._closed = True

    def look(self, now_s: float, late_s: float) -> None:
        """End a wait for workers that has lasted long enough, and ask again for a missing state.

        A delay of `late_s` in the keeper has delayed workers as well, so it extends the wait. A
        layout that waits for a commit begins if none can come, because a worker was lost.
        """
        if self._waiting:
            self._waiting_since_s = (self._waiting_since_s or now_s) + late_s
            if now_s > self._waiting_since_s + self._reconnect_s():
                self._carry_on()
        if self._vault.advance(patient=bool(self._roster.holders())) or self._stranded():
            self._again()
        if self._held_up() and self._vault.wants:
            self._ask_for_state()

    def _stranded(self) -> bool:
        """Whether the running layout has lost a worker, and the requested one has all of its own."""
        roster, next_ = self._roster, self._roster.pending
        here = next_ is not None and all(worker in roster.members for worker in next_.workers)
        return here and not roster.complete

    def _reconnect_s(self) -> float:
        """Return how long to wait for workers that have not come back after a restart.

        Workers of this layout that have come back report broken connections to the others. As long
        as none does, the others live and come as soon as they can, so the wait is long. It is not
        longer than usual if the next layout is asked for, because the manager knows more.
        """
        roster, layout = self._roster, self._roster.layout
        if all(roster.is_gone(worker) for worker in roster.absent()):
            return roster.patient(RECONNECT_S) if roster.lacks_owners() else 0.0
        back = layout and any(m.generation == layout.generation for m in roster.inside())
        known = back and roster.pending is None
        return SILENT_EARLY_S if known else roster.patient(RECONNECT_S)

    def joined(self, member: Member) -> None:
        """See to a worker that has come, which may have dialled again in the middle of a layout.

        Carry on if it was the last that a restarted keeper waited for.
        """
        told = self._told
        current = told is not None and self._roster.started and told.layout is self._roster.layout
        if current and told is not None and told.version == self._history.version:
            self._told_again(member, told)
        if self.waits and self._roster.complete and not self._roster.lacks_owners():
            self._carry_on()

    def _told_again(self, member: Member, told: Enter) -> None:
        """Send the layout again to a worker that has not heard of it.

        One that was being sent the state is lost, because nobody knows what of it has come.
        """
        if member.worker not in (*told.layout.workers, *told.holders):
            return
        if member.generation < told.layout.generation:
            self._send_enter(member, told)
        elif member.version is None and _lacks(member, told):
            why = "its connection broke while it was sent the state"
            self._roster.lose(member.worker, "connection", why)

    def _held_up(self) -> bool:
        """Whether all wait for a backup, so that no commit comes with which to ask again."""
        here = self._roster.started and not self._closed and not self.waits
        return here and self._roster.complete and not (self._vault.open or self.committing())

    # --- a layout begins --------------------------------------------------------------------------

    def apply(self) -> None:
        """Make the requested layout current, unless a worker in it must prove itself first."""
        roster = self._roster
        assert roster.pending is not None
        if self._entrance.blocks(roster.pending):
            return
        roster.layout, roster.pending, roster.started = roster.pending, None, False
        self.begun()
        roster.suspicions.clear()
        self._vault.stop_asking()
        self._reports.regrouping()
        absent = roster.absent()
        for worker in absent:
            roster.lose(worker, "connection", "it is not connected")
        if not absent:
            self._start()

    def _start(self) -> None:
        """Send the layout to its workers, which are all here, and see that they get the state."""
        roster, vault = self._roster, self._vault
        layout = roster.layout
        assert layout is not None
        if self._entrance.blocks(layout):
            return
        if not roster.holders() and vault.landing:
            return  # a snapshot that is whole becomes a version first: see `look`
        reached, holders = vault.reached, self._sources(layout)
        catch_up = self._catch_up(layout, holders)
        if not holders and reached not in (None, self._history.version):
            assert reached is not None
            if self._recalling or not self._go_back(reached):
                return
        if not holders and vault.backup is None:
            if not self._nothing:
                # Also if they were read before: there may have been a worker with a newer state.
                self._recall()
                return
            if not self._begin_anew(layout):
                return
            holders = roster.holders()
        self._tell(layout, holders, catch_up=catch_up)
        roster.started, roster.sources = True, holders

    def _sources(self, layout: Layout) -> tuple[str, ...]:
        """Return the holders; none if the layout cannot begin with what they hold.

        No worker can be brought into the middle of a step without its sums: all begin it again.
        """
        holders = self._roster.holders()
        led = self._vault.reached == self._history.version
        return holders if led or not self._catch_up(layout, holders) else ()

    def _catch_up(self, layout: Layout, holders: tuple[str, ...]) -> bool:
        """Whether joining workers have to replay commits, because they cannot be sent a state.

        If a script's step has several commits, the holders may be in the middle of a step.
        """
        joining = any(worker not in holders for worker in layout.workers)
        return bool(holders) and joining and self._vault.proofs.phases > 1

    def _tell(self, layout: Layout, holders: tuple[str, ...], *, catch_up: bool) -> None:
        members, vault = self._roster.members, self._vault
        vault.choose(self._reports.step_s, self._ready_bytes())
        sums = vault.wants_sum(self._roster.copies(holders), parted=layout.owned)
        snapshot = vault.wants or (sums and vault.adrift)
        if snapshot:
            vault.ask(layout, self._history.version)
        shards = vault.shards(self._roster.crowd) if snapshot else None
        sums |= vault.owes(self._history.version)
        unproven = self._entrance.partly(layout)
        if unproven and not holders:
            vault.step_back()
        redo = len(vault.redo) if catch_up or not holders else 0
        proves = vault.asks_first if unproven and redo and not holders else None
        enter = Enter(
            layout=layout,
            version=self._history.version,
            holders=holders,
            addresses={w: m.mesh_address for w, m in members.items()},
            held={w: h.layers for w in holders if (h := members[w].held) is not None},
            redo=redo,
            catch_up=catch_up,
            snapshot=snapshot,
            record=self._roster.recorders.wanted(time.monotonic()),
            unled=self._unled(),
            sums=sums,
            proven=self._history.version > self._entrance.origin,
            unproven=unproven,
            proves=proves,
            shards=shards,
        )
        self._told, self._told_at_s = enter, time.monotonic()
        for worker in dict.fromkeys((*layout.workers, *holders)):
            self._send_enter(members[worker], enter)

    def _send_enter(self, member: Member, enter: Enter) -> None:
        layout, holders = enter.layout, enter.holders
        member.post(enter)
        member.enters(layout, holds=member.worker in holders)
        if _lacks(member, enter) and not layout.owned:
            self.send_backup(member, layout.generation)

    def _ready_bytes(self) -> int:
        """Return how much of the state the scripts have made when they began."""
        ready = (m.ready.state_bytes for m in self._roster.members.values() if m.ready is not None)
        return max(ready, default=0)

    def _unled(self) -> int | None:
        """Return the committed step that the next leader finishes; None if the job is beyond it."""
        step = self._roster.unled
        return step if step is not None and step + 1 == self._history.version else None

    def send_backup(
        self, member: Member, generation: int, wanted: tuple[str, ...] | None = None
    ) -> None:
        """Send the whole backup, or the wanted layers of it."""
        backup = self._vault.backup
        if backup is None and (self._recalling or self._waiting):
            return  # as in `send_logged`; who asks an earlier keeper's layout for it is lost later
        assert backup is not None
        state, payload = backup.told(generation, wanted)
        member.post(state, *payload)

    def send_logged(self, member: Member, asked: RedoAsked) -> None:
        """Send one sum, which the worker has room for, so a newer layout never waits for all."""
        layout = self._roster.layout
        if layout is None or asked.generation != layout.generation:
            return
        logged = self._vault.logged(asked.step)
        if logged is None and self._recalling:
            return  # an earlier keeper announced the layout; ours is announced when all is read
        if logged is None:
            raise WireError(
                f"{member.worker} asked for the sum of step {asked.step}, which is gone"
            )
        redo = Redo(generation=asked.generation, step=logged.step, present=logged.present)
        member.post(redo, *(logged.body[start:end] for start, end in asked.spans or EVERYTHING))

    # --- no worker holds the state ----------------------------------------------------------------

    def _recall_proof(self) -> bool:
        """Read stored versions for workers that wait to prove themselves, but only once.

        Return whether they are being read.
        """
        if self._recalled or self._closed:
            return self._recalling
        self._recall()
        return True

    def _recall(self) -> None:
        """Read stored versions on a separate thread, because no worker or keeper has a state."""
        if not self._recalling:
            self._recalling, self._lost = True, False
            threading.Thread(target=self._read_beside, name="recall", daemon=True).start()

    def lose_backup(self) -> None:
        """Forget a backup that workers cannot read, and read again what is stored."""
        self._vault.drop()
        self._recalled, self._nothing, self._lost = False, False, True

    def _read_beside(self) -> None:
        found, proof, vault, version = None, None, self._vault, self._history.version
        for attempt in count():
            try:
                patient = attempt < RECALLS_PATIENT
                found = vault.recall(version, patient=patient)
                proof = None if found.saved is None else vault.recall_proof(found.saved)
                break
            except Exception as error:
                # If this thread ended, the job would wait for ever, and nobody would hear why.
                log.warning("%s: what is stored: %r", self._reports.job, error)
                self._reports.recall_failed(str(error) or type(error).__name__)
                with self._changed:
                    if self._changed.wait_for(lambda: self._closed, RETRY_S):
                        break
        with self._changed:
            self._recalling, self._recalled = False, not self._lost
            if self._closed:
                return
            if self._lost:  # it may be what was found, or the reason that nothing was read
                self._recall()
                return
            self._nothing = vault.backup is None and found is not None and found.saved is None
            if found is not None and found.saved is not None:
                self._take_over(found.saved, found.because, proof)
            roster = self._roster
            if roster.layout is not None and not roster.started and roster.complete:
                self._start()
            self._entrance.look()

    def _take_over(self, saved: Saved, because: str, proof: Saved | None) -> None:
        """Go on from a recalled version unless more is here, and keep it for proofs."""
        vault, roster, layout = self._vault, self._roster, self._roster.layout
        begins = not roster.started and roster.complete
        if self._sources(layout) if layout is not None and begins else roster.holders():
            vault.keep(saved)
        elif saved.reached > (-1 if vault.reached is None else vault.reached):
            vault.adopt(saved)
            self._reports.recalled(saved.reached, because)
        if proof is not None:
            vault.keep(proof)

    def _begin_anew(self, layout: Layout) -> bool:
        """Make a worker with the script's initial state the holder, as nothing is stored either.

        Return False if no worker has that state.
        """
        roster = self._roster
        if self._history.version and not self._go_back(0):
            return False
        fresh = [w for w in layout.workers if roster.members[w].fresh]
        if fresh:
            roster.members[fresh[0]].version = 0
            return True
        for worker in layout.workers:
            roster.lose(worker, "connection", "its state is from a past that was lost")
        return False

    def _go_back(self, version: int) -> bool:
        """Go back to a version. Return False if a newer keeper writes this job's commits."""
        before = self._history.version
        try:
            self._history.rewind(version)
        except Fenced as error:
            self.gave_up(error)
            return False
        self._entrance.went_back(before, version)
        for member in self._roster.members.values():
            if member.version is not None and member.version > version:
                member.version = None  # the job will come to that version again, by other steps
        self._vault.go_back(version)
        self._roster.left = self._roster.unled = None
        return True

    # --- the keeper was restarted -----------------------------------------------------------------

    def _carry_on(self) -> None:
        """Go on after a restart with the workers that are here, as far as their states fit."""
        roster, version = self._roster, self._history.version
        layout = roster.layout
        assert layout is not None
        self._waiting, self._waiting_since_s = False, 0.0
        self.resumed()  # reports of the newest commits may have gone with the keeper before us
        for member in roster.members.values():
            same = member.generation == self._history.generation
            if same and member.version == version - 1:  # the commit has not reached it yet
                member.hears_of_commit(version)
            member.proven |= same  # it took part in the newest commit
        for worker in roster.absent():
            if not roster.is_gone(worker):
                roster.lose(worker, "connection", "it did not come back to the restarted keeper")
        if roster.pending is not None:
            self.apply()
            return
        inside = [m for m in roster.members.values() if m.generation == layout.generation]
        if not inside and roster.complete:  # written down, and sent to no worker
            roster.started = False
            self._start()
            return
        for member in self._strays():
            why = "it was on its way when the keeper restarted"
            roster.lose(member.worker, "connection", why)
        if roster.complete:
            self._ask_for_state()

    def _strays(self) -> list[Member]:
        """Return workers of this layout that are not at the committed version.

        The previous keeper announced the layout to them.
        """
        roster, layout, version = self._roster, self._roster.layout, self._history.version
        if layout is None:
            return []
        inside = [m for m in roster.members.values() if m.generation == layout.generation]
        holding = any(m.version == version for m in inside)
        there = roster.inside() if holding else inside
        return [
            member
            for member in there
            if member.worker in layout.workers
            and (member.generation, member.version) != (layout.generation, version)
        ]

    def _ask_for_state(self) -> None:
        layout = self._roster.layout
        assert layout is not None
        self._vault.choose(self._reports.step_s, self._ready_bytes())
        self._vault.ask(layout, self._history.version)
        told = Commit(
            generation=layout.generation,
            version=self._history.version,
            snapshot=True,
            shards=self._vault.shards(self._roster.crowd),
        )
        for member in self._roster.inside():
            member.post(told)


def _lacks(member: Member, enter: Enter) -> bool:
    """Whether a worker gets the state from the keeper."""
    return member.worker not in enter.holders if enter.catch_up else not enter.holders
