"""A worker to which the state does not come, as over a link at a thousandth of its speed, holds nobody up for ever."""

from pathlib import Path

import pytest
from players import House, begun

from agent.keeper import layouts, roster
from agent.messages import WorkerLost
from agent.protocol import Enter, PeerBroken


@pytest.fixture
def house(tmp_path: Path) -> House:
    return begun(House(tmp_path), "w1", "w2", commits=3)


def joins_in_vain(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is let in, hears of the layout that it is in, and nothing more of the state comes."""
    newcomer = house.joins("w3")
    house.commits(2)
    house.until("it to be ready", lambda: "w3" in house.ready)
    take = newcomer.take
    monkeypatch.setattr(
        newcomer,
        "take",
        lambda message, payload: None if isinstance(message, Enter) else take(message, payload),
    )
    house.begins("w1", "w2", "w3")


def lost(house: House) -> set[str]:
    return {told.worker for told in house.said.reports if isinstance(told, WorkerLost)}


def test_who_alone_lacks_the_state_is_lost_when_the_layout_is_asked_for_again(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layouts, "HUNG_S", 0.0)
    joins_in_vain(house, monkeypatch)
    house.begins("w1", "w2", "w3")
    assert lost(house) == {"w3"}
    house.players.pop("w3")
    house.begins("w1", "w2")
    house.commits()


def test_a_transfer_that_has_just_begun_is_not_late(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another shape for the same workers may be asked for at any time."""
    joins_in_vain(house, monkeypatch)
    house.begins("w1", "w2", "w3")
    assert lost(house) == set()


def test_a_large_state_has_the_time_that_its_size_takes(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layouts, "HUNG_S", 0.0)
    monkeypatch.setattr(roster, "HUNG_BYTES_PER_S", 1e-6)
    joins_in_vain(house, monkeypatch)
    house.begins("w1", "w2", "w3")
    assert lost(house) == set()


def test_who_is_asked_for_with_others_is_not_late(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker is gone, so the transfer begins anew for that reason."""
    monkeypatch.setattr(layouts, "HUNG_S", 0.0)
    joins_in_vain(house, monkeypatch)
    house.dies("w2")
    house.begins("w1", "w3")
    assert lost(house) == {"w2"}


@pytest.mark.parametrize("lives", [True, False])
def test_a_newcomer_that_cannot_reach_the_only_holder_is_lost_and_not_that_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lives: bool
) -> None:
    """The smaller name dials, so w10 alone says that its connection to w9 broke. Without w9 the job would go back to what the
    keeper has. If w9 is not heard any more, it is gone."""
    house = begun(House(tmp_path), "w9", commits=3)
    newcomer = house.joins("w10")
    house.commits(2)
    house.until("it to be ready", lambda: "w10" in house.ready)
    monkeypatch.setattr(newcomer, "handed_over", lambda _: newcomer.state)
    monkeypatch.setattr(newcomer, "catch_up", lambda: None)
    house.begins("w9", "w10")
    holder = house.players["w9"]
    if not lives:
        monkeypatch.setattr(holder, "hear", lambda: False)
    newcomer.say(PeerBroken(peer="w9", generation=house.generation))
    house.until("one to be lost", lambda: lost(house))
    assert lost(house) == {"w10" if lives else "w9"}
