"""Bad days of an Azure subscription: others' machines, huge answers, keys that end in the middle."""

import pytest
from azure_account import OURS, PLACE, play, request
from cloudfake.arm import ArmDoor, Dials

from cloud.errors import NotAllowed, NotOurs
from cloud.model import DEPLOYMENT_TAG, Ref


def test_a_machine_made_by_hand_with_our_tags_is_neither_listed_nor_ended():
    """A copy of one of ours has all of its tags, and another name than they say."""
    door = ArmDoor()

    async def scene(provider):
        await provider.launch(request("t-1"))
        door.pass_s(41)
        door.plant("copy-of-t-1", door.vms["t-1"].tags)
        door.plant("mine", {DEPLOYMENT_TAG: OURS})
        assert [machine.id for machine in (await provider.list(PLACE)).machines] == ["t-1"]
        for name in ("copy-of-t-1", "mine"):
            with pytest.raises(NotOurs, match=DEPLOYMENT_TAG):
                await provider.end([Ref(PLACE, "t-1"), Ref(PLACE, name)])
        assert door.vms["t-1"].state != "Deleting"

    play(door, scene)


def test_ten_thousand_foreign_machines_are_only_pages_to_read():
    """Ours is found among them, none of them is looked at one by one, and none is touched."""
    door = ArmDoor(dials=Dials(page=1000))
    for nth in range(10_000):
        door.plant(f"web-{nth}", {})

    async def scene(provider):
        await provider.launch(request("t-1"))
        door.pass_s(41)
        before = len(door.called)
        listing = await provider.list(PLACE)
        assert [machine.id for machine in listing.machines] == ["t-1"]
        assert not listing.leftovers
        assert len(door.called) - before < 40

    play(door, scene)
    assert not door.books.touched(OURS)


def test_keys_that_expire_in_the_middle_of_a_list_lose_no_machine():
    """The second page is refused, so there is no list: nothing is missing and nothing is ended."""
    door = ArmDoor(dials=Dials(page=2))
    tokens = dict(door._tokens)

    async def scene(provider):
        for nth in range(5):
            await provider.launch(request(f"t-{nth}"))
        door.pass_s(41)
        tokens.update(door._tokens)
        listed = iter(range(99))

        def allowed(action):
            if action.endswith("virtualMachines/read") and next(listed) == 1:
                door._tokens.update(dict.fromkeys(door._tokens, 0.0))
            return True

        door.allowed = allowed
        with pytest.raises(NotAllowed, match=r"ExpiredAuthenticationToken.*sign in again"):
            await provider.list(PLACE)
        door.allowed = lambda action: True
        door._tokens.update(tokens)
        assert len((await provider.list(PLACE)).machines) == 5

    play(door, scene)
    assert not door.books.bought_twice()


def test_an_answer_of_ten_megabytes_is_read_and_its_sentence_is_short():
    """A machine with a huge tag is listed; an error's text is cut to one line."""
    door = ArmDoor()
    door.plant("huge", {"note": "x" * 10_000_000})

    async def scene(provider):
        await provider.launch(request("t-1"))
        assert [machine.id for machine in (await provider.list(PLACE)).machines] == ["t-1"]
        door.allowed = lambda action: False
        door.speaker = ""
        with pytest.raises(NotAllowed) as refused:
            await provider.list(PLACE)
        assert len(str(refused.value)) < 1000

    play(door, scene)
