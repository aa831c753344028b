"""What every provider promises, whichever cloud is behind it."""

import asyncio
import time

import pytest
from msgspec.structs import replace
from sellers import POOL_MACHINES, Seller

from cloud.errors import NotOurs, Refused, TokenMismatch, TokenSpent
from cloud.model import DEPLOYMENT_TAG, Machine, MachineState
from cloud.provider import Provider, all_machines


async def listed(provider: Provider) -> dict[str, Machine]:
    return {machine.id: machine for machine in await all_machines(provider)}


async def ended(seller: Seller, provider: Provider, machine: Machine) -> None:
    """Ask for its end: a cloud that remembers says that it is over, and any other says nothing yet."""
    assert await provider.end([machine.ref]) == ([machine.ref] if seller.remembers else [])


async def until_gone(seller: Seller, provider: Provider, machine_id: str) -> Machine | None:
    """Return the machine as ended, or None from a cloud that lists it no more."""
    if seller.remembers:
        return await until_state(seller, provider, machine_id, "terminated")
    seller.pass_time()
    assert machine_id not in await listed(provider)
    return None


async def until_state(seller: Seller, provider: Provider, machine_id: str, state: MachineState):
    deadline_s = time.monotonic() + seller.patience_s
    while time.monotonic() < deadline_s:
        seller.pass_time()
        machine = (await listed(provider))[machine_id]
        if machine.state == state:
            return machine
        await asyncio.sleep(0.02)
    raise AssertionError(f"{machine_id} is {machine.state}, not {state}")


def test_a_catalogue_names_what_is_sold_and_every_pool_has_a_price(seller: Seller):
    """Every pool belongs to the provider and to a type with a price of its own, and is quoted once."""

    async def scene(provider: Provider) -> None:
        places = await provider.places()
        assert len(places) == 2
        found = [await provider.sold(place) for place in places]
        for place, sold in zip(places, found, strict=True):
            assert {pool.place for pool in sold.pools} == {place}
        types = [kind for sold in found for kind in sold.types]
        pools = [pool for sold in found for pool in sold.pools]
        quotes = [quote for place in places for quote in await provider.quotes(place)]
        assert {pool.cloud for pool in pools} == {provider.name}
        assert {pool.type for pool in pools} == {kind.name for kind in types}
        spot = [quote.pool for quote in quotes if quote.market == "spot"]
        assert sorted(spot) == sorted(pools)
        assert all(quote.price_usd_per_h > 0 for quote in quotes)

    seller.play(scene)


def test_a_machine_is_listed_with_all_that_was_asked_for(seller: Seller):
    """Token, pool, market and tags come back on the machine, which then starts to run."""

    async def scene(provider: Provider) -> None:
        wanted = seller.request("t-1")
        (given,) = await provider.launch(wanted)
        assert (given.token, given.pool, given.market) == ("t-1", wanted.pool, "spot")
        assert given.tags == wanted.tags
        machine = await until_state(seller, provider, given.id, "running")
        assert machine.tags == wanted.tags
        assert machine.address or not seller.remembers

    seller.play(scene)


def test_the_same_token_twice_is_one_machine(seller: Seller):
    """A launch that is repeated, because its answer was lost, buys nothing more."""

    async def scene(provider: Provider) -> None:
        (first,) = await provider.launch(seller.request("t-1"))
        (again,) = await provider.launch(seller.request("t-1"))
        assert again.id == first.id
        assert set(await listed(provider)) == {first.id}

    seller.play(scene)


def test_the_same_token_at_once_is_one_machine(seller: Seller):
    """Ten launches under one token that are under way together give one machine."""

    async def scene(provider: Provider) -> None:
        given = await asyncio.gather(*(provider.launch(seller.request("t-1")) for _ in range(10)))
        assert len({machine.id for (machine,) in given}) == 1
        assert len(await listed(provider)) == 1

    seller.play(scene)


def test_a_token_stands_for_one_request_only(seller: Seller):
    """The same token with another request is refused and starts nothing."""

    async def scene(provider: Provider) -> None:
        await provider.launch(seller.request("t-1"))
        with pytest.raises(TokenMismatch):
            await provider.launch(seller.request("t-1", "large"))
        with pytest.raises(TokenMismatch):
            await provider.launch(replace(seller.request("t-1"), bid_usd_per_h=1.0))
        assert len(await listed(provider)) == 1

    seller.play(scene)


def test_a_token_whose_machine_has_ended_is_spent(seller: Seller):
    """A late repetition of an old launch never brings its machine back."""

    async def scene(provider: Provider) -> None:
        (machine,) = await provider.launch(seller.request("t-1"))
        await ended(seller, provider, machine)
        with pytest.raises(TokenSpent):
            await provider.launch(seller.request("t-1"))

    seller.play(scene)


def test_ending_a_machine_twice_is_fine(seller: Seller):
    """The end can be asked for again; a cloud that lists ended machines says who ended them."""

    async def scene(provider: Provider) -> None:
        (machine,) = await provider.launch(seller.request("t-1"))
        await ended(seller, provider, machine)
        first = await until_gone(seller, provider, machine.id)
        await ended(seller, provider, machine)
        again = await until_gone(seller, provider, machine.id)
        if first and again:
            assert (again.state, again.ended_by) == ("terminated", "user")
            assert again.ended_at_s == first.ended_at_s

    seller.play(scene)


def test_what_the_cloud_takes_is_told_from_what_we_give_back(seller: Seller):
    """An evicted machine is listed as ended by the provider, or is gone without our asking."""

    async def scene(provider: Provider) -> None:
        (machine,) = await provider.launch(seller.request("t-1"))
        await until_state(seller, provider, machine.id, "running")
        await seller.take_all(provider)
        if taken := await until_gone(seller, provider, machine.id):
            assert taken.ended_by == "provider"
            assert taken.ended_at_s is not None

    seller.play(scene)


def test_machines_of_others_are_neither_listed_nor_touched(seller: Seller):
    """A list holds our deployment only; ending a foreign machine ends none at all."""

    async def scene(provider: Provider) -> None:
        (ours,) = await provider.launch(seller.request("t-1"))
        (theirs,) = await provider.launch(seller.request("t-2", deployment="theirs"))
        (unmarked,) = await provider.launch(replace(seller.request("t-3"), tags={}))
        assert set(await listed(provider)) == {ours.id}
        for foreign in (theirs.ref, unmarked.ref):
            with pytest.raises(NotOurs, match=DEPLOYMENT_TAG):
                await provider.end([ours.ref, foreign])
        assert (await listed(provider))[ours.id].state != "terminated"
        assert await provider.end([replace(ours.ref, id="i-unknown")]) == []

    seller.play(scene)


def test_a_pool_without_room_refuses_and_sells_again_when_it_has(seller: Seller):
    """The fourth machine of three is refused, its token stays good, and other pools still sell."""

    async def scene(provider: Provider) -> None:
        held = [
            (await provider.launch(seller.request(f"t-{nth}")))[0] for nth in range(POOL_MACHINES)
        ]
        with pytest.raises(Refused) as no:
            await provider.launch(seller.request("t-late"))
        assert (no.value.code, no.value.refusal.scope) == (seller.words["no capacity"], "pool")
        await provider.launch(seller.request("t-other", "far"))
        await provider.end([held[0].ref])
        seller.pass_time()
        assert (await provider.launch(seller.request("t-late")))[0].token == "t-late"

    seller.play(scene)


def test_the_quota_counts_slots_of_all_machines(seller: Seller):
    """On-demand machines count too; what is given back counts no more."""

    async def scene(provider: Provider) -> None:
        wanted = replace(seller.request("t", "large"), market="on_demand")
        held = [(await provider.launch(replace(wanted, token=f"t-{nth}")))[0] for nth in range(2)]
        with pytest.raises(Refused, match=seller.words["limit"]) as no:
            await provider.launch(replace(wanted, token="t-2"))
        assert (no.value.code, no.value.refusal.scope) == (seller.words["quota"], "family")
        await provider.end([held[0].ref])
        seller.pass_time()
        assert (await provider.launch(replace(wanted, token="t-2")))[0].market == "on_demand"

    seller.play(scene)


def test_a_bid_below_the_market_buys_nothing(seller: Seller):
    """The refusal names the price, and nothing was started."""

    async def scene(provider: Provider) -> None:
        with pytest.raises(Refused, match=seller.words["bid"]):
            await provider.launch(replace(seller.request("t-1"), bid_usd_per_h=0.000001))
        assert not await listed(provider)

    seller.play(scene)


def test_what_is_not_sold_is_refused_by_name(seller: Seller):
    """A pool that does not exist is one clear refusal."""

    async def scene(provider: Provider) -> None:
        with pytest.raises(Refused, match=seller.pools["nowhere"].key):
            await provider.launch(seller.request("t-1", "nowhere"))

    seller.play(scene)


def test_machines_of_one_launch_start_all_or_none(seller: Seller):
    """Each has an index; a repetition gives the same ones; one too many for the pool gives none."""

    async def scene(provider: Provider) -> None:
        with pytest.raises(Refused):
            await provider.launch(replace(seller.request("t-1"), count=POOL_MACHINES + 1))
        seller.pass_time()
        assert not await listed(provider)
        wanted = replace(seller.request("t-2"), count=POOL_MACHINES)
        given = await provider.launch(wanted)
        assert [machine.index for machine in given] == list(range(POOL_MACHINES))
        assert {machine.id for machine in await provider.launch(wanted)} == set(
            await listed(provider)
        )

    seller.play(scene)


def test_the_list_of_a_place_is_of_that_place_only(seller: Seller):
    """A machine in one region is not in the list of another."""

    async def scene(provider: Provider) -> None:
        for nth, where in enumerate(("near", "far")):
            pool = seller.pools[where]
            (given,) = await provider.launch(seller.request(f"t-{nth}", where))
            listing = await provider.list(pool.place)
            assert (listing.place, [one.id for one in listing.machines]) == (pool.place, [given.id])

    seller.play(scene)
