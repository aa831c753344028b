"""Keepers that are started again while workers live, at moments at which the next one has no state yet."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from players import MICROBATCHES, SIZE, House, begun

from agent.keeper import layouts
from agent.keeper.storage.memory_log import root_of
from agent.keeper.storage.recovery import Found
from agent.layout import Layout
from agent.messages import CheckpointWritten, Progress, RecallFailed, WorkerLost
from agent.protocol import LayersAsked, Ready


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "RECONNECT_S", 0.05)


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[..., House]]:
    """A house, with memory that outlives the keeper or without."""
    root = root_of(tmp_path)

    def make(*, lasting: bool, **options: object) -> House:
        house = House(tmp_path, **options)
        house.memory = root if lasting else None
        house.open()
        return house

    yield make
    shutil.rmtree(root, ignore_errors=True)


def restarts(house: House, layout: Layout) -> None:
    house.job.forsake()
    house.open()
    house.job.restore(layout)


def comes(house: House, name: str, **hello: object) -> None:
    """A worker that lived on dials the new keeper."""
    player = house.players[name]
    layout = player.layout
    player.hello = {
        "generation": -1 if layout is None else layout.generation,
        "version": player.version if player.holds else None,
        "proven": player.let_in or player.holds,
        **hello,
    }
    player.come()


def writes(house: House) -> None:
    house.job.write_checkpoint()
    reports = house.said.reports
    house.until("a checkpoint", lambda: any(isinstance(one, CheckpointWritten) for one in reports))


@pytest.mark.parametrize("lasting", [True, False])
@pytest.mark.parametrize("within", [7, 8])
def test_commits_go_on_behind_a_restart_between_two_commits_of_a_step(
    made: Callable[..., House], within: int, lasting: bool
) -> None:
    """Workers send a state where a step begins, so the step is ended without one, and newcomers can prove themselves."""
    house = begun(made(lasting=lasting, phases=3, backup_every_steps=4), "a", "b", commits=within)
    layout = house.players["a"].layout
    assert layout is not None
    restarts(house, layout)
    for name in "ab":
        comes(house, name)
    house.commits(6)
    backup = house.job.vault.backup
    assert backup is not None and backup.version == 9
    house.joins("c")
    house.commits(3)
    house.until("the newcomer", lambda: "c" in house.ready)
    assert house.version == within + 9


def test_all_are_lost_behind_a_restart_between_two_commits_of_a_step(
    made: Callable[..., House],
) -> None:
    """What is committed before the next keeper has a state follows in memory on what the one before left there."""
    house = begun(made(lasting=True, phases=3, backup_every_steps=4), "a", commits=7)
    layout = house.players["a"].layout
    assert layout is not None
    restarts(house, layout)
    comes(house, "a")
    house.commits(1)
    assert house.job.vault.backup is None
    right = house.players["a"].state.tolist()
    house.dies("a")
    newcomer = house.joins("b")
    house.begins("b")
    house.until("it to go on", lambda: newcomer.holds)
    assert (newcomer.version, newcomer.state.tolist()) == (8, right)
    house.commits(3)


@pytest.mark.parametrize("lasting", [True, False])
def test_a_layout_with_another_worker_behind_a_restart_between_two_commits(
    made: Callable[..., House], lasting: bool
) -> None:
    """The holder is in the middle of a step, and nobody else can be brought there from it: what is stored is gone on from."""
    house = begun(made(lasting=lasting, phases=3, backup_every_steps=4), "a", commits=6)
    if not lasting:
        writes(house)
    house.joins("b")
    house.commits(1)
    house.until("the newcomer", lambda: "b" in house.ready)
    layout = house.players["a"].layout
    assert layout is not None
    house.players["b"].let_in = True
    restarts(house, layout)
    for name in "ab":
        comes(house, name)
    house.players["a"].plays = lambda: None  # type: ignore[method-assign]
    house.begins("a", "b")
    del house.players["a"].plays
    house.until("both to go on", lambda: all(one.holds for one in house.players.values()))
    assert house.version == (7 if lasting else 6)
    house.commits(3)


@pytest.mark.parametrize(("commits", "step"), [(6, 2), (7, 2), (8, 2), (9, 3)])
def test_a_restarted_keeper_counts_in_steps_of_the_script(
    made: Callable[..., House], commits: int, step: int
) -> None:
    """The manager does, and a step of this script has three commits."""
    house = begun(made(lasting=False, phases=3, backup_every_steps=4), "a", commits=commits)
    layout = house.players["a"].layout
    assert layout is not None
    house.said.reports.clear()
    restarts(house, layout)
    ready = Ready(microbatches=MICROBATCHES, steps_total=1000, state_bytes=SIZE)
    comes(house, "a", ready=ready)
    (told,) = [one.step for one in house.said.reports if isinstance(one, Progress)]
    assert told == step


def test_a_backup_that_is_lost_while_what_is_stored_is_read(made: Callable[..., House]) -> None:
    """Nothing was read as long as it was here; so it is read then, and not taken for nothing."""
    house = begun(made(lasting=False, backup_every_steps=4), "a", commits=3)
    layout = house.players["a"].layout
    assert layout is not None
    restarts(house, layout)
    comes(house, "a")
    house.commits(3)
    writes(house)
    right, vault = house.players["a"].state.tolist(), house.job.vault
    recall, regrouping = vault.recall, house.job._regrouping

    def recall_late(committed: int, *, patient: bool) -> Found:
        found = recall(committed, patient=patient)
        if vault.backup is not None:
            regrouping.lose_backup()
        return found

    vault.recall = recall_late  # type: ignore[method-assign]
    house.dies("a")
    regrouping._recall_proof()
    house.settles()
    newcomer = house.joins("b")
    house.begins("b")
    house.until("it to go on", lambda: newcomer.holds)
    assert (house.version, newcomer.state.tolist()) == (6, right)


def test_a_layout_without_the_holders_was_written_and_nobody_had_heard_of_it(
    made: Callable[..., House], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker dials the next keeper first, which waits for those that have the newest version."""
    monkeypatch.setattr(layouts, "RECONNECT_S", 20.0)
    house = begun(made(lasting=False, backup_every_steps=4), "a", commits=8)
    right = house.players["a"].state.tolist()
    newcomer = house.joins("b")
    house.until("the newcomer", lambda: "b" in house.ready)
    newcomer.let_in = True
    restarts(house, house.lay_out("b"))
    comes(house, "b")
    assert house.job._regrouping.waits
    comes(house, "a")
    house.until("it to go on", lambda: newcomer.holds)
    assert (house.version, newcomer.state.tolist()) == (8, right)


def test_nobody_comes_who_has_the_newest_version(made: Callable[..., House]) -> None:
    """The layout's workers are waited for no longer than others after a restart."""
    house = begun(made(lasting=False, backup_every_steps=4), "a", commits=8)
    newcomer = house.joins("b")
    house.until("the newcomer", lambda: "b" in house.ready)
    newcomer.let_in = True
    restarts(house, house.lay_out("b"))
    comes(house, "b")
    house.until("it to go on without", lambda: newcomer.holds)
    assert house.version == 0


def test_what_cannot_be_read_for_an_unforeseen_reason_is_read_again(
    made: Callable[..., House], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store's library has errors of many kinds; without an answer the job would wait for ever."""
    monkeypatch.setattr(layouts, "RETRY_S", 0.01)
    house = begun(made(lasting=False, backup_every_steps=4), "a", commits=6)
    writes(house)
    house.dies("a")
    house.job.forsake()
    house.open()
    recall, vault, tries = house.job.vault.recall, house.job.vault, []

    def recall_late(committed: int, *, patient: bool) -> Found:
        tries.append(patient)
        if len(tries) == 1:
            raise RuntimeError("the library has given up")
        return recall(committed, patient=patient)

    vault.recall = recall_late  # type: ignore[method-assign]
    house.joins("b")
    house.until("it to be ready", lambda: "b" in house.ready)
    house.begins("b")
    house.until("it to go on", lambda: house.players["b"].holds)
    assert house.version == 6
    (said,) = [one for one in house.said.reports if isinstance(one, RecallFailed)]
    assert said.error == "the library has given up"


def test_a_commit_that_cannot_be_prepared_holds_nothing_up(
    made: Callable[..., House], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker whose message brought it about is lost, and the others commit on."""
    house = begun(made(lasting=True, backup_every_steps=4), "a", "b", commits=5)
    with monkeypatch.context() as patch:

        def no_room(*_: object) -> None:
            raise MemoryError("no room for a record")

        patch.setattr(house.job.vault, "promise", no_room)
        house.players["a"].plays()
        with pytest.raises(MemoryError):
            house.players["b"].plays()
        house.dies("b")
    house.begins("a")
    house.commits(2)
    assert house.version == 7


def test_who_asks_a_restarted_keeper_for_layers_of_the_layout_before_is_lost_as_a_stray(
    made: Callable[..., House],
) -> None:
    """It was about to get them from the earlier keeper, and this one waits for other workers and has none yet."""
    house = made(lasting=False)
    begun(house, "a", "b", commits=2)
    asks = house.players["a"]
    layout = asks.layout
    assert layout is not None
    restarts(house, layout)
    asks.holds = False
    comes(house, "a", proven=True)
    asks.say(LayersAsked(generation=layout.generation, layers=("l",)))
    assert not house.job.roster.is_gone("a")
    house.players["b"].holds = False
    comes(house, "b", proven=True)
    house.until("its loss", lambda: house.job.roster.is_gone("a"))
    lost = [told for told in house.said.reports if isinstance(told, WorkerLost)]
    assert [told.detail for told in lost if told.worker == "a"][:1] == [
        "it was on its way when the keeper restarted"
    ]
