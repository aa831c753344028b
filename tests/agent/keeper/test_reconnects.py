"""Workers that dial again while the keeper lives: what is known of them is known of them still."""

from pathlib import Path

import pytest
from players import FORM, SIZE, House, begun

from agent.keeper import member
from agent.protocol import Done, Enter, Noticed, Snapshot
from agent.store.shares import Extent
from cloud.clock import CLOCK


@pytest.fixture
def house(tmp_path: Path) -> House:
    """Two workers, who have kept the sums of the last steps to themselves."""
    house = begun(House(tmp_path, sums="never", backup_every_steps=50), "a", "b", commits=8)
    for player in house.players.values():
        player.sends_sums = False
    house.commits(2)
    assert (house.version, house.job.vault.reached) == (10, 8)
    return house


def dials_again(house: House, name: str) -> None:
    """Before the keeper has noticed that the connection was broken."""
    player = house.players[name]
    assert player.layout is not None
    player.hello = {
        "generation": player.layout.generation,
        "version": player.version,
        "proven": True,
    }
    player.come()


def test_who_hears_of_a_commit_late_holds_it(house: House) -> None:
    """Its connection broke before the commit came; the others are lost, and the step is with it."""
    for player in house.players.values():
        player.plays()
    one = house.players["a"]
    assert (house.version, one.version) == (11, 10)
    dials_again(house, "a")
    one.plays()
    house.settles()
    assert one.version == 11
    right = one.state.tolist()
    house.dies("b")
    house.begins("a")
    assert (house.version, one.version, one.state.tolist()) == (11, 11, right)


def test_who_has_not_heard_of_its_layout_hears_of_it_again(house: House) -> None:
    """All others wait for it."""
    house.lay_out("a", "b", when="now")
    house.players["b"].hear()
    one = house.players["a"]
    dials_again(house, "a")
    assert one.layout is not None and one.layout.generation == house.generation
    house.commits(2)
    assert house.version == 12


def test_who_was_being_sent_the_state_is_lost(house: House) -> None:
    """Nobody knows what of it has come; all others would wait for it for ever."""
    house.dies("a", "b")
    one, two = house.joins("c"), house.joins("d")
    house.until("both", lambda: {"c", "d"} <= {*house.ready})
    take = two.take
    two.take = lambda message, payload: (
        take(message, payload) if isinstance(message, Enter) else None
    )  # type: ignore[method-assign]
    house.begins("c", "d")
    assert one.holds and two.layout is not None and not two.holds
    del two.take
    two.hello = {"generation": house.generation, "version": None, "proven": True}
    two.come()
    assert house.job.roster.is_gone("d")
    house.begins("c")
    house.commits(2)


def test_a_notice_holds_for_who_comes_later_from_that_machine(house: House) -> None:
    """It goes all the same, so it is no copy of the state that could go on alone."""
    roster = house.job.roster
    assert roster.copies("ab") == 2
    house.job.notice("b", CLOCK.now_s() + 1000.0)
    assert roster.copies("ab") == 1
    dials_again(house, "b")
    assert roster.copies("ab") == 1
    told = [each for each, _ in house.players["b"].line.came if isinstance(each, Noticed)]
    assert len(told) == 1
    assert 0.0 < told[0].left_s <= 1000.0


def test_a_machine_that_was_announced_and_not_taken_is_a_copy_again(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manager takes it back, too. Without it the sum of each step would go to the keeper for good."""
    roster = house.job.roster
    house.job.notice("b", CLOCK.now_s())
    assert roster.copies("ab") == 1
    monkeypatch.setattr(member, "STAYS_S", 0.0)
    assert roster.copies("ab") == 2
    dials_again(house, "b")
    assert roster.copies("ab") == 2


def test_who_has_not_heard_that_all_is_stored_hears_it_again(tmp_path: Path) -> None:
    """Its script goes on behind its loop only then."""
    house = begun(House(tmp_path), "a", commits=3)
    one = house.players["a"]
    last = Snapshot(
        generation=house.generation,
        version=3,
        forms=(FORM,),
        extents=(Extent("l", 0, SIZE, SIZE),),
        last=True,
        final=True,
    )
    one.say(last, one.state.tobytes())
    told = one.line
    house.until("it to be stored", lambda: any(isinstance(each, Done) for each, _ in told.came))
    dials_again(house, "a")
    assert any(isinstance(each, Done) for each, _ in one.line.came)
    house.job.close()
