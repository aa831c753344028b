"""A cloud in virtual time: what the account holds, and what the market does to it. No I/O.

`SimulatedCloud` is the whole behaviour of a cloud as a value-in, value-out object: the simulated
month steps it from change to change, and the local cloud process drives the same object by the wall
clock. No call visits all machines, because future changes wait in one heap and the list of machines
is kept up to date.

Billing: per second from the launch to the end, at the price in force (the spot price moves, the
on-demand price does not), nothing refunded.
"""

import heapq
from collections.abc import AsyncIterator, Iterator, Sequence
from hashlib import blake2b
from typing import Literal

import msgspec
from msgspec.structs import replace

from cloud.clock import Clock
from cloud.errors import NotOurs, Refused, TokenMismatch, TokenSpent
from cloud.market import PriceStep, SpotMarket
from cloud.model import (
    DEPLOYMENT_TAG,
    EndedBy,
    InstanceType,
    LaunchRequest,
    Listing,
    Machine,
    Notice,
    Pace,
    Place,
    Pool,
    Quote,
    Ref,
    Sold,
    Traits,
)
from cloud.provider import no_notices

ENDED_LISTED_S = 3600.0
TOKEN_KEPT_S = 86_400.0


class Booted(msgspec.Struct, frozen=True, kw_only=True):
    """A machine runs its first-boot script from now on."""

    machine: Machine
    at_s: float


class Noticed(msgspec.Struct, frozen=True, kw_only=True):
    """A machine can now read in its metadata that it will or may go."""

    notice: Notice
    at_s: float


class Evicted(msgspec.Struct, frozen=True, kw_only=True):
    """The cloud has taken a machine."""

    machine_id: str
    at_s: float


class PricesMoved(msgspec.Struct, frozen=True, kw_only=True):
    quotes: tuple[Quote, ...]
    at_s: float


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One machine in the books of the cloud: its request, its data, and its cost."""

    request: LaunchRequest
    machine: Machine
    cost_usd: float


class Books(msgspec.Struct, frozen=True, kw_only=True):
    """What a cloud must remember across a restart.

    `launches` counts all launches, so that no machine id is used twice.
    """

    at_s: float
    launches: int = 0
    entries: tuple[Entry, ...] = ()


Change = Booted | Noticed | Evicted | PricesMoved
_Due = Literal["price", "room", "boot", "evict", "unlist", "forget"]


class _PoolState:
    """The present state of a pool.

    A drop in capacity can take the machines in `spot`; a noticed machine is alive but not in
    `spot`. `paid_usd_per_machine` is the integral of the price since the start: the cost of a
    machine that was held all the time. The cost of any machine is the difference of two of its
    values.
    """

    def __init__(self, pool: Pool, market: SpotMarket, on_demand_usd_per_h: float) -> None:
        self.pool = pool
        self.on_demand_usd_per_h = on_demand_usd_per_h
        self.steps: dict[_Due, Iterator[PriceStep]] = {
            "price": market.prices(pool),
            "room": market.capacity(pool),
        }
        first = next(self.steps["price"])
        self.quote = Quote(pool=pool, at_s=first.at_s, price_usd_per_h=first.value)
        self.room = int(next(self.steps["room"]).value)
        self.spot: list[str] = []
        self.place: dict[str, int] = {}
        self.bids: list[tuple[float, str]] = []
        self._paid_usd = 0.0

    def join(self, machine_id: str, bid_usd_per_h: float | None) -> None:
        self.place[machine_id] = len(self.spot)
        self.spot.append(machine_id)
        if bid_usd_per_h is not None:
            if len(self.bids) > 2 * len(self.spot) + 16:
                self.bids = sorted(bid for bid in self.bids if bid[1] in self.place)
            heapq.heappush(self.bids, (bid_usd_per_h, machine_id))

    def leave(self, machine_id: str) -> None:
        place = self.place.pop(machine_id, None)
        if place is not None:
            last = self.spot.pop()
            if last != machine_id:
                self.spot[place] = last
                self.place[last] = place

    def outbid(self) -> Iterator[str]:
        """Yield the machines whose bids are below the present price."""
        while self.bids and self.bids[0][0] < self.quote.price_usd_per_h:
            _, machine_id = heapq.heappop(self.bids)
            if machine_id in self.place:
                yield machine_id

    def paid_usd_per_machine(self, at_s: float) -> float:
        return self._paid_usd + self.quote.price_usd_per_h * (at_s - self.quote.at_s) / 3600

    def reprice(self, step: PriceStep) -> Quote:
        self._paid_usd = self.paid_usd_per_machine(step.at_s)
        self.quote = Quote(pool=self.pool, at_s=step.at_s, price_usd_per_h=step.value)
        return self.quote


class _Record:
    """All that the account remembers about one machine."""

    __slots__ = ("cost_usd", "hinted_at_s", "machine", "notice", "paid_before_usd", "request")

    def __init__(self, request: LaunchRequest, machine: Machine, paid_before_usd: float) -> None:
        self.request = request
        self.machine = machine
        self.paid_before_usd = paid_before_usd
        self.notice: Notice | None = None
        self.hinted_at_s: float | None = None
        self.cost_usd = 0.0

    @property
    def deployment(self) -> str:
        return self.machine.tags.get(DEPLOYMENT_TAG, "")

    @property
    def owner(self) -> tuple[str, str]:
        """Return the deployment and the region in whose list the machine is."""
        return self.deployment, self.machine.pool.region


class SimulatedCloud:
    """One account. Calls carry the time, and every change due before it is applied first.

    Calls without a deployment mean the one given here; machines of others stay untouched.
    `network` is the first half of the addresses that machines get.
    """

    def __init__(self, market: SpotMarket, deployment: str, network: str = "10.0") -> None:
        self.market = market
        self.deployment = deployment
        self._network = network
        self._types = {kind.name: kind for kind in market.catalogue.types}
        self._pools = {
            pool: _PoolState(pool, market, self._types[pool.type].on_demand_usd_per_h)
            for pool in market.catalogue.pools
        }
        self._records: dict[str, _Record] = {}
        self._by_token: dict[str, list[_Record]] = {}
        self._listed: dict[tuple[str, str], dict[str, Machine]] = {}
        self._slots_held = 0
        self._launches = 0
        self.ends = 0  # machines that have ended here so far
        self._heap: list[tuple[float, int, _Due, str | Pool, float]] = []
        self._pushes = 0
        self._outbox: list[Change] = []
        for pool in self._pools:
            self._push_step("price", pool)
            self._push_step("room", pool)

    # Queries

    def catalogue(self) -> tuple[tuple[InstanceType, ...], tuple[Pool, ...]]:
        return self.market.catalogue.types, tuple(self._pools)

    def places(self) -> list[Place]:
        """Return one place for each region, in the order of their first zones."""
        return list(dict.fromkeys(pool.place for pool in self._pools))

    def sold(self, place: Place) -> Sold:
        types, pools = self.catalogue()
        return Sold(types=types, pools=tuple(pool for pool in pools if pool.place == place))

    def quotes(self, at_s: float, place: Place | None = None) -> list[Quote]:
        """Return the last quote of every pool; its time is when the price began to hold."""
        self._work_off(at_s)
        return [
            state.quote
            for pool, state in self._pools.items()
            if place is None or pool.place == place
        ]

    def machines(self, deployment: str | None = None, region: str | None = None) -> list[Machine]:
        """Return the machines of the deployment, of all regions or of one; ended ones are listed for an hour."""
        own = self._own(deployment)
        return [
            machine
            for (owner, place), listed in self._listed.items()
            if owner == own and region in (None, place)
            for machine in listed.values()
        ]

    def machine(self, machine_id: str) -> Machine:
        return self._records[machine_id].machine

    def notice(self, machine_id: str) -> Notice | None:
        """Return the notice that this machine will go, if there is one."""
        return self._records[machine_id].notice

    def hinted_at_s(self, machine_id: str) -> float | None:
        """Return when the cloud first hinted that this machine may go."""
        return self._records[machine_id].hinted_at_s

    def bill(self, at_s: float, deployment: str | None = None) -> dict[str, float]:
        """Return the cost of each machine in US dollars, up to now or to its end."""
        self._work_off(at_s)
        own = self._own(deployment)
        return {
            machine_id: self._cost_usd(record, at_s)
            for machine_id, record in self._records.items()
            if record.deployment == own
        }

    def books(self, at_s: float) -> Books:
        """Return all that is still remembered, for `restore`."""
        self._work_off(at_s)
        return Books(
            at_s=at_s,
            launches=self._launches,
            entries=tuple(
                Entry(
                    request=record.request,
                    machine=record.machine,
                    cost_usd=self._cost_usd(record, at_s),
                )
                for record in self._records.values()
            ),
        )

    # Commands

    def restore(self, books: Books) -> None:
        """Take over the books of a dead cloud, whose machines ended with it at `books.at_s`."""
        self._launches = max(self._launches, books.launches)
        for entry in books.entries:
            machine = entry.machine
            if machine.state != "terminated":
                machine = replace(
                    machine, state="terminated", ended_at_s=books.at_s, ended_by="provider"
                )
            record = _Record(entry.request, machine, 0.0)
            record.cost_usd = entry.cost_usd
            self._records[machine.id] = record
            self._by_token.setdefault(machine.token, []).append(record)
            self._listed.setdefault(record.owner, {})[machine.id] = machine
            self._push((machine.ended_at_s or books.at_s) + ENDED_LISTED_S, "unlist", machine.id)

    def launch(self, request: LaunchRequest, at_s: float) -> Machine:
        """Start the machines of a request, once per token, and return the first of them."""
        return self.launch_all(request, at_s)[0]

    def launch_all(self, request: LaunchRequest, at_s: float) -> list[Machine]:
        """Start all machines of a request or none, once per token. Raises Refused."""
        self._work_off(at_s)
        if (known := self._by_token.get(request.token)) is not None:
            return [self._launched_before(one, request) for one in known]
        state = self._pools.get(request.pool)
        if state is None:
            raise Refused("pool", "NotSold", f"{request.pool.key} is not sold here")
        self._refuse_if_it_must(state, request, at_s)
        return [self._start(state, request, index, at_s) for index in range(request.count)]

    def _start(self, state: _PoolState, request: LaunchRequest, index: int, at_s: float) -> Machine:
        machine = self._new_machine(request, index, at_s)
        record = _Record(request, machine, state.paid_usd_per_machine(at_s))
        self._records[machine.id] = record
        self._by_token.setdefault(request.token, []).append(record)
        self._listed.setdefault(record.owner, {})[machine.id] = machine
        self._slots_held += self._types[request.pool.type].slots
        if request.market == "spot":
            state.join(machine.id, request.bid_usd_per_h)
        self._push(at_s + self.market.startup_s(machine.id), "boot", machine.id)
        return machine

    def terminate(
        self, machine_ids: Sequence[str], at_s: float, deployment: str | None = None
    ) -> list[str]:
        """End these machines, or none of them if one is not ours; return those that are known."""
        self._work_off(at_s)
        known = [self._records[one] for one in machine_ids if one in self._records]
        for record in known:
            if record.deployment != self._own(deployment):
                raise NotOurs(
                    f"machine {record.machine.id} does not carry "
                    f"{DEPLOYMENT_TAG}={self._own(deployment)}"
                )
        for record in known:
            self._end(record, at_s, "user")
        return [record.machine.id for record in known]

    def revoke(self, machine_ids: Sequence[str], at_s: float, warning_s: float) -> None:
        """Take these machines as the market would, with this warning; zero is no warning."""
        self._work_off(at_s)
        for machine_id in machine_ids:
            self._revoke(self._records[machine_id], at_s, warning_s)

    def hint(self, machine_ids: Sequence[str], at_s: float) -> None:
        """Hint that these machines may go, whether or not they go later."""
        self._work_off(at_s)
        for machine_id in machine_ids:
            record = self._records[machine_id]
            if record.machine.state != "terminated" and record.hinted_at_s is None:
                record.hinted_at_s = at_s
                notice = Notice(machine_id=machine_id, kind="rebalance", deadline_s=at_s)
                self._outbox.append(Noticed(notice=notice, at_s=at_s))

    def next_change_s(self) -> float | None:
        """Return when `advance` next has a change to return."""
        if self._outbox:
            return self._outbox[0].at_s
        return self._heap[0][0] if self._heap else None

    def advance(self, at_s: float) -> list[Change]:
        """Return the changes since the last call, in order of time."""
        self._work_off(at_s)
        changes, self._outbox = self._outbox, []
        return changes

    # Inner workings

    def _own(self, deployment: str | None) -> str:
        return self.deployment if deployment is None else deployment

    def _launched_before(self, known: _Record, request: LaunchRequest) -> Machine:
        if known.request != request:
            raise TokenMismatch(f"token {request.token} was used for another request")
        if known.machine.state == "terminated":
            raise TokenSpent(f"the machine {known.machine.id} of token {request.token} has ended")
        return known.machine

    def _refuse_if_it_must(self, state: _PoolState, request: LaunchRequest, at_s: float) -> None:
        quota = self.market.catalogue.quota_slots
        wanted = self._slots_held + request.count * self._types[request.pool.type].slots
        if quota is not None and wanted > quota:
            said = f"{wanted} slots would be held, the quota is {quota}"
            raise Refused("family", "QuotaExceeded", said)
        if request.market == "on_demand":
            return
        price, bid = state.quote.price_usd_per_h, request.bid_usd_per_h
        if bid is not None and bid < price:
            said = f"{request.pool.key} is at {price} USD/h, the bid is {bid}"
            raise Refused("pool", "PriceAboveBid", said)
        room = max(0, state.room - len(state.spot))
        if 0 < room < request.count:
            said = f"{request.pool.key} has {room} of {request.count} machines"
            raise Refused("pool", "NoCapacity", said, room=room)
        if room < request.count or self.market.refuses(request.token, at_s):
            raise Refused("pool", "NoCapacity", f"{request.pool.key} has no machine to give now")

    def _new_machine(self, request: LaunchRequest, index: int, at_s: float) -> Machine:
        nth = self._launches
        self._launches += 1
        seed = repr((self.market.seed, self.market.start_s, nth)).encode()
        return Machine(
            id=f"i-{blake2b(seed, digest_size=8).hexdigest()}",
            token=request.token,
            pool=request.pool,
            market=request.market,
            state="pending",
            launched_at_s=at_s,
            index=index,
            tags=request.tags,
            address=f"{self._network}.{nth // 254 % 256}.{nth % 254 + 1}",
        )

    def _cost_usd(self, record: _Record, at_s: float) -> float:
        machine = record.machine
        if machine.state == "terminated":
            return record.cost_usd
        state = self._pools[machine.pool]
        if machine.market == "spot":
            return state.paid_usd_per_machine(at_s) - record.paid_before_usd
        return state.on_demand_usd_per_h * (at_s - machine.launched_at_s) / 3600

    def _update(self, record: _Record, machine: Machine) -> None:
        record.machine = machine
        self._listed[record.owner][machine.id] = machine

    def _push(self, at_s: float, due: _Due, what: str | Pool, value: float = 0.0) -> None:
        self._pushes += 1
        heapq.heappush(self._heap, (at_s, self._pushes, due, what, value))

    def _push_step(self, due: _Due, pool: Pool) -> None:
        if (step := next(self._pools[pool].steps[due], None)) is not None:
            self._push(step.at_s, due, pool, step.value)

    def _work_off(self, until_s: float) -> None:
        while self._heap and self._heap[0][0] <= until_s:
            at_s, _, due, what, value = heapq.heappop(self._heap)
            if isinstance(what, Pool):
                self._step_pool(self._pools[what], due, PriceStep(at_s, value))
                self._push_step(due, what)
            else:
                self._step_machine(self._records[what], due, at_s)

    def _step_pool(self, state: _PoolState, due: _Due, step: PriceStep) -> None:
        if due == "price":
            quote = state.reprice(step)
            self._outbox.append(PricesMoved(quotes=(quote,), at_s=step.at_s))
            for machine_id in state.outbid():
                self._evict_some(machine_id, step.at_s)
            return
        state.room = int(step.value)
        for nth in range(len(state.spot) - state.room):
            victim = self.market.victim(state.pool, step.at_s, nth, len(state.spot))
            self._evict_some(state.spot[victim], step.at_s)

    def _evict_some(self, machine_id: str, at_s: float) -> None:
        record = self._records[machine_id]
        self._revoke(record, at_s, self.market.warning_s(record.machine.pool, machine_id))

    def _revoke(self, record: _Record, at_s: float, warning_s: float) -> None:
        """Take a machine; one that is revoked twice goes at the earlier of the two deadlines."""
        machine = record.machine
        if machine.state == "terminated":
            return
        self._pools[machine.pool].leave(machine.id)
        deadline_s = at_s + warning_s
        if record.notice and record.notice.deadline_s <= deadline_s:
            return
        if warning_s > 0:
            record.notice = Notice(machine_id=machine.id, kind="terminate", deadline_s=deadline_s)
            self._outbox.append(Noticed(notice=record.notice, at_s=at_s))
            self._push(deadline_s, "evict", machine.id)
        else:
            self._evict(record, at_s)

    def _evict(self, record: _Record, at_s: float) -> None:
        if self._end(record, at_s, "provider"):
            self._outbox.append(Evicted(machine_id=record.machine.id, at_s=at_s))

    def _step_machine(self, record: _Record, due: _Due, at_s: float) -> None:
        machine = record.machine
        match due:
            case "boot" if machine.state == "pending":
                self._update(record, replace(machine, state="running"))
                self._outbox.append(Booted(machine=record.machine, at_s=at_s))
            case "evict":
                self._evict(record, at_s)
            case "unlist":
                self._listed[record.owner].pop(machine.id)
                self._push(at_s + TOKEN_KEPT_S, "forget", machine.id)
            case "forget":
                del self._records[machine.id]
                self._by_token.pop(machine.token, None)

    def _end(self, record: _Record, at_s: float, by: EndedBy) -> bool:
        machine = record.machine
        if machine.state == "terminated":
            return False
        self.ends += 1
        record.cost_usd = self._cost_usd(record, at_s)
        state = self._pools[machine.pool]
        state.leave(machine.id)
        self._slots_held -= self._types[machine.pool.type].slots
        self._update(record, replace(machine, state="terminated", ended_at_s=at_s, ended_by=by))
        self._push(at_s + ENDED_LISTED_S, "unlist", machine.id)
        return True


class SimulatedProvider:
    """The simulated cloud as an implementation of the provider protocol."""

    traits = Traits(billing="local")
    pace = Pace(list_s=1.0, offers_s=1.0, sold_s=3600.0, grace_s=1.0, boot_s=1.0)

    def __init__(self, cloud: SimulatedCloud, clock: Clock) -> None:
        self._cloud = cloud
        self._clock = clock

    @property
    def name(self) -> str:
        return self._cloud.market.catalogue.cloud

    async def places(self) -> Sequence[Place]:
        return self._cloud.places()

    async def sold(self, place: Place) -> Sold:
        return self._cloud.sold(place)

    async def quotes(self, place: Place) -> Sequence[Quote]:
        return self._cloud.quotes(self._clock.now_s(), place)

    async def launch(self, request: LaunchRequest) -> Sequence[Machine]:
        return self._cloud.launch_all(request, self._clock.now_s())

    async def list(self, place: Place) -> Listing:
        return Listing(place=place, machines=tuple(self._cloud.machines(region=place.region)))

    async def end(self, refs: Sequence[Ref]) -> Sequence[Ref]:
        known = self._cloud.terminate([ref.id for ref in refs], self._clock.now_s())
        return [ref for ref in refs if ref.id in known]

    def notices(self) -> AsyncIterator[Notice]:
        return no_notices()

    async def close(self) -> None:
        """Close nothing, as there is nothing open."""
