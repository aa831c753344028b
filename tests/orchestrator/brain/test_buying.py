"""What the manager buys from, at which prices, and what it has learned about the time that changes take."""

import math
from typing import Any

import pytest
from msgspec.structs import replace

from agent.messages import BackupHeld, CheckpointWritten, SumsKept
from agent.profile import Link
from bidding.markets.observations import Scaling
from cloud.errors import Throttled
from cloud.model import Place, Pool, Quote, Sold
from orchestrator.actions import Launch, Terminate
from orchestrator.brain.holdings.ledger import committed_usd, spent_usd
from orchestrator.brain.purchases import situation
from orchestrator.brain.purchases.buying import think
from orchestrator.events import CatalogueSeen, ManagerStarted, QuotesSeen
from orchestrator.view_builder import view_of


def sold(h: Any, *more: Pool) -> tuple[Pool, ...]:
    return (*(known.pool for known in h.state.pools.values()), *more)


def sell(h: Any, *pools: Pool) -> None:
    """Every place says what it sells: these pools, and no others."""
    kinds = tuple(h.state.types.values())
    places = {known.pool.place for known in h.state.pools.values()} | {p.place for p in pools}
    for place in sorted(places):
        here = Sold(types=kinds, pools=tuple(pool for pool in pools if pool.place == place))
        h.see(CatalogueSeen(at_s=h.at_s, place=place, sold=here))


def promised_usd(h: Any) -> float:
    return spent_usd(h.job.account, h.at_s) + committed_usd(h.job.account, h.at_s)


@pytest.mark.parametrize("factor", [1.6, 3.0, 20.0])
def test_a_price_that_the_budget_has_no_room_for_ends_the_lease_at_once(hand, factor):
    """The price jumps past what was reserved for: the machine goes at once, and the cap holds all the while."""
    cap = 0.006
    h = hand(on_demand_allowed=False).running(slots_max=1, budget_usd=cap)
    (lease,) = h.leases
    while promised_usd(h) < cap - 0.0008:
        h.wait(2.0)
    h.price(*(factor * price for price in (0.03, 0.06, 0.04, 0.07)))
    assert lease.state == "ending" or h.job.status == "DRAINING"
    for _ in range(7):  # it takes the cloud some time to end it
        h.wait(2.0)
        assert promised_usd(h) <= cap + 1e-9
    h.serve()
    h.served_after(10.0)
    assert not h.state.leases
    assert h.job.account.spent_usd <= cap


def test_with_room_in_the_budget_a_dearer_machine_is_reserved_for_anew(hand):
    """The same jump with money left: the machine stays, and its reserve grows."""
    h = hand().running(slots_max=1, budget_usd=1.0)
    (lease,) = h.leases
    before = committed_usd(h.job.account, h.at_s)
    h.price(0.06, 0.12, 0.08, 0.14)
    assert not lease.released
    assert lease.ceiling_usd_per_h >= 0.06
    assert committed_usd(h.job.account, h.at_s) > before


def test_a_small_budget_buys_on_spot_what_it_could_not_on_demand(hand):
    """What is reserved for a spot machine follows its price, not the price on demand."""
    h = hand()
    h.start()
    h.submit(slots_max=1, budget_usd=0.006)
    launches = h.only(h.wait(2.0), Launch)
    assert [a.request.market for a in launches] == ["spot"]


def test_old_prices_are_not_trusted_and_that_is_said(hand):
    """A cloud that says nothing about prices for too long sells us no spot machine until it speaks again."""
    h = hand(quote_max_age_s=60.0, on_demand_allowed=False)
    h.start()
    h.wait(90.0)
    h.submit(slots_max=1)
    out = h.wait(4.0)
    assert not h.only(out, Launch)
    assert "no spot machine is bought at them" in " ".join(s.because for s in h.state.sentences)
    h.see(QuotesSeen(at_s=h.at_s, place=Place("local", "east"), quotes=()))
    assert h.only(h.wait(4.0), Launch)


def test_a_pool_that_is_no_longer_sold_is_not_bought_from(hand):
    """The cheapest pool is not in the newest catalogue: the next best is bought; what runs there stays."""
    h = hand().running(slots_max=1)
    (lease,) = h.leases
    left = tuple(pool for pool in sold(h) if pool != lease.pool)
    sell(h, *left)
    h.wait(4.0)
    assert lease.token in h.state.leases
    assert not lease.released
    h.taken(lease.machine_id)
    launches = h.only(h.wait(4.0), Launch)
    assert launches
    assert all(launch.request.pool in left for launch in launches)


def test_only_regions_where_the_data_may_be(hand):
    """A cheaper pool in a region that is not allowed is not bought from."""
    h = hand(regions=("east",))
    h.start()
    abroad = Pool(cloud="local", region="west", zone="west-a", type="small")
    sell(h, *sold(h, abroad))
    h.quoted(abroad, 0.001)
    h.submit(slots_max=2)
    launches = h.only(h.wait(2.0), Launch)
    assert launches
    assert {launch.request.pool.region for launch in launches} == {"east"}


def test_a_quote_from_the_future_does_not_hold_for_ever(hand):
    """A price with a date that cannot be is a price all the same, and the next one takes its place."""
    h = hand()
    h.start()
    pool, *_ = sold(h)
    for at_s, price in ((h.at_s + 1e9, 0.05), (h.at_s, 0.02)):
        h.quoted(pool, price, at_s)
    assert h.state.pools[pool.key].spot_usd_per_h == 0.02


def test_prices_are_heard_after_the_clock_was_set_back(hand):
    """The manager starts again with a clock an hour behind, and so do the dates of quotes."""
    h = hand()
    h.start()
    h.wait(7200.0)
    pool, *_ = sold(h)
    h.price(0.03, 0.06, 0.04, 0.07)
    behind_s = h.at_s - 3600.0
    h.see(ManagerStarted(at_s=behind_s, epoch=2, settings=h.settings))
    quote = Quote(pool=pool, at_s=behind_s + 1.0, price_usd_per_h=0.05)
    h.see(QuotesSeen(at_s=behind_s + 1.0, place=quote.pool.place, quotes=(quote,)))
    assert h.state.pools[pool.key].spot_usd_per_h == 0.05


def test_moving_the_state_to_another_region_is_part_of_the_price(hand):
    """While a job works in one region, an offer in another carries what bringing its state there costs."""
    h = hand(egress_usd_per_gb=0.02).running(slots_max=1)
    abroad = Pool(cloud="local", region="west", zone="west-a", type="small")
    sell(h, *sold(h, abroad))
    h.quoted(abroad, 0.03)
    egress = {o.pool.region: o.egress_usd for o in situation.offers(h.state, h.job)}
    assert egress == {"east": 0.0, "west": pytest.approx(0.02 * (1 << 20) / 1e9)}


def test_what_changes_take_is_learned_from_our_own(hand):
    """Start-up is measured from the order to the first step, and stalls from what the keeper reports."""
    h = hand(start_s=600.0)
    h.start()
    h.submit(slots_max=1)
    h.wait(2.0)
    (launch,) = h.only(h.said, Launch)
    machine_id = h.launched(launch)
    h.wait(40.0)
    h.joined(machine_id)
    h.serve()
    h.wait(2.0)
    h.committed(1)
    (took_s,) = h.job.market.times.start_s
    assert 40.0 <= took_s <= 50.0
    assert h.job.market.times.typical_s("start_s", 600.0) == pytest.approx((took_s + 600.0) / 2)
    assert not h.only(h.wait(2.0), Terminate)


def lines(h: Any) -> tuple[float, float, float]:
    """What is spent, and the sums over machines of cost and of disks and egress, as a person reads them."""
    view = view_of(h.state, h.at_s)
    machines = view.machines
    return (
        view.cost.spent_usd,
        sum(m.cost_usd for m in machines),
        sum(m.disk_usd + m.egress_usd for m in machines),
    )


def test_disks_are_charged_line_by_line_and_no_refund_covers_them(hand):
    """Taken within a free first hour, a machine costs nothing but its disk; the lines add up all the while."""
    h = hand(disk_usd_per_h=0.36, billing="aws_today", on_demand_allowed=False)
    h.running(slots_max=1)
    (lease,) = h.leases
    assert {o.disk_usd_per_h for o in situation.offers(h.state, h.job)} == {0.36}
    h.wait(100.0)
    spent, machines, disks = lines(h)
    assert spent == pytest.approx(machines)
    assert disks == pytest.approx(0.36 * (h.at_s - lease.prices[0][0]) / 3600)
    assert machines == pytest.approx(disks * (1 + 0.03 / 0.36))
    h.taken(lease.machine_id)
    spent, machines, disks = lines(h)
    assert spent == pytest.approx(machines)
    assert machines == pytest.approx(disks)
    assert disks > 0


@pytest.mark.parametrize("comes", [True, False])
def test_egress_is_reserved_with_the_order_and_charged_with_the_machine(hand, comes):
    """The state has to be brought abroad: promised when the machine is ordered, spent when it is there; a launch
    that fails owes nothing.
    """
    h = hand(egress_usd_per_gb=1000.0, on_demand_allowed=False).running(slots_max=1)
    abroad = Pool(cloud="local", region="west", zone="west-a", type="small")
    sell(h, abroad)
    h.quoted(abroad, 0.01)
    (lease,) = h.leases
    reserved = committed_usd(h.job.account, h.at_s)
    h.notice(lease.machine_id, 100.0)
    (launch,) = h.only(h.wait(4.0), Launch)
    assert launch.request.pool == abroad
    egress_usd = 1000.0 * (1 << 20) / 1e9
    before = spent_usd(h.job.account, h.at_s)
    assert committed_usd(h.job.account, h.at_s) > egress_usd
    if comes:
        h.launched(launch)
        assert committed_usd(h.job.account, h.at_s) < egress_usd
        assert spent_usd(h.job.account, h.at_s) == pytest.approx(before + egress_usd)
    else:
        h.refused(launch)
        assert committed_usd(h.job.account, h.at_s) == pytest.approx(reserved)
    spent, machines, parts = lines(h)
    assert spent == pytest.approx(machines)
    assert parts == pytest.approx(egress_usd if comes else 0.0)


@pytest.mark.parametrize("billing", ["aws_today", "aws_2016"])
def test_on_demand_machines_are_billed_by_their_own_rule(hand, billing):
    """A machine on demand that the cloud takes away is paid for: refunds are for spot."""
    h = hand(billing=billing)
    h.start()
    h.price(0.9, 0.9, 0.9, 0.9)
    h.submit(slots_max=1)
    h.served_after(2.0)
    (lease,) = h.leases
    assert lease.request.market == "on_demand"
    h.wait(600.0)
    h.taken(lease.machine_id)
    seconds = 3600 if billing == "aws_2016" else h.at_s - lease.prices[0][0]
    assert lease.cost_usd == pytest.approx(0.10 * seconds / 3600)
    assert h.job.account.spent_usd == pytest.approx(lease.cost_usd)


def test_a_budget_covers_the_whole_hour_where_hours_are_paid(hand):
    """Under the rule by the hour what is owed for the rest of a begun hour was reserved before."""
    cap = 0.055
    h = hand(billing="aws_2016", on_demand_allowed=False).running(slots_max=1, budget_usd=cap)
    while h.job.active and h.at_s < 20_000.0:
        h.served_after(60.0)
        assert promised_usd(h) <= cap + 1e-9
    h.served_after(60.0)
    assert not h.state.leases
    assert 0 < h.job.account.spent_usd <= cap


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        (
            {"budget_usd": 0.02, "manager_usd_per_h": 5.0},
            "of it for the manager's own machine: the cheapest way",
        ),
        (
            {"usd_per_h_max": 1.0, "manager_usd_per_h": 5.0},
            "the manager's own machine alone costs $5.0000",
        ),
        ({"usd_per_h_max": 0.0}, "$0.0000 may be spent per hour"),
    ],
)
def test_a_budget_below_the_managers_own_machine_is_refused(hand, limits, says):
    """What cannot ever be bought is said at once, with the figures, and nothing is bought."""
    h = hand(**limits)
    h.start()
    h.submit(slots_max=1)
    assert h.job.status == "FAILED"
    assert says in h.job.because
    assert not h.only(h.wait(4.0), Launch)


@pytest.mark.parametrize("price", [0.0, -1.0, 1e9, math.inf, math.nan])
def test_an_absurd_price_changes_nothing(hand, price):
    """Whether a machine works or has just started: the last price that can be true holds."""
    h = hand(on_demand_allowed=False).running(slots_max=1)
    (lease,) = h.leases
    h.price(price, price, price, price)
    h.wait(10.0)
    assert [held.token for held in h.leases] == [lease.token]
    assert lease.price_usd_per_h == 0.03
    assert 0 < h.job.account.usd_per_h < 0.1

    young = hand(on_demand_allowed=False)
    young.start()
    young.submit(slots_max=1)
    (launch,) = young.only(young.wait(2.0), Launch)
    machine = replace(young.stray("test", launch.request.token), tags=launch.request.tags)
    young.price(price, price, price, price)
    young.listed(machine)
    (lease,) = young.leases
    assert lease.machine_id
    assert lease.price_usd_per_h == 0.03


def short_of_one(hand: Any) -> Any:
    """All four slots are needed, and a machine of theirs has just been taken."""
    h = hand(on_demand_allowed=False)
    h.steps_total = 10**6
    h.running(slots_min=4, slots_max=4)
    h.train(600.0)
    worker = h.state.workers[h.job.layouts.current.workers[-1]]
    lost = h.state.leases[worker.token].machine_id
    h.taken(lost)
    del h.machines[lost]
    return h


@pytest.fixture
def unpriced(hand: Any) -> Any:
    """A job at a place that has said what it sells, and not yet the prices on spot."""
    other, h = hand(), hand()
    other.start()
    h.see(ManagerStarted(at_s=h.at_s, epoch=1, settings=h.settings))
    h.submit(slots_max=1)
    here = Sold(types=tuple(other.state.types.values()), pools=tuple(sold(other)))
    h.see(CatalogueSeen(at_s=h.at_s, place=Place("local", "east"), sold=here))
    return h


def test_catalogue_without_prices_buys_nothing_yet(unpriced):
    """A job that waits for the first catalogue waits for the first prices as well: on demand is dear."""
    h = unpriced
    assert not h.only([*h.said, *h.wait(30.0)], Launch), "however long they are under way"
    assert h.job.status == "PROVISIONING"
    h.price(0.03, 0.06, 0.04, 0.07)
    (launch,) = h.only(h.wait(2.0), Launch)
    assert launch.request.market == "spot"


def test_a_place_that_never_says_what_spot_costs_is_bought_from_on_demand(unpriced):
    h = unpriced
    (launch,) = h.only(h.wait(situation.PRICES_S + 4.0), Launch)
    assert launch.request.market == "on_demand"


def test_a_call_that_is_refused_for_a_moment_costs_no_machine_that_is_left(hand):
    """All four slots are needed and one is lost. The launch is throttled once: the others are kept meanwhile."""
    h = short_of_one(hand)
    left = {lease.token for lease in h.leases if lease.machine_id}
    launches = h.only(h.wait(4.0), Launch)
    for launch in launches:
        h.refused(launch, Throttled("slow down"))
    assert launches
    h.served = len(h.said)
    h.served_after(2.0, times=30)
    assert left <= {lease.token for lease in h.leases}
    assert sum(lease.type.slots for lease in h.leases) == 4


def test_what_is_left_is_given_back_if_no_replacement_is_sold_for_long(hand):
    """Machines that cannot train without one more are not paid for ever."""
    h = short_of_one(hand)
    for _ in range(150):
        for launch in h.only(h.wait(2.0), Launch):
            if launch.request.token in h.state.leases:
                h.refused(launch)
        h.served = len(h.said)
    assert not [lease for lease in h.leases if lease.state != "ending"]
    assert "keeps what it holds for up to 120 s" in h.words(h.said)


def test_a_machine_far_from_a_jobs_state_is_not_handed_to_it(hand):
    """Bringing the state there costs money that nobody has decided to spend; nearby, a machine is handed over."""
    for region, handed in (("west", False), ("east", True)):
        h = hand(on_demand_allowed=False, egress_usd_per_gb=0.1)
        h.steps_total = 10**6
        h.start()
        h.submit("a", slots_min=1, slots_max=1)
        h.goes_on(1, "a")
        first = {lease.token for lease in h.leases}
        other = tuple(
            Pool(cloud="local", region=region, zone=f"{region}-c", type=kind)
            for kind in h.state.types
        )
        sell(h, *other)
        quotes = tuple(Quote(pool=pool, at_s=h.at_s, price_usd_per_h=0.03) for pool in other)
        h.see(QuotesSeen(at_s=h.at_s, place=quotes[0].pool.place, quotes=quotes))
        h.submit("job", slots_min=1, slots_max=4)
        h.goes_on(1)
        h.job.layouts.state_bytes = 10**11
        lost = next(lease.machine_id for lease in h.leases if lease.job == "job")
        for launch in h.only(h.taken(lost), Launch):
            h.refused(launch, Throttled("slow down"))
        del h.machines[lost]
        h.completed(job="a")
        assert any(lease.token in first and lease.job == "job" for lease in h.leases) == handed


@pytest.mark.parametrize(("haste", "slots"), [(0.0, 2), (1000.0, 4)])
def test_haste_buys_what_is_dearer_and_sooner(hand, profile, haste, slots):
    """Sums over a slow network make each further worker's work dearer: without haste two are enough."""
    link = Link(bandwidth_bytes_per_s=4e7)
    measured = profile(4)
    network = replace(measured.network, reduce_intra=link, reduce_inter=link)
    h = hand().running(slots_max=4, haste=haste)
    h.profiled(replace(measured, network=network))
    for _ in range(6):
        h.train(10.0)
        h.serve()
    assert sum(lease.type.slots for lease in h.leases) == slots


def with_one_of_two(hand: Any) -> Any:
    """A job that needs two machines has lost one, and none is sold; the keeper gets no sums."""
    h = hand(on_demand_allowed=False)
    h.steps_total = 1_000_000
    h.start()
    h.sells("small")
    h.submit(slots_max=2, slots_min=2)
    h.goes_on(1)
    h.train(60.0)
    h.see(SumsKept(at_s=h.at_s, job="job", kept=False, copies=2, sum_bytes=400 << 20))
    h.train(60.0)
    for known in h.state.pools.values():
        known.sold = False
    lost, _ = h.leases
    h.taken(lost.machine_id)
    h.job.progress.step_s = 10.0
    return h


@pytest.mark.parametrize("saved", [BackupHeld, CheckpointWritten])
def test_the_only_machine_with_the_newest_steps_stays_until_they_are_safe(hand, saved):
    """It cannot train alone; given back at once, it would take the steps since the backup with it."""
    h = with_one_of_two(hand)
    h.wait(20.0)
    h.see(SumsKept(at_s=h.at_s, job="job", kept=True, copies=1))  # from now on
    out = h.wait(40.0)
    assert not h.only(out, Terminate) and len(h.leases) == 1
    waiting = [s for s in h.state.sentences if "until its newest steps are safe" in s.because]
    assert len(waiting) == 1
    where = {"uri": "x"} if saved is CheckpointWritten else {}
    h.see(saved(at_s=h.at_s, job="job", step=h.job.progress.step, state_bytes=9, **where))
    assert h.only(h.wait(120.0), Terminate)


def test_the_newest_steps_are_waited_for_as_long_as_they_took(hand):
    """To do them again costs no more than the machine that waits has cost by then."""
    h = with_one_of_two(hand)
    progress = h.job.progress
    again_s = progress.step * progress.step_s
    assert not h.only(h.wait(again_s / 2), Terminate)
    assert h.only(h.wait(again_s), Terminate)


def test_a_machine_whose_worker_has_died_has_no_newest_steps(hand):
    """It costs money, and saves nothing."""
    h = with_one_of_two(hand)
    (lease,) = h.leases
    (worker,) = lease.workers.values()
    h.lost(worker)
    assert h.only(h.wait(60.0), Terminate)


def test_fewer_machines_than_can_train_are_not_bought_with_what_a_budget_has_left(hand):
    """The cheap pool sells nothing, and three machines of the next one would use up what can be reserved: none of
    them is bought and given back without end, and the job says what it waits for.
    """
    h = hand(on_demand_allowed=False)
    h.prices = (0.02, 9.0, 0.029, 9.0)
    h.start()
    h.submit(slots_min=4, slots_max=4, budget_usd=0.012)
    for _ in range(12):
        h.wait(5.0)
        for launch in h.only(h.said[h.served :], Launch):
            if launch.request.pool.zone == "east-a" and launch.request.token in h.state.leases:
                h.refused(launch)
        h.serve()
    assert {launch.request.pool.zone for launch in h.only(h.said, Launch)} == {"east-a"}
    assert not h.leases
    assert (
        "no more than 3 slots of 4 can be had: the budget"
        in view_of(h.state, h.at_s).jobs[0].because
    )


def test_fewer_machines_than_can_train_are_not_held_at_the_limit_of_machines(hand):
    """Two machines may be held, and four slots are needed at least: idle ones would only cost."""
    h = hand(machines_max=2, on_demand_allowed=False)
    h.prices = (0.03, 9.0, 0.04, 9.0)
    h.start()
    h.submit(slots_min=4, slots_max=4)
    h.wait(10.0)
    assert not h.only(h.said, Launch)
    waits = "no more than 2 slots of 4 can be had: machines_max is 2"
    assert waits in view_of(h.state, h.at_s).jobs[0].because


def test_a_machine_that_was_handed_over_and_has_no_work_is_given_back(hand):
    """Steps of the other job take as long on two machines as on one: the one that it inherits goes at once, though
    it worked for the job that has ended and no layout of this one changes.
    """
    h = hand(on_demand_allowed=False)
    h.prices = (0.03, 9.0, 0.08, 9.0)
    h.running(slots_max=1)
    h.submit("next", slots_max=3)
    heir = h.state.jobs["next"]
    for step in range(1, 12):
        h.served_after(10.0)
        h.committed(step, job="next")
        heir.market.scaling = Scaling(seen=((1.0, 0.5), (2.0, 0.5), (3.0, 0.5)))
    assert len(heir.leases) == 1
    h.completed()
    assert len(heir.leases) == 2
    h.served_after(10.0)
    assert len(heir.leases) == 1


def test_the_line_of_a_job_says_what_it_waits_for_now(hand):
    """At first no price is known. When prices are, the limit per hour is in the way, and the line says that."""
    other, h = hand(), hand(usd_per_h_max=0.01, on_demand_allowed=False)
    other.start()
    h.see(ManagerStarted(at_s=h.at_s, epoch=1, settings=h.settings))
    here = Sold(types=tuple(other.state.types.values()), pools=tuple(sold(other)))
    h.see(CatalogueSeen(at_s=h.at_s, place=Place("local", "east"), sold=here))
    h.submit(slots_max=1)
    h.wait(4.0)
    assert "nothing is sold at a price that is known" in h.job.market.waiting
    h.price(*h.prices)
    h.wait(4.0)
    assert "above the limit of $0.0100/h" in h.job.market.waiting


@pytest.mark.parametrize("fewest", [1, 4])
def test_a_job_whose_steps_are_done_buys_only_where_what_is_left_cannot_end_it(hand, fewest):
    h = hand()
    h.steps_total = 100
    h.running(slots_max=4, slots_min=fewest)
    h.committed(50)
    first, second = (lease.machine_id for lease in h.leases)
    h.committed(100)
    assert bool(h.only([*h.taken(first), *h.wait(600.0)], Launch)) == (fewest == 4)
    if fewest == 1:
        assert h.only([*h.taken(second), *h.wait(5.0)], Launch)


def test_every_sentence_of_a_decision_counts_in_steps_once_one_was_timed(hand):
    """Also why a machine is given back: a person reads both beside each other."""
    h = hand().running(slots_max=4)
    h.prices = (9.0, 9.0, 9.0, 9.0)
    h.price(*h.prices)
    found = think(h.state, h.job)
    assert found.release
    assert all(" steps/s, " in one.because for one in (found, *found.release))
