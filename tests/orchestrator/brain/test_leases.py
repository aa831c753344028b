"""Machines: bought once, adopted or ended, given back, lost; and never one that is not ours."""

import itertools
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from cloud.errors import Refused, Unknown
from cloud.model import Place
from orchestrator.actions import Launch, ListMachines, Note, StartWorker, StopWorker, Terminate
from orchestrator.brain.holdings import leases
from orchestrator.brain.holdings.ledger import committed_usd, on_demand_usd, spent_usd
from orchestrator.events import ListFailed, ManagerStarted, Tick
from orchestrator.formatting import duration, usd
from orchestrator.state import IllegalTransition, move_lease
from orchestrator.view_builder import view_of
from orchestrator.world import decode_state, encode_state


def test_the_intent_is_an_action_with_a_token_price_and_reason(hand):
    """What is bought is said before it is: token, pool, price and why, in one line with numbers."""
    h = hand()
    h.start()
    h.submit(slots_max=2)
    launches = h.only(h.wait(2.0), Launch)
    assert launches
    assert len({launch.request.token for launch in launches}) == len(launches)
    for launch in launches:
        assert launch.request.tags["orchestrator-deployment"] == "test"
        assert launch.because.startswith("at $0.0")
        assert "per 1,000" in launch.because
        assert "next best" in launch.because
    bought = next(s for s in h.state.sentences if s.what.startswith("buy "))
    assert bought.what in {"buy small in east-a (spot)", "buy large in east-a (spot)"}


def test_machines_are_counted_as_long_as_they_cost_something(hand):
    """The number of machines stands beside their price per hour: what is only intended is in neither."""
    h = hand()
    launch = h.orders()
    view = view_of(h.state, h.at_s)
    assert (
        view.jobs[0].machines,
        view.cost.machines,
        sum(pool.held for pool in view.pools),
        view.cost.now_usd_per_h,
    ) == (0, 0, 0, 0.0)
    h.launched(launch)
    view = view_of(h.state, h.at_s)
    assert (view.jobs[0].machines, view.cost.machines) == (1, 1)
    assert sum(pool.held for pool in view.pools) == 1
    assert view.cost.now_usd_per_h > 0


def test_a_job_that_begins_its_first_step_does_not_say_any_more_that_it_waits(hand):
    """What was said at its turn is stale once workers stand in a layout."""
    h = hand()
    launch = h.orders()
    assert h.job.because == "its turn has come: machines are bought for it"
    (start,) = h.only(h.joined(h.launched(launch)), StartWorker)
    h.ready(start)
    h.wait(2.0)
    assert (h.job.status, h.job.because) == ("PROVISIONING", "layout 1x1 begins its first step")


def test_a_machine_whose_launch_was_not_answered_is_adopted_from_the_list(hand):
    """The answer is lost; the provider's list shows the token, so the machine is ours and is used."""
    h = hand()
    launch = h.orders()
    h.refused(launch, Unknown("no answer"))
    token = launch.request.token
    assert h.state.leases[token].state == "intended"
    machine = msgspec.structs.replace(h.stray("test", token), tags=launch.request.tags)
    h.at_s += 1.0
    h.listed(machine)
    assert h.state.leases[token].machine_id == machine.id
    assert not h.only(h.wait(4.0), Launch)


def test_an_intent_that_is_not_listed_after_the_grace_is_dropped(hand):
    """Not before the grace, because lists lag; then it is given up and its token never used again."""
    h = hand()
    launch = h.orders()
    h.wait(20.0)
    h.listed()
    assert launch.request.token in h.state.leases
    h.wait(15.0)
    out = h.listed()
    assert launch.request.token not in h.state.leases
    assert "it never started" in h.words(out)
    again = h.only(h.wait(3.0), Launch)
    assert again
    assert launch.request.token not in {a.request.token for a in again}


def test_a_machine_of_ours_that_nobody_claims_is_ended_and_one_of_others_is_not(hand):
    """The tag decides: ours without a lease goes, whatever belongs to another deployment stays."""
    h = hand()
    h.start()
    ours, theirs = h.stray("test", "lost-token"), h.stray("production", "their-token")
    out = h.listed(ours, theirs)
    assert [t.machine_id for t in h.only(out, Terminate)] == [ours.id]
    h.wait(60.0)
    assert theirs.id not in {t.machine_id for t in h.only(h.said, Terminate)}


def test_after_a_restart_the_list_is_asked_for_at_once(hand):
    """A new manager with a newer epoch begins with what is there, and gives its orders again."""
    h = hand().running(slots_max=1)
    h.state = decode_state(encode_state(h.state))
    out = h.start(epoch=2)
    assert h.only(out, ListMachines)
    assert "epoch 2" in h.words(out)
    assert h.state.epoch == 2
    (launch,) = h.only(h.said, Launch)
    assert launch.request.token.startswith("test-") and launch.request.token.endswith("-1-1")


@pytest.mark.parametrize("code", ["NoCapacity", "PriceAboveBid", "NotSold"])
def test_a_pool_that_refuses_is_left_alone_longer_each_time(hand, code):
    """Refusals cost nothing and drop the intent; the penalty doubles, up to a bound, and is said."""
    h = hand(penalty_s=10.0)
    launch = h.orders()
    out = h.refused(launch, Refused("pool", code, "not now"))
    known = h.state.pools[launch.request.pool.key]
    assert f"{known.pool.key} spot" in {n.who for n in h.only(out, Note)}
    for nth in range(3):
        block = leases.block_of(h.state, known, "spot")
        assert block.until_s == pytest.approx(h.state.now_s + 10.0 * 2**nth)
        assert leases.block_of(h.state, known, "on_demand") is None
        h.wait(10.0 * 2**nth + 2.1)
        no = Refused("pool", code, "not now").refusal
        leases.refuse(h.state, [], launch.request, no, "not now")
    assert launch.request.token not in h.state.leases
    assert spent_usd(h.state.account, h.at_s) == 0.0


def test_a_machine_that_was_gone_before_we_heard_counts_until_its_end(hand):
    """What it cost and what it would have cost on demand are of the same time: nothing is saved by silence."""
    h = hand().running(slots_max=1)
    (lease,) = h.leases
    gone_s = h.at_s
    h.at_s += 600.0
    ended = {"state": "terminated", "ended_by": "provider", "ended_at_s": gone_s}
    h.becomes(lease.machine_id, **ended)
    h.listed()
    held_h = (gone_s - lease.prices[0][0]) / 3600.0
    on_demand = lease.type.on_demand_usd_per_h * held_h
    assert on_demand_usd(h.state.account, h.at_s) == pytest.approx(on_demand)
    assert spent_usd(h.state.account, h.at_s) == pytest.approx(lease.price_usd_per_h * held_h)
    held = duration(gone_s - lease.prices[0][0])  # as on the bill, and not as 0.00 h
    said = next(n.because for n in h.state.sentences if "; held " in n.because)
    assert said.endswith(f"; held {held} for {usd(lease.cost_usd)}")


@pytest.mark.parametrize(("ended_s", "says"), [(90.0, "before we learned"), (None, "until now")])
def test_a_machine_that_nobody_heard_of_has_a_bill(hand, ended_s, says):
    """Started, taken, and only then listed: its time is charged, or, if nobody says when it ended, all of it."""
    h = hand()
    launch = h.orders()
    h.refused(launch, Unknown("no answer"))
    began_s = h.at_s
    stray = h.stray("test", launch.request.token)
    h.wait(20.0)
    if ended_s is not None:
        ended_s = began_s + 12.0
    out = h.listed(
        msgspec.structs.replace(
            stray,
            pool=launch.request.pool,
            tags=launch.request.tags,
            launched_at_s=began_s,
            state="terminated",
            ended_by="provider",
            ended_at_s=ended_s,
        )
    )
    held_h = (12.0 if ended_s is not None else 20.0) / 3600.0
    spent = spent_usd(h.state.account, h.at_s)
    assert spent == pytest.approx(h.state.pools[stray.pool.key].spot_usd_per_h * held_h)
    assert spent_usd(h.job.account, h.at_s) == pytest.approx(spent)
    assert says in h.words(out)
    assert launch.request.token not in h.state.leases
    assert list(h.state.ended_leases.values())[-1].machine_id == stray.id
    assert h.job.market.preemptions == 1
    assert not h.only(out, Terminate)
    assert h.only(h.wait(4.0), Launch)


def test_without_any_capacity_it_waits_says_so_once_and_asks_ever_less(hand):
    """Every launch of an hour is refused: one sentence says what is waited for, attempts thin out."""
    h = hand(penalty_s=10.0)
    h.start()
    h.submit(slots_max=1)
    counts = []
    for _ in range(6):
        attempts = 0
        for _ in range(300):
            launches = h.only(h.wait(2.0), Launch)
            attempts += len(launches)
            for launch in launches:
                h.refused(launch)
        counts.append(attempts)
    assert counts[0] > counts[-1] > 0
    waits = [n for n in h.only(h.said, Note) if "looks again every period" in n.because]
    assert 1 <= len(waits) <= 3
    assert h.job.status == "PROVISIONING"
    while not h.job.layouts.current:
        h.served_after(2.0)
    h.committed(1)
    assert h.job.status == "RUNNING"


def test_a_pool_is_waited_for_with_the_reason_that_is_true(hand):
    """Workers died on its machines: that, and no refusal, is why the pool is left alone."""
    h = hand(penalty_s=600.0, on_demand_allowed=False).running(slots_max=1)
    for _ in range(40):
        for worker in list(h.job.workers):
            h.lost(worker)
        h.served_after(70.0)
        if not h.job.leases:
            break
    shut = h.state.blocks.values()
    assert shut
    assert all("workers keep dying on i-" in block.because for block in shut)
    said = view_of(h.state, h.at_s)
    assert any("workers keep dying" in pool.blocked_because for pool in said.pools)
    assert "refused" not in h.words(h.said)


def test_a_machine_that_never_joins_is_given_back(hand):
    """Billed but useless: after the boot patience it goes, and its pool is left alone."""
    h = hand(boot_timeout_s=60.0)
    launch = h.orders()
    machine = h.launched(launch)
    h.listed()
    assert h.state.leases[launch.request.token].state == "booting"
    out = h.wait(61.0)
    (end,) = h.only(out, Terminate)
    assert end.machine_id == machine
    assert "did not join within 60 s" in end.because


def test_a_pool_whose_machines_vanish_before_they_join_is_left_alone(hand):
    """As where Ray cannot start on the image, and Azure's lists do not say who ended it: three were
    bought every twenty seconds, for ever, and nothing said why."""
    h = hand(launch_grace_s=1.0)
    launch = h.orders()
    pool = launch.request.pool
    machine = h.launched(launch)
    h.listed()
    del h.machines[machine]
    before = len(h.said)
    h.at_s += 2.0
    h.listed()
    assert "vanished from the list" in h.words(h.said[before:])
    assert f"left alone for 180 s: {machine} vanished" in h.words(h.said[before:])
    again = h.only(h.said[before:] + h.wait(2.0), Launch)
    assert pool not in {x.request.pool for x in again}


def test_an_agent_that_joins_before_its_launch_was_answered_is_not_forgotten(hand):
    """It is a stranger until the machine is known; then its workers start at once."""
    h = hand()
    launch = h.orders()
    token = launch.request.token
    assert not h.joined(f"i-{token}")
    h.launched(launch)
    assert h.state.leases[token].state == "ready"
    assert h.only(h.said, StartWorker)


def test_an_agent_of_an_unknown_machine_buys_and_starts_nothing(hand):
    """It is remembered, bounded, and the list is asked for: nothing else happens."""
    h = hand()
    h.start()
    for nth in range(1200):
        assert not h.joined(f"i-unknown-{nth}")
    assert len(h.state.strangers) == 1000
    assert not h.state.workers


def test_a_notice_buys_the_replacement_and_the_machine_works_until_shortly_before(hand):
    """The new machine is asked for in the same turn, as for one that is lost; the old one leaves the layout before its
    deadline.
    """
    h = hand(on_demand_allowed=False).running(slots_min=2, slots_max=2)
    old = h.leases[0]
    out = h.notice(old.machine_id, 60.0)
    assert "will be taken in 60 s" in h.words(out)
    assert len(h.only(out, Launch)) == 1
    h.wait(3.0)
    assert old.state != "leaving"
    h.wait(52.0)
    assert old.state == "leaving"
    h.serve()
    assert h.only(h.taken(h.leases[-1].machine_id), Launch)


def test_workers_of_a_machine_that_goes_are_sent_home_when_the_layout_works_without_them(hand):
    """Not before: as long as nothing is committed without them they may be needed. Others stay."""
    h = hand().running(slots_max=3)
    old, *others = h.leases
    before = list(old.workers.values())
    staying = [worker for lease in others for worker in lease.workers.values()]
    h.notice(old.machine_id, 60.0)
    h.served_after(3.0)
    h.wait(52.0)
    assert old.state == "leaving"
    assert list(old.workers.values()) == before
    out = h.committed(50)
    assert [stop.worker for stop in h.only(out, StopWorker)] == before
    assert not old.workers
    assert h.job.status == "RUNNING"
    assert set(staying) <= set(h.job.workers)
    h.wait(2.0)
    assert h.only(h.said, StartWorker)[-1].machine_id not in {old.machine_id, others[0].machine_id}


def test_a_notice_that_nobody_comes_for_is_taken_back(hand):
    """Half a minute after the deadline the machine is still there: it may work again."""
    h = hand().running(slots_max=1)
    (old,) = h.leases
    h.notice(old.machine_id, 10.0)
    h.wait(45.0)
    assert old.state != "leaving"
    assert old.state in ("ready", "working", "ending")


def test_a_silent_agent_is_regrouped_around_and_may_come_back(hand):
    """Its workers are out at once; when it is back its slots get fresh workers. Nobody says that it boots."""
    h = hand().running(slots_max=2)
    first = h.leases[0]
    h.away(first.machine_id)
    assert first.agent == "silent"
    assert [one.state for one in view_of(h.state, h.at_s).machines] == ["silent", "intended"]
    out = h.joined(first.machine_id)
    assert first.goes_at_s is None
    assert h.only(out, StartWorker)


def test_a_terminate_that_is_not_answered_is_repeated_with_patience(hand):
    """It is asked again, each time after longer, until the list or the answer says that it is gone."""
    h = hand().running(slots_max=1)
    (lease,) = h.leases
    h.cancel()
    h.wait(20.0)
    times = []
    for _ in range(400):
        if h.only(h.wait(1.0), Terminate):
            times.append(h.at_s)
    gaps = [round(b - a) for a, b in itertools.pairwise(times)]
    assert len(gaps) >= 3
    assert gaps[-1] > gaps[0]
    h.terminated(lease.machine_id)
    assert not h.state.leases
    assert h.state.account.committed_usd == 0.0


def test_a_provider_that_does_not_answer_is_said_once(hand):
    """Silence of the list is one sentence, however long it lasts; it is asked for less and less often,
    so that lists are not what a throttled place is asked too many of, but once a minute at least.
    """
    h = hand().running(slots_max=1)
    asked = []
    for _ in range(300):
        for _ in h.only(h.wait(2.0), ListMachines):
            asked.append(h.at_s)
            h.see(ListFailed(at_s=h.at_s, place=Place("local", "east"), error="connection refused"))
    gaps = [later - earlier for earlier, later in pairwise(asked)]
    assert gaps[:4] == sorted(gaps[:4])
    assert 60.0 <= gaps[-1] <= 64.0
    assert sum("does not answer" in n.because for n in h.only(h.said, Note)) == 1
    h.listed()
    assert h.only(h.wait(4.0), ListMachines)


def test_an_impossible_move_raises_with_the_history(hand):
    """A lease that has ended cannot work; the error tells how it came to be where it is."""
    h = hand().running(slots_max=1)
    (lease,) = h.leases
    move_lease(lease, "ending", h.at_s, "a test")
    with pytest.raises(IllegalTransition, match=r"ending -> working \(oh\).*joined with"):
        move_lease(lease, "working", h.at_s, "oh")


def test_a_clock_that_is_set_back_stops_nothing(hand):
    """The manager restarts an hour in the past: time goes on from where it was, at the same pace."""
    h = hand().running(slots_max=1)
    before_s, step = h.state.now_s, h.job.progress.step
    h.at_s -= 3600.0
    h.start(epoch=2)
    assert h.state.now_s == before_s
    assert h.state.wake_at_s <= h.at_s + h.settings.control_period_s
    h.wait(10.0)
    h.listed()
    assert h.state.now_s == pytest.approx(before_s + 10.0)
    assert h.only(h.said[-10:], ListMachines)
    h.see(Tick(at_s=h.at_s - 500.0))
    assert h.state.now_s == pytest.approx(before_s + 10.0)
    assert h.job.progress.step == step


def test_a_jump_forward_takes_what_was_due_and_goes_on(hand):
    """An hour passes unseen: every alarm rings once, nothing raises, the job still runs."""
    h = hand().running(slots_max=1)
    h.at_s += 3600.0
    h.see(Tick(at_s=h.at_s))
    h.listed()
    h.committed(50)
    assert h.job.status in ("RUNNING", "RECOVERING")
    assert h.job.progress.step == 50
    assert h.state.wake_at_s <= h.at_s + h.settings.control_period_s


def test_a_wrong_clock_of_an_instance_moves_nothing(hand):
    """A report from the year 2100 cannot make the manager skip a century of alarms."""
    h = hand().running(slots_max=1)
    now_s = h.state.now_s
    h.at_s, real_s = 4e9, h.at_s
    h.committed(7)
    h.at_s = real_s
    assert h.state.now_s <= now_s + 5 * h.settings.control_period_s
    assert h.job.progress.step == 7


@pytest.mark.parametrize("factor", [1.0, 5.0])
def test_what_is_promised_never_falls_below_nothing_however_long_machines_take_to_end(hand, factor):
    """A job is cancelled, and its machines end late and at a higher price: their reserves are used up to zero."""
    h = hand(on_demand_allowed=False, budget_usd=5.0)
    h.steps_total = 10**6
    h.running(slots_min=1, slots_max=2)
    h.train(600.0)
    h.cancel()
    h.wait(20.0)
    h.price(*(factor * price for price in (0.03, 0.06, 0.04, 0.07)))
    for _ in range(50):
        h.wait(10.0)
        for account in (h.state.account, h.job.account):
            assert committed_usd(account, h.at_s) >= -1e-9
    assert all(lease.drained and lease.draining_usd_per_h == 0.0 for lease in h.leases)
    assert h.state.account.draining_usd_per_h == pytest.approx(0.0, abs=1e-12)


def test_state_of_another_version_is_refused_in_one_line(hand):
    """What an older one lacks would be read as nothing: steps, failures, layouts."""
    data = encode_state(hand().running(slots_max=1).state)
    for other in (data.replace(b'{"version":5,', b"{", 1), data.replace(b":5,", b":1,", 1)):
        with pytest.raises(msgspec.DecodeError, match="not of version 5 of its format"):
            decode_state(other)


def test_a_life_on_an_emptied_journal_uses_no_token_of_the_one_before(hand):
    """Epoch and serial begin again there, but each life draws a salt."""
    used = set()
    for salt in ("a", "b"):
        h = hand()
        h.see(ManagerStarted(at_s=h.at_s, epoch=1, settings=h.settings, salt=salt))
        used |= {leases.new_token(h.state) for _ in range(1000)}
    assert len(used) == 2000


def ended_by_a_person(h: Any, machine_id: str) -> Any:
    """Somebody ends it at the cloud's console, or it has ended itself, and the list says so."""
    gone = {"state": "terminated", "ended_by": "user", "ended_at_s": h.at_s}
    h.becomes(machine_id, **gone)
    return h.listed()


def test_a_machine_that_a_person_or_it_itself_has_ended_was_not_taken(hand):
    """No preemption is counted, of the job or of its pool, and another one is bought."""
    h = hand().running(slots_max=1, max_preemptions=0)
    h.listed()
    (lease,) = h.leases
    before = h.state.pools[lease.pool.key].record.losses
    out = ended_by_a_person(h, lease.machine_id)
    assert (h.job.status, h.job.market.preemptions) == ("RECOVERING", 0)
    assert h.state.pools[lease.pool.key].record.losses == before
    assert "was ended, and neither by us nor by the provider" in h.words(out)
    assert not h.state.blocks
    assert h.only(h.wait(2.0), Launch)


def test_a_pool_whose_machine_ends_before_it_has_joined_is_left_alone(hand):
    """It may always do that, so the next one is bought elsewhere."""
    h = hand()
    launch = h.orders()
    machine_id = h.launched(launch)
    h.listed()
    ended_by_a_person(h, machine_id)
    (other,) = h.only(h.wait(2.0), Launch)
    assert other.request.pool != launch.request.pool
    assert h.job.market.preemptions == 0


def test_a_machine_with_fewer_slots_than_it_is_paid_for_says_so(hand):
    """Without `nvidia-smi` a machine finds no GPU, and trains on its processor at the price of four."""
    dear = {"slots": 4, "accelerators": 4, "accelerator": "a10g", "on_demand_usd_per_h": 0.4}
    for slots, says in ((4, False), (1, True)):
        h = hand()
        h.kinds = tuple(msgspec.structs.replace(kind, **dear) for kind in h.kinds)
        h.start()
        (launch, *_) = h.only(h.submit(slots_max=4), Launch)
        words = h.words(h.joined(h.launched(launch), slots=slots))
        told = f"is sold with 4 slots, and it has {slots}: without nvidia-smi in its image no a10g"
        assert (told in words) is says, words
