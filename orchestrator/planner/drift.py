"""Correction of a profile by the times of real steps.

Every committed step reports how long it took under which plan. The ratio of observed to predicted
is smoothed; a factor that stays outside the tolerance means that the profile has drifted:

    factor_t = (1 - a) factor_{t-1} + a * observed / predicted,    a = 2 / (window + 1)

Observations of narrow layouts still count while wide ones run, and vice versa, but fade step by
step.

A factor common to all layouts is a machine that became slower or faster, so times are refitted by
it. Workers also report their time per microbatch. If its factor differs from that of the step,
computing is refitted by it, and the rest becomes overhead of every step. If only wide layouts are
off, the ring is: hop and bandwidth are scaled alike until they are measured again, because one
number cannot separate them.
"""

from typing import Literal

import msgspec

from agent.profile import Link, Profile, Section
from orchestrator.planner.plans import LayoutPlan

WINDOW = 20
TOLERANCE = 0.05
# The most steps that one kind counts for, and the number of steps in which the other kind fades.
KEPT = 10 * WINDOW
RING_MAX = 100.0  # one correction scales a ring by at most this factor
APART = 0.15  # above a tenth, the change of pace that workers report
MODELS_WIDE = 2  # from this width on a step includes a reduction

Advice = Literal["keep", "refit", "measure"]


class DriftWatch(msgspec.Struct, frozen=True, kw_only=True):
    """Smoothed factors of narrow and of wide layouts, and how many steps each counts for."""

    narrow: float = 1.0
    narrow_steps: float = 0.0
    wide: float = 1.0
    wide_steps: float = 0.0


class DriftVerdict(msgspec.Struct, frozen=True, kw_only=True):
    advice: Advice
    factor: float
    because: str


def observe(watch: DriftWatch, plan: LayoutPlan, observed_s: float) -> DriftWatch:
    """Add one committed step, which must not have been interrupted by a morph or a loss."""
    factor, share = observed_s / plan.step_s, 2 / (WINDOW + 1)
    if plan.width >= MODELS_WIDE:
        return DriftWatch(
            narrow=watch.narrow,
            narrow_steps=watch.narrow_steps * (1 - 1 / KEPT),
            wide=factor if watch.wide_steps == 0 else (1 - share) * watch.wide + share * factor,
            wide_steps=min(KEPT, watch.wide_steps + 1.0),
        )
    return DriftWatch(
        narrow=factor if watch.narrow_steps == 0 else (1 - share) * watch.narrow + share * factor,
        narrow_steps=min(KEPT, watch.narrow_steps + 1.0),
        wide=watch.wide,
        wide_steps=watch.wide_steps * (1 - 1 / KEPT),
    )


def judge(watch: DriftWatch) -> DriftVerdict:
    """Decide whether to keep the profile, scale its times, or scale its ring."""
    known = [
        factor
        for factor, steps in ((watch.narrow, watch.narrow_steps), (watch.wide, watch.wide_steps))
        if steps >= WINDOW
    ]
    off = [factor for factor in known if abs(factor - 1) > TOLERANCE]
    if not off:
        return DriftVerdict(advice="keep", factor=1.0, because="steps take what was predicted")
    if max(known) - min(known) <= TOLERANCE * min(known):
        factor = sum(known) / len(known)
        why = f"steps take {factor:.2f} times what was predicted: times are scaled by it"
        return DriftVerdict(advice="refit", factor=factor, because=why)
    why = (
        f"steps take {watch.narrow:.2f} times what was predicted alone and {watch.wide:.2f} times "
        "with a reduction: the ring is scaled until it is measured again"
    )
    return DriftVerdict(advice="measure", factor=1.0, because=why)


def apart(plan: LayoutPlan, overhead_s: float, factor: float, busy_s: float) -> tuple[float, float]:
    """Return how much slower computing is, and the overhead of every step.

    Steps take `factor` times the prediction. `busy_s` is how long the busiest worker computed in a
    step by its report; 0 if there is none.

        factor * step = computing * (step - reduce - overhead) + reduce + new overhead
    """
    computing = busy_s / plan.cost.busy_s if plan.cost.busy_s > 0 else 0.0
    if not computing or abs(computing - factor) <= APART * factor:
        return factor, factor * overhead_s
    pipeline_s = max(0.0, plan.step_s - plan.cost.reduce_s - overhead_s)
    rest_s = factor * plan.step_s - computing * pipeline_s - plan.cost.reduce_s
    return (computing, rest_s) if rest_s >= 0 else (factor, factor * overhead_s)


def refit(profile: Profile, factor: float, overhead_s: float | None = None) -> Profile:
    """Return the profile with all computing times scaled and the network unchanged."""
    return msgspec.structs.replace(
        profile,
        sections=tuple(_scaled(section, factor) for section in profile.sections),
        apply_s_per_byte=profile.apply_s_per_byte * factor,
        overhead_s=profile.overhead_s * factor if overhead_s is None else overhead_s,
        send_s=profile.send_s * factor,
    )


def believed(
    plan: LayoutPlan, factor: float, computing: float, *, ring: bool = False
) -> LayoutPlan:
    """Return the plan's cost after the profile was refitted.

    With `ring` the additional time is the ring's; else computing is scaled, and the rest is
    overhead.
    """
    cost = plan.cost
    longer_s = (factor - 1) * plan.step_s
    cost = msgspec.structs.replace(
        cost,
        step_s=cost.step_s + longer_s,
        busy_s=computing * cost.busy_s,
        reduce_s=cost.reduce_s + ring * longer_s,
    )
    return msgspec.structs.replace(plan, cost=cost)


def refit_ring(profile: Profile, plan: LayoutPlan, factor: float) -> Profile:
    """Return the profile with the ring scaled so that this wide plan is `factor` times slower."""
    tail_s = max(plan.cost.reduce_s, plan.step_s / RING_MAX)
    slower = min(max(1 + (factor - 1) * plan.step_s / tail_s, 1 / RING_MAX), RING_MAX)
    network = profile.network
    return msgspec.structs.replace(
        profile,
        network=msgspec.structs.replace(
            network,
            reduce_intra=_slowed(network.reduce_intra, slower),
            reduce_inter=_slowed(network.reduce_inter, slower),
        ),
    )


def _slowed(link: Link, slower: float) -> Link:
    return msgspec.structs.replace(
        link,
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / slower,
        latency_s=link.latency_s * slower,
        jitter_s=link.jitter_s * slower,
    )


def _scaled(section: Section, factor: float) -> Section:
    def scaled(times: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(factor * seconds for seconds in times)

    return msgspec.structs.replace(
        section,
        forward_s=scaled(section.forward_s),
        backward_s=scaled(section.backward_s),
        input_gradient_s=scaled(section.input_gradient_s),
        weight_gradient_s=scaled(section.weight_gradient_s),
        untraced_s=scaled(section.untraced_s),
        fresh_s=scaled(section.fresh_s),
    )
