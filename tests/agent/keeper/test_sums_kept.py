"""When the sum of a step goes to the keeper, and what a vault makes of sums that lead on from nothing."""

from pathlib import Path

import msgspec
import pytest
from backups import same
from commit_logs import MemoryCommitLog

from agent.errors import CheckpointError
from agent.keeper.commits import History
from agent.keeper.pending_step import Round
from agent.keeper.roster import Roster
from agent.keeper.storage import vault as vault_module
from agent.keeper.storage.backup import Backup, LoggedSum, Saved
from agent.keeper.storage.sharding import LARGE_SUM_BYTES, SMALL_SUM_BYTES
from agent.keeper.storage.vault import Place, Vault
from agent.layout import Layout, Replica, data_parallel
from agent.messages import JobOrder, Sums
from agent.protocol import Computed, Digest, Prepared, Reached, Snapshot
from agent.store.encoding.format import lay_out
from agent.store.memory import ordinary
from agent.store.shares import Extent

LARGE = 4 * LARGE_SUM_BYTES
FORM = lay_out("l", [("model/l", "U8", (4,))])


@pytest.mark.parametrize(
    ("policy", "size", "copies", "taken"),
    [
        ("auto", LARGE, 2, False),
        ("auto", LARGE, 1, True),
        ("auto", LARGE, 0, True),
        ("auto", LARGE_SUM_BYTES - 1, 2, True),
        ("auto", 0, 2, True),  # none has come yet
        ("always", LARGE, 9, True),
        ("never", 1, 2, False),
        ("never", LARGE, 1, True),
        ("never", LARGE, 0, True),
    ],
)
def test_large_sums_stay_where_two_machines_could_go_on(
    tmp_path: Path, policy: Sums, size: int, copies: int, taken: bool
) -> None:
    vault = vault_of(tmp_path, sums=policy)
    vault.sum_bytes = size
    assert vault.takes_sums(copies) is taken
    vault.insist(60.0)
    assert vault.wants_sum(copies)
    assert vault.takes_sums(copies) is taken


@pytest.mark.parametrize(
    ("policy", "copies", "parted", "taken"),
    [
        ("auto", 1, False, False),
        ("auto", 2, False, False),
        ("never", 1, False, False),
        ("auto", 0, False, True),  # its machine has a notice: what is known to come costs no step
        ("auto", 1, True, True),  # each of several machines has a part, and any may be lost
        ("always", 1, False, True),
    ],
)
def test_sums_that_hold_steps_up_stay_with_the_machine_that_has_the_model(
    tmp_path: Path, policy: Sums, copies: int, parted: bool, taken: bool
) -> None:
    vault = vault_of(tmp_path, sums=policy)
    vault.sum_bytes = 10 * SMALL_SUM_BYTES
    vault.choose(1.0)
    assert vault.takes_sums(copies, parted=parted) is (copies < 2 or policy != "never")
    vault.choose(0.03)
    assert vault.takes_sums(copies, parted=parted) is taken
    vault.choose(0.0)  # nothing has been timed in a new layout
    assert vault.takes_sums(copies, parted=parted) is taken
    vault.choose(0.5)  # what it costs now is more than half of what it may cost
    assert vault.takes_sums(copies, parted=parted) is taken
    vault.choose(1.0)
    assert vault.takes_sums(copies, parted=parted) is (copies < 2 or policy != "never")


def test_sums_are_sent_where_a_loss_would_cost_more_than_is_allowed(tmp_path: Path) -> None:
    vault = vault_of(tmp_path, every=10_000, sums="auto")
    vault.sum_bytes = 10 * SMALL_SUM_BYTES
    vault.choose(0.3)
    assert vault.takes_sums(1), "a minute or more may pass between two states: job.max_replay_s"


# --- the round ------------------------------------------------------------------------------------


def prepared(step: int, *, told: bool) -> Prepared:
    return Prepared(generation=1, step=step, loss=0.5, present=b"\1", told=told, script_step=step)


@pytest.mark.parametrize("told", [(True, False), (False, True), (False, False)])
def test_a_step_whose_sum_stays_with_the_workers_is_whole_when_all_are_prepared(
    told: tuple[bool, bool],
) -> None:
    """Behind a restart one may have heard that it is wanted, and the other not."""
    layout, round_ = data_parallel(1, 2, ("a", "b")), Round(ordinary)
    round_.sums(8).take(0, memoryview(bytes(4)))
    round_.prepared("a", prepared(0, told=told[0]))
    assert not round_.whole(layout)
    round_.prepared("b", prepared(0, told=told[1]))
    assert round_.whole(layout)
    assert round_.end(0, layout)[0] is None
    for worker in "ab":
        round_.prepared(worker, prepared(1, told=True))
    assert not round_.whole(layout)  # the next one's has not come
    round_.sums(4).take(0, memoryview(b"next"))
    assert round_.whole(layout)
    logged, _ = round_.end(1, layout)
    assert logged is not None and (logged.step, bytes(logged.body)) == (1, b"next")


# --- the vault ------------------------------------------------------------------------------------


def vault_of(folder: Path, every: int = 10, sums: Sums = "never") -> Vault:
    order = JobOrder(
        job="job", script="train.py", script_sha="", backup_every_steps=every, sums=sums
    )
    return Vault(order, Place(checkpoints=folder), lambda report: None)


def state(version: int) -> Saved:
    return Saved(
        Backup(generation=1, version=version, layers=(FORM,), bodies={"l": memoryview(bytes(4))}),
        (),
    )


def comes(vault: Vault, layout: Layout, version: int) -> None:
    """A state that was asked for."""
    extents = (Extent("l", 0, 4, 4),)
    share = Snapshot(generation=1, version=version, forms=(FORM,), extents=extents, last=True)
    assert vault.take(share, memoryview(bytes(4)), "w", layout) is not None


def summed(step: int) -> LoggedSum:
    return LoggedSum(step, b"", memoryview(bytes([step])))


def test_states_are_asked_for_as_often_without_sums(tmp_path: Path) -> None:
    layout, vault, asked = data_parallel(1, 2, ("w",)), vault_of(tmp_path, every=4), []
    vault.adopt(state(0))
    for step in range(12):
        assert vault.open
        vault.skip(step)
        if vault.wants:
            asked.append(step + 1)
            vault.ask(layout, step + 1)
            comes(vault, layout, step + 1)
    assert asked == [3, 7, 11], "the first is asked for early, so that a proof can begin with it"
    assert (vault.reached, vault.behind) == (11, 1)


def begun(vault: Vault, version: int, phases: int) -> None:
    """A worker has computed this part of a step of the script, and others may know it."""
    step, phase = divmod(version, phases)
    digest = Digest("l", version, (1.0,))
    computed = Computed(version=version, microbatch=0, batch=digest, loss=0.5, machine="m")
    reached = Reached(version=version, layers=(digest,), machine="m") if phase == 0 else None
    told = msgspec.structs.replace(
        prepared(version, told=True),
        script_step=step,
        phase=phase,
        computed=(computed,),
        reached=reached,
    )
    assert vault.proofs.hear("w", told) == ""
    vault.look()


def test_a_worker_has_a_step_to_prove_where_each_step_ends_with_a_new_state(tmp_path: Path) -> None:
    """No state stays until a whole step lies behind it; the initial one proves nothing."""
    layout, vault, phases = data_parallel(1, 2, ("w",)), vault_of(tmp_path, 2, "always"), 2
    vault.adopt(state(0))
    vault.awaited = True
    for version in range(4 * phases):
        begun(vault, version, phases)
        vault.log(summed(version))
        if (version + 1) % phases == 0:
            vault.ask(layout, version + 1)
            comes(vault, layout, version + 1)
    begun(vault, 4 * phases, phases)
    base = vault.asked(partly=False)
    assert base is not None
    assert (base.backup.version, base.redo[0].step, base.provable) == (2, 2, True)


@pytest.mark.parametrize(
    ("memory_bytes", "asked_at", "most"),
    [(1 << 40, 12, 48), (352, 10, 20), (1, 6, 12)],  # the state has 48 bytes, a sum has 4
)
def test_sums_fill_no_more_memory_than_the_keeper_has_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory_bytes: int, asked_at: int, most: int
) -> None:
    monkeypatch.setattr(vault_module, "REDO_BYTES_FREE", 0)
    form = lay_out("l", [("model/l", "U8", (48,))])
    order = JobOrder(job="job", script="t.py", script_sha="", backup_every_steps=99, sums="always")
    place = Place(checkpoints=tmp_path, memory_bytes=memory_bytes)
    vault, bodies = Vault(order, place, lambda report: None), {"l": memoryview(bytes(48))}
    vault.adopt(Saved(Backup(generation=1, version=1, layers=(form,), bodies=bodies), ()))
    step, wanted = 1, 0
    while vault.open:
        vault.log(LoggedSum(step, b"", memoryview(bytes(4))))
        step += 1
        wanted = wanted or (len(vault.redo) if vault.wants else 0)
    assert (wanted, len(vault.redo)) == (asked_at, most)


def test_sums_behind_a_gap_wait_for_the_state_that_leads_to_them(tmp_path: Path) -> None:
    layout, vault = data_parallel(1, 2, ("w",)), vault_of(tmp_path)
    vault.adopt(state(0))
    vault.log(summed(0))
    vault.skip(1)
    assert (vault.reached, vault.behind) == (1, 1)
    assert vault.adrift
    vault.ask(layout, 3)
    assert not vault.adrift
    for step in (2, 3, 4):  # the third is in the state already
        vault.log(summed(step))
    assert [one.step for one in vault.saved.redo] == [0]
    assert [vault.logged(step) for step in (1, 2)] == [None, None]
    comes(vault, layout, 3)
    assert [one.step for one in vault.redo] == [3, 4]
    assert (vault.reached, vault.behind) == (5, 0)


def test_a_gap_in_what_comes_behind_the_gap_begins_it_anew(tmp_path: Path) -> None:
    layout, vault = data_parallel(1, 2, ("w",)), vault_of(tmp_path)
    vault.adopt(state(0))
    vault.skip(0)
    vault.ask(layout, 1)
    vault.log(summed(1))
    vault.skip(2)
    vault.log(summed(3))
    comes(vault, layout, 1)
    assert (vault.reached, vault.behind) == (1, 3)
    assert vault.adrift
    vault.ask(layout, 4)
    comes(vault, layout, 4)
    assert (vault.reached, vault.behind) == (4, 0)


def test_whoever_goes_back_has_nothing_ahead(tmp_path: Path) -> None:
    vault = vault_of(tmp_path)
    vault.adopt(state(2))
    vault.skip(2)
    vault.log(summed(3))
    vault.go_back(2)
    assert (vault.reached, vault.behind, vault.since) == (2, 0, 2)
    vault.log(summed(2))
    assert same(vault.saved, Saved(vault.backup, (summed(2),)))


@pytest.mark.parametrize("gap", [False, True])
def test_the_next_keeper_finds_the_state_that_reaches_furthest(tmp_path: Path, gap: bool) -> None:
    """The records of the step after a new state have not come, so no worker could prove itself by it. The state before
    is found as long as sums lead on from it as far."""
    layout, place = data_parallel(1, 2, ("w",)), Place(checkpoints=tmp_path, memory=tmp_path / "m")
    order = JobOrder(job="job", script="train.py", script_sha="", sums="never")
    vault = Vault(order, place, lambda report: None)
    vault.ask(layout, 1)
    comes(vault, layout, 1)
    for step in range(1, 8):
        began = Digest("l", step, (1.0,))
        told = msgspec.structs.replace(
            prepared(step, told=True), reached=Reached(version=step, layers=(began,))
        )
        if step == 5:
            vault.ask(layout, step)
            comes(vault, layout, step)
        if step < 5:
            vault.proofs.hear("w", told)
        if gap and step in {3, 4, 6}:
            vault.promise(step, None, vault.records_of(step, None))
            vault.skip(step)
        else:
            vault.promise(step, summed(step), vault.records_of(step, summed(step)))
            vault.log(summed(step))
        vault.look()
    vault.leave()
    found = Vault(order, place, lambda report: None).recall(8, patient=True).saved
    assert found is not None
    assert (found.backup.version, found.reached) == ((5, 6) if gap else (1, 8))


def test_who_has_a_backup_waits_for_nothing_that_is_stored(tmp_path: Path) -> None:
    """A disk that cannot be read does not hold it up."""
    vault = vault_of(tmp_path)
    (tmp_path / "job").write_text("no folder")
    with pytest.raises((CheckpointError, OSError)):
        vault.recall(5, patient=True)
    vault.adopt(state(2))
    assert vault.recall(5, patient=True).saved is None


class Here:
    """A member, as far as it is asked for here."""

    held = None

    def __init__(self, worker: str, machine_id: str, *, noticed: bool) -> None:
        self.worker, self.machine_id, self.noticed = worker, machine_id, noticed


@pytest.mark.parametrize(
    ("owned", "machines", "noticed", "copies"),
    [
        (False, "mmmm", "", 1),
        (False, "mmnn", "", 2),
        (False, "mnop", "p", 3),
        (True, "mmnn", "", 2),
        (True, "mnmn", "", 1),  # each machine has a half of both
        (True, "mnop", "p", 1),
        (True, "mmnn", "m", 1),
    ],
)
def test_two_chains_are_two_copies_if_they_lie_apart(
    owned: bool, machines: str, noticed: str, copies: int
) -> None:
    roster = Roster(History(MemoryCommitLog(), "job"), None, None)
    chains = (
        Replica(workers=("a", "b"), first=0, count=1),
        Replica(workers=("c", "d"), first=1, count=1),
    )
    roster.layout = Layout(generation=-1, microbatches=2, replicas=chains, owned=owned)
    roster.members = {
        worker: Here(worker, machine_id, noticed=machine_id == noticed)
        for worker, machine_id in zip("abcd", machines, strict=True)
    }
    assert roster.copies("abcd") == copies
