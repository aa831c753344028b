"""One step as it was predicted and as it was: the bars of every worker, for the page to draw."""

import msgspec

from agent.profile import Profile
from agent.schedule import Kind
from agent.timeline import Timeline

ROWS_MAX = 64
BARS_MAX = 4_000  # of a panel: what a page draws at once

Strip = tuple[int, str, int, int, float, float]  # row, kind, stage, microbatch, start and end


class Panel(msgspec.Struct, frozen=True, kw_only=True):
    """The bars of a step; `left_out` of them came after the last one that is shown."""

    name: str  # predicted or measured
    bars: list[Strip]
    took_s: float
    left_out: int


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """A step that was recorded; without a profile of its model nothing is predicted."""

    job: str
    step: int
    at_s: float
    layout: str
    workers: tuple[str, ...]  # a row for each
    panels: list[Panel]
    kinds: dict[str, str]  # colour of each kind of bar


def step_of(seen: Timeline, profile: Profile | None) -> Step:
    from orchestrator.planner import gantt  # takes longer to import than the page to start

    names = {kind: name for kind, (_, name) in gantt.COLOURS.items()}
    panels: list[Panel] = []
    for panel in gantt.step_panels(seen, profile):
        bars = sorted(panel.bars, key=lambda bar: bar.start_s)
        shown = [bar for bar in bars if bar.worker < ROWS_MAX][:BARS_MAX]
        panels.append(
            Panel(
                name=panel.name,
                bars=[
                    (b.worker, names[Kind(b.kind)], b.stage, b.microbatch, b.start_s, b.end_s)
                    for b in shown
                ],
                took_s=max((bar.end_s for bar in bars), default=0.0),
                left_out=len(bars) - len(shown),
            )
        )
    return Step(
        job=seen.job,
        step=seen.step,
        at_s=seen.at_s,
        layout=seen.layout.describe(),
        workers=seen.layout.workers[:ROWS_MAX],
        panels=panels,
        kinds={name: colour for colour, name in gantt.COLOURS.values()},
    )
