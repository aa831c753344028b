"""Each promise of the fake EC2 is broken in turn, and a scene has to notice.

A fake that keeps a promise which no test needs proves nothing; so does a scene that passes whatever
the cloud does.
"""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import test_aws_account as account_scenes
import test_aws_scenes as scenes
from aws_house import AwsHouse
from cloudfake import ec2, ec2_account, ec2_actions, ec2_policy, ec2_reads
from cloudfake.ec2_account import Account, Dials, Refused

Patch = Callable[[pytest.MonkeyPatch], None]


def replaced(where: Any, name: str, what: Callable[[Any], Any]) -> Patch:
    """Put what `what` makes of a thing in the place of that thing."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(where, name, what(getattr(where, name)))

    return patch


def instead_of_refusal(code: str, value: Any) -> Callable[[Any], Any]:
    """Return this value where the true one refuses with this code."""

    def wrap(true: Any) -> Any:
        def broken(*args: Any) -> Any:
            try:
                return true(*args)
            except Refused as refusal:
                if refusal.code != code:
                    raise
                return value(*args) if callable(value) else value

        return broken

    return wrap


def forgets_refused_tokens(true: Any) -> Any:
    def broken(call: Any, order: Any, *more: Any) -> Any:
        try:
            return true(call, order, *more)
        except Refused:
            call.account.tokens.clear()
            raise

    return broken


def in_one_zone(true: Any) -> Any:
    """Read and write tokens as if all zones were one."""

    def broken(call: Any, order: Any, *more: Any) -> Any:
        zone, order.zone = order.zone, "any"
        try:
            return true(call, order, *more)
        finally:
            order.zone = zone

    return broken


def tokens_in_one_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("earlier", "_bind"):
        replaced(ec2_actions, name, in_one_zone)(monkeypatch)


def tokens_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced(ec2_actions, "earlier", lambda _: lambda call, order: None)(monkeypatch)
    replaced(ec2_actions, "_bind", lambda _: lambda *args: None)(monkeypatch)


def stops_only(_: Any) -> Any:
    def broken(self: Account, instance_id: str, at_s: float) -> None:
        self.move(self.instances[instance_id], at_s, "stopped", "Client.InstanceInitiatedShutdown")

    return broken


def without_reason(true: Any) -> Any:
    def broken(*args: Any, **more: Any) -> Any:
        told = true(*args, **more)
        told.pop("StateReason", None)
        return told

    return broken


def without_what_was_before(true: Any) -> Any:
    def broken(call: Any, name: str, entries: Any) -> Any:
        starts = call.params.get("StartTime")
        if name == "SpotPriceHistory" and starts:
            entries = [x for x in entries if x["Timestamp"] >= starts]
        return true(call, name, entries)

    return broken


def first_page_only(true: Any) -> Any:
    def broken(*args: Any) -> Any:
        told = true(*args)
        told.pop("NextToken", None)
        return told

    return broken


def always_public(true: Any) -> Any:
    def broken(self: Any, call: Any) -> None:
        true(self, call)
        self.public = True

    return broken


def plain(scene: Callable[..., None], *args: Any) -> Callable[[], None]:
    return lambda: scene(AwsHouse(Dials(startup_s=10.0)), *args)


def under_policy() -> None:
    house = AwsHouse(Dials(startup_s=10.0))
    account_scenes.with_policy(house, account_scenes.POLICY)
    account_scenes.test_the_policy_keeps_the_manager_from_what_is_not_its_own(house)


def quota_scene() -> None:
    scenes.test_a_refusal_says_how_far_it_reaches(
        AwsHouse(),
        "family",
        "MaxSpotInstanceCountExceeded",
        lambda account: account.quota.update({("g", "spot"): 3}),
    )


SAME_TOKEN = plain(scenes.test_the_same_token_at_once_is_one_machine)
ONE_REQUEST = plain(scenes.test_a_token_stands_for_one_request_and_one_life)
ONE_ZONE = plain(scenes.test_a_token_holds_for_one_zone)
BINDS = plain(scenes.test_a_refused_launch_binds_its_token)
WHOLE = plain(scenes.test_a_gang_that_has_no_room_starts_nothing)
GOES = plain(scenes.test_everything_of_a_launch_carries_our_tags_and_goes_with_its_machine)
SHUTS = plain(scenes.test_a_machine_that_shuts_itself_down_ends_its_bill)
TAKEN = plain(scenes.test_a_machine_that_was_taken_tells_when_and_by_whom)
FOREIGN = plain(scenes.test_machines_of_others_are_neither_listed_nor_touched)
PAGES = plain(scenes.test_a_list_of_many_pages_is_whole_or_an_error)
PRICES = plain(scenes.test_a_price_that_has_not_changed_for_days_is_quoted)
KEYS = plain(scenes.test_keys_close_a_place_with_one_sentence)
SETTINGS = plain(scenes.test_what_can_never_work_is_said_in_one_sentence)
YOUNG = scenes.test_a_young_machine_is_left_out_and_its_end_is_asked_again
FAILS = scenes.test_a_launch_that_fails_after_its_answer_is_failed_and_costs_nothing

MISMATCH, SPENT = "IdempotentParameterMismatch", "IdempotentInstanceTerminated"
BROKEN: dict[str, tuple[Patch, Callable[[], None]]] = {
    "a token is ignored": (tokens_ignored, SAME_TOKEN),
    "another request under a token is taken": (
        replaced(ec2_actions, "earlier", instead_of_refusal(MISMATCH, None)),
        ONE_REQUEST,
    ),
    "a spent token starts again": (
        replaced(ec2_actions, "earlier", instead_of_refusal(SPENT, None)),
        ONE_REQUEST,
    ),
    "a token holds in all zones": (tokens_in_one_zone, ONE_ZONE),
    "a refused request leaves its token free": (
        replaced(ec2_actions, "how_many", forgets_refused_tokens),
        BINDS,
    ),
    "a gang may start in part": (
        replaced(ec2_actions, "how_many", instead_of_refusal("InsufficientInstanceCapacity", 1)),
        WHOLE,
    ),
    "a new id is found at once": (
        replaced(ec2_actions, "draw", lambda _: lambda *key: 0.0),
        YOUNG,
    ),
    "no launch fails after its answer": (
        replaced(Account, "fail", lambda _: lambda self, x, at_s, code: None),
        FAILS,
    ),
    "a launch that fails leaves its disk": (
        replaced(Account, "drop_volume", lambda _: lambda self, volume, at_s, by: None),
        FAILS,
    ),
    "shutdown only ever stops": (replaced(Account, "shut_down", stops_only), SHUTS),
    "a disk stays": (
        replaced(Account, "drop_volume", lambda _: lambda self, volume, at_s, by: None),
        GOES,
    ),
    "a network interface stays": (
        replaced(Account, "drop_nic", lambda _: lambda self, nic, at_s, by: None),
        GOES,
    ),
    "tags of a launch are lost": (
        replaced(ec2_actions, "_tags_for", lambda _: lambda params, kind: {}),
        GOES,
    ),
    "every machine gets a public address": (
        replaced(ec2_actions._Order, "__init__", always_public),
        GOES,
    ),
    "the first hour is paid": (
        replaced(ec2_account, "_free_first_hour", lambda _: lambda line: False),
        TAKEN,
    ),
    "nobody says why a machine ended": (
        replaced(ec2_reads, "described", without_reason),
        TAKEN,
    ),
    "filters let all pass": (
        replaced(ec2_reads, "like", lambda _: lambda told, one: True),
        FOREIGN,
    ),
    "a long list ends with its first page": (replaced(ec2_reads, "paged", first_page_only), PAGES),
    "prices begin with the window": (
        replaced(ec2_reads, "paged", without_what_was_before),
        PRICES,
    ),
    "quotas are not kept": (
        replaced(ec2_actions, "_check_quota", lambda _: lambda call, order, count: None),
        quota_scene,
    ),
    "any signature is right": (
        replaced(ec2, "_signature", lambda _: lambda key, scope, *more: scope.group(5)),
        KEYS,
    ),
    "any date is right": (replaced(ec2, "SKEW_MAX_S", lambda _: 1e9), KEYS),
    "any profile exists": (
        replaced(ec2_actions._Order, "_check_rest", lambda _: lambda self, params, account: None),
        SETTINGS,
    ),
    "any policy allows everything": (
        replaced(ec2_policy, "allows", lambda _: lambda *args: True),
        under_policy,
    ),
}


@pytest.mark.parametrize("promise", sorted(BROKEN))
def test_a_broken_promise_fails_a_scene(promise: str, monkeypatch: pytest.MonkeyPatch):
    patch, scene = BROKEN[promise]
    patch(monkeypatch)
    failed = importlib.import_module("_pytest.outcomes").Failed
    with pytest.raises((Exception, failed)):
        scene()


@pytest.mark.parametrize("scene", [YOUNG, FAILS, quota_scene, under_policy])
def test_the_scenes_pass_while_promises_are_kept(scene: Callable[[], None]):
    """The other scenes are run by their own module in the same form."""
    scene()
