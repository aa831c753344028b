"""A step as an SVG picture: one row per worker, one bar per action. Pure."""

from collections.abc import Sequence
from html import escape
from textwrap import wrap
from typing import NamedTuple

import numpy as np

from agent.layout import Replica
from agent.profile import Profile
from agent.schedule import Kind, Schedule
from agent.timeline import Timeline
from orchestrator.planner import cost_model
from orchestrator.planner.plans import LayoutPlan, Way
from orchestrator.planner.search import Task
from orchestrator.planner.simulation import schedules
from orchestrator.planner.simulation.kernel import Costs
from orchestrator.planner.simulation.simulator import Bar, timeline

WIDTH, ROW, LEFT, RIGHT, TOP, FOOT = 1200, 26, 64, 36, 74, 44
LINE_MAX = 140  # letters of a title that fit in a line
ROWS_MAX = 64
BARS_MAX = 20_000
LETTER = 7.0  # pixels that a digit needs
TICKS = 10
GAP, NAME_MAX = 10, 8
APART = 2.0  # if a panel is this many times longer, one scale shows too little of the shorter
DARK = (
    "@media (prefers-color-scheme: dark) {.paper {fill: #16181c} .words {fill: #e2e4e8} "
    ".faint {fill: #9aa0a8} .grid {stroke: #33373d}}"
)

COLOURS = {
    Kind.FORWARD: ("#4c78c8", "forward"),
    Kind.BACKWARD: ("#3a9d6a", "backward"),
    Kind.INPUT_GRADIENT: ("#3a9d6a", "input gradient"),
    Kind.WEIGHT_GRADIENT: ("#a9d18e", "weight gradient"),
    Kind.RECOMPUTE: ("#e0a53c", "recompute"),
    Kind.REDUCE: ("#9c6bb5", "reduce and apply"),
}


def svg(schedule: Schedule, costs: Costs, *, title: str = "", tail_s: Sequence[float] = ()) -> str:
    """Draw the timeline of one replica; `tail_s` is the time of reduce and apply per stage."""
    bars = timeline(schedule, costs)
    ends = [max(bar.end_s for bar in bars if bar.worker == w) for w in range(schedule.workers)]
    tails = _tails(schedule, bars, tail_s)
    whole_s = max([*ends, *(end for _, _, end in tails)])
    drawn = [bar for bar in bars if bar.worker < ROWS_MAX]
    cut_s = whole_s
    if len(drawn) > BARS_MAX:  # of a long step only the beginning is shown, to bound the file
        cut_s = sorted(bar.start_s for bar in drawn)[BARS_MAX]
        drawn = [bar for bar in drawn if bar.end_s <= cut_s]
        tails = []
    rows = min(schedule.workers, ROWS_MAX)
    scale = (WIDTH - LEFT - RIGHT) / cut_s
    height = TOP + rows * ROW + FOOT
    parts = [
        *_paper(height, title or schedule.name),
        *_title(title or schedule.name),
        *_legend({bar.kind for bar in drawn}, bool(tails)),
        *_axis(cut_s, scale, rows),
        *_rows(list(map(str, range(rows)))),
        _note(
            rows, "", f"; the first {_seconds(cut_s)} of {_seconds(whole_s)}" * (cut_s < whole_s)
        ),
    ]
    parts += [_bar(bar, scale) for bar in drawn]
    parts += [_tail(tail, scale) for tail in tails if tail[0] < ROWS_MAX]
    return "\n".join([*parts, "</svg>", ""])


def picture(profile: Profile, task: Task, plan: LayoutPlan) -> str:
    """Draw the predicted step of a plan's fullest replica, titled with the plan's reason."""
    way, tables = plan.way, cost_model.tables(profile)
    schedule = schedules.make(
        way.schedule, way.depth, plan.shares[0], recompute=way.recompute, chunks=way.chunks
    )
    like = cost_model.variant(way, task.per_instance, plan.width)
    costs = cost_model.costs(tables, plan.firsts, way, task.per_instance, like)
    width = np.array([float(plan.width)])
    tail_s = cost_model.tails(tables, plan.firsts, way, width, task.per_instance)[:, 0]
    return svg(schedule, costs, title=plan.because, tail_s=tail_s.tolist())


class Panel(NamedTuple):
    """Bars of some workers, and the name of each row."""

    name: str
    bars: tuple[Bar, ...]
    rows: tuple[str, ...]


def panels(title: str, drawn: Sequence[Panel]) -> str:
    """Draw panels below each other, on one time scale unless it would make a panel too small."""
    shown = [
        (panel, [bar for bar in panel.bars[:BARS_MAX] if bar.worker < ROWS_MAX]) for panel in drawn
    ]
    ends_s = [max((bar.end_s for bar in bars), default=0.0) for _, bars in shown]
    longest_s = max(ends_s, default=0.0) or 1.0
    apart = any(0 < end_s < longest_s / APART for end_s in ends_s)
    y, parts = 0, [*_title(title), *_legend({bar.kind for _, bars in shown for bar in bars}, False)]
    for (panel, bars), end_s in zip(shown, ends_s, strict=True):
        whole_s = (apart and end_s) or longest_s
        scale, names = (WIDTH - LEFT - RIGHT) / whole_s, panel.rows[:ROWS_MAX]
        parts.append(f'<g transform="translate(0 {y})">')
        parts += [*_axis(whole_s, scale, len(names)), *_rows(names)]
        parts += [_bar(bar, scale) for bar in bars]
        parts += [
            _note(
                len(names),
                f"{panel.name} {took(end_s, ends_s[0])}",
                ", on a scale of its own" if apart else "",
            ),
            "</g>",
        ]
        y += len(names) * ROW + FOOT + GAP
    return "\n".join([*_paper(TOP + y - GAP, title), *parts, "</svg>", ""])


def measured(seen: Timeline, profile: Profile | None) -> str:
    """Draw a measured step below its prediction; without a profile nothing is predicted."""
    return panels(
        f"step {seen.step} of {seen.job}: {seen.layout.describe()}", step_panels(seen, profile)
    )


def step_panels(seen: Timeline, profile: Profile | None) -> list[Panel]:
    """Return the bars of a step as they are predicted, if there is a profile, and as they were."""
    layout = seen.layout
    rows = {name: row for row, name in enumerate(layout.workers)}
    bars = [
        Bar(
            worker=rows[name],
            kind=Kind(m.kind),
            stage=m.stage,
            microbatch=m.microbatch,
            start_s=m.start_s,
            end_s=m.end_s,
        )
        for name, moments in seen.workers.items()
        for m in moments
    ]
    drawn = [Panel("measured", tuple(bars), layout.workers)]
    if profile is not None:
        drawn.insert(0, Panel("predicted", tuple(predicted(seen, profile)), layout.workers))
    return drawn


def predicted(seen: Timeline, profile: Profile) -> list[Bar]:
    """Return the bars of the same layout, simulated with the profile's costs."""
    found, row, depth = [], 0, seen.layout.depth
    for replica in seen.layout.replicas:
        bars = _replica(seen, profile, replica)
        found += [
            Bar(
                worker=row + bar.worker,
                kind=bar.kind,
                stage=bar.stage,
                microbatch=replica.first + bar.microbatch,
                start_s=bar.start_s,
                end_s=bar.end_s,
            )
            for bar in bars
        ]
        row += depth
    return found


def _replica(seen: Timeline, profile: Profile, replica: Replica) -> list[Bar]:
    layout, tables = seen.layout, cost_model.tables(profile)
    schedule = layout.schedule_of(replica)
    # For a cut inside one of the profile's sections, the nearest boundary after it is taken.
    ends = [section.after if section.after >= 0 else 1 << 62 for section in profile.sections]
    firsts = (0, *(1 + int(np.searchsorted(ends[:-1], cut)) for cut in seen.cuts))
    if len(set(firsts)) < len(firsts) or firsts[-1] >= len(ends):
        return []
    way = Way(
        schedule=schedule.name,
        depth=layout.depth,
        microbatch_size=profile.microbatch_sizes[0],
        recompute=layout.recompute,
        chunks=schedule.stages // layout.depth,
    )
    costs = cost_model.costs(tables, firsts, way, 1, layout.width)
    bars = list(timeline(schedule, costs))
    tail_s = cost_model.tails(tables, firsts, way, np.array([float(layout.width)]), 1)[:, 0]
    for stage, seconds in enumerate(tail_s):
        done_s = max(bar.end_s for bar in bars if bar.stage == stage)
        host = schedule.host(stage, 0)
        bars.append(
            Bar(
                worker=host,
                kind=Kind.REDUCE,
                stage=stage,
                microbatch=0,
                start_s=done_s,
                end_s=done_s + float(seconds),
            )
        )
    return bars


def took(seconds: float, like_s: float) -> str:
    """Say a duration, and how many times faster or slower it is than the other one."""
    if not seconds:
        return "nothing"
    ratio = max(seconds, like_s) / min(seconds, like_s) if like_s else 1.0
    if ratio < 1.05:
        return _seconds(seconds)
    times = f"{ratio:.0f}x" if ratio >= 10 else f"{ratio:.1f}x"
    return f"{_seconds(seconds)}, {times} {'faster' if seconds < like_s else 'slower'}"


def _tails(
    schedule: Schedule, bars: Sequence[Bar], tail_s: Sequence[float]
) -> list[tuple[int, float, float]]:
    """Return worker, start and end of every stage's reduction."""
    found = []
    for stage, seconds in enumerate(tail_s):
        mine = [bar for bar in bars if bar.stage == stage and bar.kind != Kind.FORWARD]
        last = max(mine, key=lambda bar: bar.end_s)
        found.append((schedule.host(stage, 0), last.end_s, last.end_s + seconds))
    return [tail for tail in found if tail[2] > tail[1]]


def _paper(height: int, title: str) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="11" '
        f'role="img" aria-label="{escape(title, quote=True)}">',
        f"<style>{DARK}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]


def _rows(names: Sequence[str]) -> list[str]:
    return [
        f'<text class="words" x="{LEFT - 8}" y="{TOP + row * ROW + ROW / 2 + 4}" text-anchor="end" '
        f'fill="#444444">{escape(name[-NAME_MAX:])}</text>'
        for row, name in enumerate(names)
    ]


def _title(title: str) -> list[str]:
    """Draw a title on two lines, which hold a plan's reason."""
    return [
        f'<text class="words" x="{LEFT}" y="{18 + 18 * row}" font-size="14" fill="#222222">{escape(line)}</text>'
        for row, line in enumerate(wrap(title, LINE_MAX)[:2])
    ]


def _legend(kinds: set[Kind], reduces: bool) -> list[str]:
    labels = [(colour, label) for kind, (colour, label) in COLOURS.items() if kind in kinds]
    labels += [("#9c6bb5", "reduce and apply")] if reduces else []
    parts, x = [], float(LEFT)
    for colour, label in dict.fromkeys(labels):
        parts.append(f'<rect x="{x:.0f}" y="49" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text class="words" x="{x + 17:.0f}" y="59" fill="#444444">{label}</text>')
        x += 34 + LETTER * len(label)
    return parts


def _axis(whole_s: float, scale: float, rows: int) -> list[str]:
    parts, bottom = [], TOP + rows * ROW
    for tick in range(TICKS + 1):
        x = LEFT + whole_s * tick / TICKS * scale
        parts.append(
            f'<line class="grid" x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}" stroke="#e6e6e6"/>'
            f'<text class="words" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle" fill="#444444">'
            f"{_seconds(whole_s * tick / TICKS)}</text>"
        )
    return parts


def _note(rows: int, what: str, more: str) -> str:
    name = (
        f'<tspan class="words" font-weight="bold" fill="#222222">{escape(what)}</tspan>: '
        * bool(what)
    )
    return (
        f'<text class="faint" x="{LEFT}" y="{TOP + rows * ROW + 34}" fill="#777777">'
        f"{name}worker by row, time from left to right{more}</text>"
    )


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 or value == 0 else f"{value * 1e3:.3g} ms"


def _bar(bar: Bar, scale: float) -> str:
    colour, label = COLOURS[bar.kind]
    x, width = LEFT + bar.start_s * scale, (bar.end_s - bar.start_s) * scale
    y = TOP + bar.worker * ROW + 2
    name = f"{label} of microbatch {bar.microbatch}, stage {bar.stage}"
    if bar.kind == Kind.REDUCE:
        name = f"{label}, stage {bar.stage}"
    found = (
        f'<rect x="{x:.2f}" y="{y}" width="{max(width - 0.5, 0.3):.2f}" height="{ROW - 4}" '
        f'fill="{colour}"><title>{name}: {_seconds(bar.start_s)} to {_seconds(bar.end_s)}</title></rect>'
    )
    number = str(bar.microbatch)
    if bar.kind != Kind.REDUCE and width > LETTER * len(number) + 3:
        found += (
            f'<text x="{x + width / 2:.2f}" y="{y + 15}" text-anchor="middle" '
            f'fill="#ffffff" pointer-events="none">{number}</text>'
        )
    return found


def _tail(tail: tuple[int, float, float], scale: float) -> str:
    worker, start_s, end_s = tail
    x, width = LEFT + start_s * scale, (end_s - start_s) * scale
    return (
        f'<rect x="{x:.2f}" y="{TOP + worker * ROW + 2}" width="{max(width - 0.5, 0.3):.2f}" '
        f'height="{ROW - 4}" fill="#9c6bb5"><title>reduce and apply: {_seconds(start_s)} to '
        f"{_seconds(end_s)}</title></rect>"
    )
