"""Places that misbehave: silence, refusals of each scope, failed launches, and what is left over."""

from typing import get_args

import msgspec

from cloud.errors import Misconfigured, NotAllowed, Refused, Throttled, Unknown
from cloud.model import (
    DEPLOYMENT_TAG,
    LaunchRequest,
    Leftover,
    Machine,
    Notice,
    Place,
    Ref,
    Refusal,
    Scope,
)
from orchestrator.simulated.timeline import Luck, Timeline

SCOPES: tuple[Scope, ...] = get_args(Scope)
FOREIGN = {DEPLOYMENT_TAG: "somebody-else"}
AGE_S = 3600.0  # of a disk that is not ours
APART_S = 5.0  # of the deadlines of one notice that comes by two ways


class Places:
    """What every place answers besides the cloud's own rules, and what remains there."""

    def __init__(self, places: list[Place], timeline: Timeline, luck: Luck) -> None:
        self.failed: dict[str, Machine] = {}  # launches that failed after their answer
        self.leftovers: dict[str, Leftover] = {}
        self.since_s: dict[str, float] = {}  # when each of both began to be nobody's
        self._never_ran: set[str] = set()
        self._places = places
        self._timeline, self._luck = timeline, luck
        self._silent_until_s: dict[Place, float] = {}
        self._start_s = timeline.now_s
        for place in places:
            self._leave(Ref(place, f"disk-of-others-{place.region}"), FOREIGN, "")
        if luck.faults.silent_every_s:
            self._plan_silence()

    # --- what a place answers ------------------------------------------------------------------

    def is_silent(self, place: Place) -> bool:
        return self._timeline.now_s < self._silent_until_s.get(place, -1.0)

    def refuse(self, request: LaunchRequest) -> None:
        """Raise what the place answers instead of selling, if it does."""
        luck, faults = self._luck, self._luck.faults
        if self._timeline.now_s < self._start_s + faults.nothing_sold_s:
            raise Refused("pool", "NoCapacity", "there is no capacity anywhere", room=0)
        if luck.chance(faults.throttled):
            raise Throttled("slow down", luck.random.choice((None, 5.0)))
        if not luck.chance(faults.refused):
            return
        kind = luck.random.random()
        if kind < 0.1:
            raise NotAllowed("the role may not start machines")
        if kind < 0.2:
            raise Misconfigured("the image is gone")
        scope, retry_s = luck.random.choice(SCOPES), luck.random.choice((None, None, 30.0))
        room = luck.random.randrange(request.count) if luck.chance(0.5) else None
        raise Refused(scope, "Refused", f"not now, in this {scope}", retry_s, room)

    def check_list(self, place: Place) -> None:
        """Raise what the place answers instead of its list, if it does."""
        if self.is_silent(place):
            raise Unknown("no answer")
        if self._luck.chance(self._luck.faults.throttled):
            raise Throttled("slow down")

    def machines(self, place: Place, listed: list[Machine]) -> tuple[Machine, ...]:
        """Return the list of a place, with the machines that failed as the cloud says it."""
        others = [machine for machine in listed if machine.id not in self._never_ran]
        mine = [machine for machine in self.failed.values() if machine.pool.place == place]
        return (*others, *mine)

    def left_in(self, place: Place) -> tuple[Leftover, ...]:
        return tuple(one for one in self.leftovers.values() if one.ref.place == place)

    def deadlines(self, notice: Notice) -> list[Notice]:
        """Return the notice as often as it comes."""
        if not self._luck.chance(self._luck.faults.notice_twice):
            return [notice]
        later_s = notice.deadline_s + self._luck.random.uniform(-APART_S, APART_S)
        return [notice, msgspec.structs.replace(notice, deadline_s=later_s)]

    # --- what is made and what remains ---------------------------------------------------------

    def fails(self, machine: Machine) -> bool:
        """Decide whether a launch fails after its answer, and keep what was made of it."""
        if not self._luck.chance(self._luck.faults.launch_fails):
            return False
        refusal = Refusal(scope="pool", code="AllocationFailed", said="it could not be allocated")
        self._never_ran.add(machine.id)
        self.failed[machine.id] = msgspec.structs.replace(machine, state="failed", refusal=refusal)
        self.since_s[machine.id] = self._timeline.now_s
        return True

    def machine_ended(self, machine: Machine) -> None:
        if self._luck.chance(self._luck.faults.leaves_disk):
            self._leave(Ref(machine.pool.place, f"disk-{machine.id}"), machine.tags, machine.token)

    def _leave(self, ref: Ref, tags: dict[str, str], token: str) -> None:
        created_s = self._timeline.now_s - AGE_S
        self.leftovers[ref.id] = Leftover(
            ref=ref, kind="disk", created_at_s=created_s, token=token, tags=tags
        )
        if tags != FOREIGN:
            self.since_s[ref.id] = self._timeline.now_s

    def end(self, ref: Ref) -> bool:
        """End what remains; return whether it was one of these."""
        known = self.failed.pop(ref.id, None) or self.leftovers.pop(ref.id, None)
        self.since_s.pop(ref.id, None)
        return known is not None

    def tags_of(self, name: str) -> dict[str, str] | None:
        """Return the tags of what remains under a name; None if nothing does."""
        known = self.failed.get(name) or self.leftovers.get(name)
        return None if known is None else known.tags

    def _plan_silence(self) -> None:
        def begin() -> None:
            faults = self._luck.faults
            if faults.silent_every_s:
                place = self._luck.random.choice(self._places)
                self._silent_until_s[place] = self._timeline.now_s + faults.silent_s
                self._plan_silence()

        every_s = self._luck.faults.silent_every_s
        self._timeline.after(self._luck.random.expovariate(1 / every_s), begin)
