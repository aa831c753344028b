"""`plan` on real clouds: quota, score and the price of a second zone beside each offer."""

import pytest
from test_check_clouds import arm, ec2

from cloud.model import InstanceType, Place, Pool, Room, Sold, Traits
from orchestrator.sale import PlannedSale, second_zones

assert ec2, arm  # fixtures
ONLY = ("--set", "local.enabled=false", "--steps", "400", "--step-s", "1.5")


def test_offers_have_the_room_and_the_score_of_the_account(shell, ec2):
    """The quota is counted in machines of the offer's own size; scores are of zones, by their names."""
    shell.script("train.py")
    ec2.account.quota["g", "spot"] = 10
    ec2.account.room["us-east-1b", "g5.xlarge", "spot"] = 0
    ec2.account.room["us-east-1b", "g5.12xlarge", "spot"] = 0
    answer = shell("plan", "train.py", *ONLY, "--json")
    assert answer.code == 0, answer.err
    offers = {(x["pool"], x["market"]): x for x in answer.json["offers"]}
    near, other = "aws/us-east-1a/g5.xlarge", "aws/us-east-1b/g5.xlarge"
    assert offers[near, "spot"]["room"] == 2
    assert offers[near, "on_demand"]["score"] is None
    assert offers["aws/us-east-1a/g5.12xlarge", "spot"]["room"] == 0
    assert offers[near, "spot"]["score"] > offers[other, "spot"]["score"] == 1
    assert answer.json["expected_cost_usd"] > 0
    assert answer.json["source"] == "aws/us-east-1"
    assert not ec2.account.instances
    text = shell("plan", "train.py", *ONLY).out
    assert "room" in text
    assert "/10" in text
    assert "a second zone on aws: $0.0200 per GB between zones, both ways" in text


def test_a_place_that_cannot_be_asked_is_said(shell, ec2):
    """The others are shown; with none at all the sentence is the answer."""
    shell.script("train.py")
    ec2.silent.add("us-east-1")
    answer = shell("plan", "train.py", *ONLY)
    assert answer.code == 2
    assert "aws/us-east-1" in answer.err
    both = shell("plan", "train.py", "--steps", "4", "--step-s", "1")
    assert both.code == 0
    assert "aws/us-east-1: " in both.out
    assert "local/" in both.out


def test_an_exact_plan_mixes_no_accelerators_and_says_so(shell, ec2):
    """Processors here and cards there: all are shown, those of one kind are bought, and one line says why."""
    shell.script("train.py")
    told = ("plan", "train.py", "--steps", "400", "--step-s", "1.5")
    plan = shell(*told, "--json").json
    assert plan["exact"] is True
    assert sorted(plan["accelerators"]) == ["a10g", "cpu"]
    bought = {one["pool"].partition("/")[0] for one in plan["offers"] if one["chosen"]}
    assert len(bought) == 1
    out = " ".join(shell(*told).out.split())
    assert "a10g and cpu are not mixed; exact = false would mix them" in out
    mixed = " ".join(shell(*told, "--set", "job.exact=false").out.split())
    assert "exact = false: machines that round differently train together" in mixed


def test_a_missing_permission_for_scores_keeps_nothing_from_being_shown(shell, ec2):
    """It is one line; the offers have no score."""
    shell.script("train.py")
    from cloudfake.ec2 import Key

    reads = ["ec2:Describe*", "servicequotas:*", "pricing:*"]
    policy = {"Statement": [{"Effect": "Allow", "Action": reads, "Resource": "*"}]}
    ec2.keys["AKIDTEST"] = Key(secret="secret", policy=policy)
    answer = shell("plan", "train.py", *ONLY)
    assert answer.code == 0, answer.err
    assert "no placement scores" in answer.out
    assert "ec2:GetSpotPlacementScores" in answer.out


def test_azure_has_its_quota_and_score_and_no_price_between_zones(shell, arm):
    """Zones of Azure exchange bytes for nothing, so nothing is said of a second one."""
    shell.script("train.py")
    arm.dials = type(arm.dials)(quotas={"lowPriorityCores": 8})
    answer = shell("plan", "train.py", *ONLY, "--json")
    assert answer.code == 0, answer.err
    offers = {(x["pool"], x["market"]): x for x in answer.json["offers"]}
    near = "azure/eastus-1/Standard_NC4as_T4_v3"
    assert offers[near, "spot"]["room"] == 2
    assert offers[near, "spot"]["score"] == "High"
    assert offers[near, "on_demand"]["score"] is None
    assert answer.json["second_zones"] == []


@pytest.mark.parametrize(
    ("gradient_bytes", "slots", "usd_per_step"),
    [(40e6, 2, 0.0016), (5.2e9, 2, 0.208), (28e9, 2, 1.12), (5.2e9, 8, 0.832), (5.2e9, 1, 0.208)],
)
def test_a_second_zone_costs_what_crosses_it(gradient_bytes, slots, usd_per_step):
    """Ten million parameters, 1.3 and 7 billion in fp32 on two machines; more machines send more."""
    traits = {"aws": Traits(billing="aws_today", zone_usd_per_gb=0.02)}
    (one,) = second_zones(traits, gradient_bytes, slots, steps=1000)
    assert one.usd_per_step == pytest.approx(usd_per_step)
    assert one.usd_per_job == pytest.approx(1000 * usd_per_step)


def test_the_room_of_an_offer_is_the_least_of_its_quotas():
    """A quota of the family and one of all; of the other market none counts."""
    place = Place("azure", "r")
    pool = Pool("azure", "r", "r-1", "small")
    kind = InstanceType(
        name="small",
        cloud="azure",
        slots=1,
        memory_bytes=1,
        on_demand_usd_per_h=1.0,
        vcpus=4,
        family="f",
    )
    rooms = [
        Room(place=place, market="on_demand", family="f", vcpus_max=40, vcpus_used=0),
        Room(place=place, market="on_demand", vcpus_max=20, vcpus_used=9),
        Room(place=place, market="on_demand", family="g", vcpus_max=0, vcpus_used=0),
        Room(place=place, market="spot", vcpus_max=0, vcpus_used=3),
    ]
    sold = Sold(types=(kind,), pools=(pool,), rooms=tuple(rooms))
    sale = PlannedSale(places={place: sold}, quotes=(), source="")
    assert (sale.room(pool, "on_demand"), sale.room(pool, "spot")) == (2, 0)
