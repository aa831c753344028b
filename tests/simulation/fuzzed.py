"""Events with any values whatever, aimed at a manager's state: jobs, machines and workers that it knows."""

import math
import types
from functools import cache
from random import Random
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from agent.profile import Profile
from cloud.model import DEPLOYMENT_TAG, Pool
from orchestrator.events import AnyEvent
from orchestrator.settings import Settings
from orchestrator.simulated.scenario import profile_of, wild
from orchestrator.state import State

KINDS: tuple[type[Any], ...] = get_args(AnyEvent)
UNKNOWN = 0.1  # the share of names that belong to nothing
GIVEN = 0.5  # the share of fields with a default that are given
TRIES = 5  # at a value that its own type refuses
INTS = (-(10**30), -(2**63), -5, -1, 0, 2**31, 2**53 + 1, 2**63, 10**30, 10**400)
FLOATS = (-1e300, -1e9, -5.0, -1.0, 0.0, 5e-324, 1e10, 1e12, 1e300, math.nan, math.inf, -math.inf)
WORDS = ("", "nobody", "two\nlines", "\x00", "ü" * 3, "x" * 70)
KEYS = {"microbatch_s": "worker", "odds": "pool"}


class Fuzzer:
    """The same seed makes the same events from the same states."""

    def __init__(self, seed: int, settings: Settings, wildness: float) -> None:
        """`wildness` is the share of numbers that no real sender would send."""
        self._dice = Random(seed)
        self._settings, self._wildness = settings, wildness

    def event(self, state: State) -> AnyEvent:
        """One event of any type."""
        kind = self._dice.choice(KINDS)
        while (made := self._struct(kind, state)) is None:
            pass
        return made  # type: ignore[no-any-return]

    def _struct(self, kind: type[Any], state: State) -> Any:
        """None where the type itself refuses the values every time."""
        for _ in range(TRIES):
            try:
                return kind(
                    **{
                        name: self._value(hint, name, state)
                        for name, hint, needed in _fields(kind)
                        if needed or self._dice.random() < GIVEN
                    }
                )
            except (ValueError, TypeError, OverflowError):
                continue
        return None

    def _value(self, hint: Any, name: str, state: State) -> Any:
        if hint is Profile:
            return self._profile()
        if hint in (Pool, tuple[Pool, ...]) and state.pools and self._likely(UNKNOWN):
            return self._pools(hint, state)
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            made = self._settings if hint is Settings else self._struct(hint, state)
            if made is None:
                raise ValueError(f"{hint.__name__} takes none of these values")
            return made
        if get_args(hint):
            return self._composed(hint, name, state)
        return self._plain(hint, name, state)

    def _composed(self, hint: Any, name: str, state: State) -> Any:
        dice, origin, parts = self._dice, get_origin(hint), get_args(hint)
        if origin is Literal:
            return dice.choice(parts)
        if origin is types.UnionType:
            return self._value(dice.choice(parts), name, state)
        if name == "tags":
            return {DEPLOYMENT_TAG: self._settings.deployment} if self._likely(UNKNOWN) else {}
        if origin is dict:
            keys = [self._word(KEYS.get(name, name), state) for _ in range(2)]
            return {key: self._value(parts[1], name, state) for key in keys}
        if parts[-1] is not Ellipsis:
            return tuple(self._value(part, name, state) for part in parts)
        return tuple(self._value(parts[0], name, state) for _ in range(dice.choice((0, 1, 2, 5))))

    def _pools(self, hint: Any, state: State) -> Any:
        known = [pool.pool for pool in state.pools.values()]
        if hint is Pool:
            return self._dice.choice(known)
        return tuple(self._dice.sample(known, self._dice.randint(1, len(known))))

    def _profile(self) -> Profile:
        """What a simulated model measures, with one number of its own in the place of another."""
        dice = self._dice
        profile = profile_of(wild(dice.randrange(1000)))
        name = dice.choice(("memory_bytes", "overhead_s", "send_s", "sums", "apply_s_per_byte"))
        wrong = dice.choice(FLOATS) if not self._likely(self._wildness) else 1e-3
        return msgspec.structs.replace(profile, key=dice.choice(("a", "b")), **{name: wrong})

    def _likely(self, unlikely: float) -> bool:
        return self._dice.random() >= unlikely

    def _plain(self, hint: Any, name: str, state: State) -> Any:
        if hint is str:
            return self._word(name, state)
        if hint is bool:
            return self._dice.random() < 0.5
        if hint is int:
            return (
                self._count(name, state)
                if self._likely(self._wildness)
                else self._dice.choice(INTS)
            )
        if hint is float:
            return (
                self._number(name, state)
                if self._likely(self._wildness)
                else self._dice.choice(FLOATS)
            )
        return None

    def _word(self, name: str, state: State) -> str:
        """A name of something that the manager knows, or of nothing."""
        known = {
            "job": [*state.jobs, "job-new"],
            "worker": list(state.workers),
            "machine_id": list(state.machines),
            "id": list(state.machines),
            "token": list(state.leases),
            "cloud": [one.place.cloud for one in state.places.values()],
            "region": [one.place.region for one in state.places.values()],
            "pool": list(state.pools),
            "code": ["NoCapacity", "QuotaExceeded", "Throttled", "TokenSpent", "Unreachable"],
        }.get(name, [])
        return self._dice.choice(known if known and self._likely(UNKNOWN) else WORDS)

    def _count(self, name: str, state: State) -> int:
        dice = self._dice
        if name in ("step", "to_step", "from_step", "generation") and state.jobs:
            job = state.jobs[dice.choice(list(state.jobs))]
            near = job.layouts.generation if name == "generation" else job.progress.step
            return max(0, near + dice.choice((-1, 0, 0, 1, 5)))
        if name == "steps_total":
            return dice.choice((60, 400, 1500))
        if name.endswith("bytes"):
            return dice.choice((0, 1, 1 << 20, 1 << 33))
        return state.epoch + 1 if name == "epoch" else dice.choice((1, 1, 2, 4, 16))

    def _number(self, name: str, state: State) -> float:
        if name.endswith("at_s") or name == "deadline_s":
            return state.now_s + self._dice.choice((-20.0, 0.0, 0.0, 0.0, 0.0, 0.1, 0.1, 2.0))
        return self._dice.choice((0.01, 0.1, 0.5, 1.0, 2.0))


@cache
def _fields(kind: type[Any]) -> tuple[tuple[str, Any, bool], ...]:
    """Name, type and whether it has to be given."""
    hints = get_type_hints(kind)
    return tuple((f.name, hints[f.name], f.required) for f in msgspec.structs.fields(kind))
