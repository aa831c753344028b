"""From one layout to the next: which state moves, what that costs, and whether it pays.

Slots of the new layout are assigned to workers so that the fewest bytes move, an assignment problem
with

    cost(worker, slot) = bytes of the slot's sections that the worker does not hold

A missing section comes from the holder that has sent least so far; a section without a holder comes
from the backup tier. All transfers run at once, so the pause is that of the busiest link.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from agent.profile import Profile
from orchestrator.formatting import duration, pause, plural
from orchestrator.planner import matching
from orchestrator.planner.compiled import Codes, Flags, Reals
from orchestrator.planner.errors import DoesNotFit
from orchestrator.planner.plans import LayoutPlan

BACKUP = ""
WORTH = 0.97  # Rubick's gate: this share of all time must be left for training
TOLERANCE = 1e-9
NEVER = 1e6  # times the whole state, so more than any allowed assignment costs


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """One section of the state for one worker; it comes from the backup tier without a source."""

    section: int
    source: str
    target: str
    size_bytes: float


class Transition(msgspec.Struct, frozen=True, kw_only=True):
    """The way to a new layout: `chains[replica][stage]` is the worker that takes this slot."""

    chains: tuple[tuple[str, ...], ...]
    moves: tuple[Move, ...]
    kept_bytes: float
    moved_bytes: float
    backup_bytes: float  # the part of the moved bytes that no worker holds any more
    pause_s: float


class Pace(NamedTuple):
    """How fast state moves, and the fixed pause of every morph."""

    bandwidth_bytes_per_s: float
    backup_bytes_per_s: float
    fixed_s: float


def section_bytes(profile: Profile) -> tuple[float, ...]:
    """Return the bytes of every section's state, which a worker needs before it can train it."""
    return tuple(section.parameter_bytes + section.optimizer_bytes for section in profile.sections)


def held_by(plan: LayoutPlan, chains: Sequence[Sequence[str]]) -> dict[str, frozenset[int]]:
    """Return the sections that each worker of a layout holds."""
    held: dict[str, set[int]] = {}
    for chain in chains:
        for stage, (first, end) in enumerate(plan.stages):
            held.setdefault(chain[stage % len(chain)], set()).update(range(first, end))
    return {worker: frozenset(sections) for worker, sections in held.items()}


def transition(
    held: Mapping[str, frozenset[int]],
    workers: Sequence[str],
    plan: LayoutPlan,
    sizes: Sequence[float],
    pace: Pace,
    barred: Flags | None = None,
) -> Transition:
    """Return the transition that moves the fewest bytes.

    `held` is what survivors hold; `workers` are all that can be used. Worker i does not get slot
    replica * depth + stage if `barred[i, slot]`. Among equally good assignments each worker takes the
    slot nearest to its position in `workers`, so listed workers stay in order.
    """
    depth, width = plan.way.depth, plan.width
    if len(workers) < depth * width:
        raise DoesNotFit(f"{plan.describe()} needs {depth * width} workers, and has {len(workers)}")
    size = np.array(sizes, float)
    has = np.zeros((len(workers), plan.sections), bool)
    for row, worker in enumerate(workers):
        # A profile that came meanwhile may divide the model into fewer sections.
        has[row, [each for each in held.get(worker, ()) if each < plan.sections]] = True
    needs = np.zeros((depth, plan.sections), bool)
    for stage, (first, end) in enumerate(plan.stages):
        needs[stage % depth, first:end] = True
    rows = _assigned(has, needs, size, width, barred)
    moves = _moves(has, needs, size, rows, tuple(workers))
    moved = sum(move.size_bytes for move in moves)
    backup = sum(move.size_bytes for move in moves if move.source == BACKUP)
    chains = tuple(tuple(workers[int(row)] for row in rows[replica]) for replica in range(width))
    return Transition(
        chains=chains,
        moves=moves,
        kept_bytes=float((needs * size).sum()) * width - moved,
        moved_bytes=moved,
        backup_bytes=backup,
        pause_s=_pause_s(moves, pace),
    )


def _assigned(has: Flags, needs: Flags, size: Reals, width: int, barred: Flags | None) -> Codes:
    """Return the worker of every slot, [replica, stage]."""
    depth = len(needs)
    missing = (needs * size).sum(axis=1)[None, :] - has.astype(float) @ (needs * size).T
    far = np.subtract.outer(np.arange(len(has)), np.arange(depth * width)) / len(has)
    whole = max(float(size.sum()), 1.0)
    cost = np.tile(missing, (1, width)) + TOLERANCE * far**2 * whole
    if barred is not None:
        cost[barred] = NEVER * whole
    row, column = matching.cheapest(cost)
    rows = np.empty(depth * width, np.int64)
    rows[column] = row
    return rows.reshape(width, depth)


def _moves(
    has: Flags, needs: Flags, size: Reals, rows: Codes, workers: tuple[str, ...]
) -> tuple[Move, ...]:
    sent = np.zeros(len(workers))
    moves = []
    for replica, stage in np.ndindex(*rows.shape):
        target = int(rows[replica, stage])
        for section in np.flatnonzero(needs[stage] & ~has[target]).tolist():
            holders = np.flatnonzero(has[:, section])
            source = BACKUP
            if len(holders):
                holder = int(holders[sent[holders].argmin()])
                sent[holder] += size[section]
                source = workers[holder]
            moves.append(
                Move(
                    section=section,
                    source=source,
                    target=workers[target],
                    size_bytes=float(size[section]),
                )
            )
    return tuple(moves)


def _pause_s(moves: Sequence[Move], pace: Pace) -> float:
    """Return the pause: workers send and receive at once; the backup tier is a single sender."""
    out: dict[str, float] = {}
    into: dict[str, float] = {}
    backup = 0.0
    for move in moves:
        into[move.target] = into.get(move.target, 0.0) + move.size_bytes
        if move.source == BACKUP:
            backup += move.size_bytes
        else:
            out[move.source] = out.get(move.source, 0.0) + move.size_bytes
    busiest = max([*out.values(), *into.values()], default=0.0)
    sending_s = max(busiest / pace.bandwidth_bytes_per_s, backup / pace.backup_bytes_per_s)
    return pace.fixed_s + sending_s


# --- does it pay? ----------------------------------------------------------------------------------


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """A morph that is possible now. `calm_s` is the expected time to the next forced change."""

    steps_per_s: float  # without the morph; 0 if training stands still
    steps_per_s_after: float
    pause_s: float
    calm_s: float
    trained_s: float  # by this job so far
    morphs: int  # voluntary ones so far


def opens_s(morphs: int, pause_s: float) -> float:
    """Return how long a job must have trained before one more voluntary morph."""
    return (morphs + 1) * pause_s / (1 - WORTH)


def _length(seconds: float) -> str:
    return pause(seconds) if seconds < 60 else duration(seconds)


class MorphVerdict(msgspec.Struct, frozen=True, kw_only=True):
    go: bool
    because: str
    later: bool = False  # the morph would pay, but it is too early


def worthwhile(now: Situation) -> MorphVerdict:
    """Return whether a morph pays.

    A voluntary morph must win back its pause before the next change, and leave 97 % for training:
    (T - N * pause) / T > 0.97 with this morph counted in N. A forced one always goes, because without
    it nothing trains.
    """
    if now.steps_per_s <= 0:
        return MorphVerdict(go=True, because="nothing is trained as it is: this morph is forced")
    stay = now.calm_s * now.steps_per_s
    move = max(now.calm_s - now.pause_s, 0.0) * now.steps_per_s_after
    if now.steps_per_s_after <= now.steps_per_s:
        return MorphVerdict(
            go=False,
            because=f"it would train no faster: {now.steps_per_s_after:.4g} steps/s there, {now.steps_per_s:.4g} here",
        )
    if move <= stay:
        return MorphVerdict(
            go=False,
            because=(
                f"a pause of {pause(now.pause_s)} would not be won back: {now.steps_per_s_after:.4g} "
                f"instead of {now.steps_per_s:.4g} steps/s for the {_length(now.calm_s)} until the "
                "next change"
            ),
        )
    lost = (now.morphs + 1) * now.pause_s
    if now.trained_s <= 0 or (now.trained_s - lost) / now.trained_s <= WORTH:
        pauses = (
            "a pause"
            if now.morphs == 0
            else f"{plural(now.morphs + 1, 'pause')}, this one counted,"
        )
        return MorphVerdict(
            go=False,
            later=True,
            because=(
                f"{pauses} of {pause(now.pause_s)} would be more than {1 - WORTH:.0%} of the "
                f"{_length(now.trained_s)} that it has trained; it may change once it has trained "
                f"{_length(opens_s(now.morphs, now.pause_s))}"
            ),
        )
    return MorphVerdict(
        go=True,
        because=(
            f"{move - stay:.4g} steps are gained in the {_length(now.calm_s)} until the next change, "
            f"a pause of {now.pause_s:.3g} s counted"
        ),
    )
