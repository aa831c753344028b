"""The guard of live runs, on the fakes: nothing beyond the cap, nothing left, every call said."""

import sys
from pathlib import Path

import pytest
import test_providers
from msgspec.structs import replace
from sellers import AwsSeller, AzureSeller

sys.path.insert(0, str(Path(__file__).parents[1] / "live"))

from live_guard import CapReached
from live_seller import GuardedSeller, Order, seller_of

from cloud.model import DEPLOYMENT_TAG


def guarded(cap_usd: float) -> tuple[GuardedSeller, AwsSeller, list[str]]:
    """A seller with a cap, the account in it, and what it says."""
    inner, said = AwsSeller(), list[str]()
    return GuardedSeller(lambda: inner, "ours", cap_usd, said.append), inner, said


def test_a_launch_beyond_the_cap_is_not_made():
    """Two machines of $1.006 fit into $2.50; a machine counts for a whole hour even if it was ended."""
    seller, inner, said = guarded(2.5)

    async def scene(provider):
        for nth in range(2):
            (machine,) = await provider.launch(seller.request(f"t-{nth}"))
            await provider.end([machine.ref])
        with pytest.raises(CapReached, match=r"at most \$1\.01, and \$0\.49 are left"):
            await provider.launch(seller.request("t-2"))

    seller.play(scene)
    assert inner.house.door.calls["RunInstances"] == 2
    assert seller.left_usd == pytest.approx(2.5 - 2 * 1.006)
    assert sum(line.startswith("launch ") for line in said) == 2


@pytest.mark.parametrize("kind", [AwsSeller, AzureSeller])
def test_what_a_scene_leaves_is_ended_even_when_it_fails(kind):
    """The run ends with an account that lists nothing of it."""
    inner = kind()
    seller = GuardedSeller(lambda: inner, "ours", 10.0, lambda line: None)

    async def scene(provider):
        await provider.launch(seller.request("t-1"))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        seller.play(scene)
    books = inner.house.account.books if kind is AwsSeller else inner.door.books
    for _ in range(60):  # a disk goes when its machine is gone
        inner.pass_time()
    assert not books.alive("ours", ["machine", "disk"])
    assert not books.touched("ours")


def test_a_machine_that_the_run_could_not_end_is_never_started():
    """One without our tag would cost until somebody finds it."""
    seller, inner, _ = guarded(10.0)

    async def scene(provider):
        foreign = replace(seller.request("t-1"), tags={DEPLOYMENT_TAG: "theirs"})
        with pytest.raises(AssertionError, match="nothing could end"):
            await provider.launch(foreign)

    seller.play(scene)
    assert inner.house.door.calls["RunInstances"] == 0


def test_each_scene_has_tokens_that_no_other_had():
    """A token lives for a day on EC2; the scene sees its own."""
    seller, inner, _ = guarded(10.0)
    for _ in range(2):

        async def scene(provider):
            (machine,) = await provider.launch(seller.request("t-1"))
            assert machine.token == "t-1"
            assert machine.tags[DEPLOYMENT_TAG] == "ours"

        inner.house.calls._executors.clear()
        seller.play(scene)
    assert len({token for _, _, token in inner.house.account.tokens}) == 2


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"SPOT_LIVE": "aws"}, "SPOT_LIVE_USD"),
        ({"SPOT_LIVE": "gcp", "SPOT_LIVE_USD": "1"}, "aws, azure"),
        ({"SPOT_LIVE": "aws-wet", "SPOT_LIVE_USD": "1"}, "aws-dry"),
        ({"SPOT_LIVE": "aws", "SPOT_LIVE_USD": "-1"}, "may cost"),
    ],
)
def test_an_order_without_a_cap_or_a_cloud_is_refused(env, said):
    """A run without a limit cannot be asked for."""
    with pytest.raises(ValueError, match=said):
        Order(env)


@pytest.mark.parametrize("cloud", ["aws-dry", "azure-dry"])
def test_a_dry_run_plays_the_scenes_and_says_every_call(cloud):
    """The cheapest scene and the dearest one: what is said is what the account saw, each request."""
    said = list[str]()
    seller = seller_of(Order({"SPOT_LIVE": cloud, "SPOT_LIVE_USD": "5"}), said.append)
    test_providers.test_the_same_token_twice_is_one_machine(seller)
    assert [line.partition(" ")[0] for line in said].count("launch") == 2
    assert any(line.startswith("end ") for line in said)
    buys = {"aws-dry": "run_instances {'ImageId'", "azure-dry": "PUT /subscriptions/"}[cloud]
    assert sum(buys in line for line in said) == {"aws-dry": 2, "azure-dry": 1}[cloud]
    test_providers.test_what_the_cloud_takes_is_told_from_what_we_give_back(seller)
    assert any(line.startswith("interrupt ") for line in said)
    assert 0 < seller.left_usd < 5
