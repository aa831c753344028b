"""The page as one file that can be mailed: no script, nothing from elsewhere, and readable for years."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from importlib.resources import files

from orchestrator.dashboard.past import Asked, Footprint, Values, footprint, loss_curve
from orchestrator.dashboard.summary import Summary, summary_of
from orchestrator.formatting import duration, loss, percent, plural, told, usd
from orchestrator.history.reader import History
from orchestrator.history.records import MEANING, Happening, Spent
from orchestrator.view import JobView, View

WIDE, TALL, LOW = 1000, 180, 80
COLOURS = 10  # of the page: --c0 to --c9
EVENTS_MAX = 200
ROWS_MAX = 200
POINTS = 400
EXTRA = """
body { padding-bottom: 40px; }
.chart svg { width: 100%; display: block; background: var(--page); border-radius: 6px; }
.chart text { fill: var(--quiet); font-size: 11px; }
.still .events { max-height: none; }
.still article + article { margin-top: 12px; }
"""


def page_of(view: View, history: History) -> str:
    """Return the file for what is shown now and everything that the history knows."""
    first_s, last_s = history.span() or (0.0, 0.0)
    return page(
        view,
        footprint(history, Asked(), POINTS),
        history.money(),
        history.events(last=EVENTS_MAX),
        {job.id: loss_curve(history, job.id, first_s, last_s) for job in view.jobs[:ROWS_MAX]},
    )


def page(
    view: View,
    past: Footprint,
    money: Sequence[Spent],
    events: Sequence[Happening],
    losses: dict[str, list[tuple[float, float]]],
) -> str:
    """Return the whole file; everything that comes from outside is escaped."""
    title = f"{view.deployment}, {_date(view.at_s)}"
    style = files("orchestrator.dashboard").joinpath("static/style.css").read_text() + EXTRA
    parts = [
        _costs(summary_of(view)),
        _section("Footprint over time", f'<div class="card chart">{_footprint(past)}</div>'),
        _section("Jobs", *(_job(job, losses.get(job.id, [])) for job in view.jobs[:ROWS_MAX])),
        _section("Where the money went", f'<div class="card" id="money">{_money(money)}</div>'),
        _section("Machines", f'<div class="card flush">{_machines(view)}</div>'),
        _section("What happened, and why", f'<div class="card flush">{_events(events)}</div>'),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>spot-orchestrator: {escape(title)}</title><style>{style}</style></head>"
        f'<body class="still"><header><h1>spot-orchestrator</h1><span class="quiet">{escape(title)}</span>'
        f"</header><main>{''.join(parts)}</main></body></html>\n"
    )


def _section(title: str, *bodies: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{''.join(bodies)}</section>"


def _costs(sum_: Summary) -> str:
    share = percent(sum_.saved_usd, sum_.on_demand_usd) if sum_.on_demand_usd else ""
    budget = "no limit set" if sum_.budget_usd is None else f"of {usd(sum_.budget_usd)}"
    lost = f"{plural(sum_.lost_steps, 'step')}, {duration(sum_.lost_s)}"
    boxes = (
        ("Spent", usd(sum_.spent_usd), budget),
        ("On demand", usd(sum_.on_demand_usd), "for the same machine time"),
        ("Saved", usd(sum_.saved_usd), f"{share} less than on demand" if share else ""),
        ("Work lost", usd(sum_.lost_usd), lost if sum_.lost_steps else "no step was lost"),
        ("Now", f"{usd(sum_.now_usd_per_h)}/h", plural(sum_.machines, "machine")),
    )
    made = (
        f'<div class="cost"><div class="name">{escape(name)}</div><div class="value">{escape(value)}</div>'
        f'<div class="more">{escape(more)}</div></div>'
        for name, value, more in boxes
    )
    return f'<section class="costs" aria-label="Costs">{"".join(made)}</section>'


# --- charts --------------------------------------------------------------------------------------


def _footprint(past: Footprint) -> str:
    whole_s = max(past.to_s - past.from_s, 1e-9)
    totals = [sum(column) for column in zip(*(band.machines for band in past.held), strict=True)]
    most = max(totals, default=0.0) or 1.0
    floor = [0.0] * len(past.at_s)
    drawn, legend = [], []
    for number, band in enumerate(past.held):
        roof = [low + more for low, more in zip(floor, band.machines, strict=True)]
        edge = [*_places(past, roof, most, TALL), *reversed(_places(past, floor, most, TALL))]
        colour = f"var(--c{number % COLOURS})"
        drawn.append(f'<path d="M{"L".join(edge)}Z" fill="{colour}"/>')
        legend.append(f'<li><i style="background:{colour}"></i>{escape(band.pool)}</li>')
        floor = roof
    for mark in past.marks:
        x = WIDE * (mark.at_s - past.from_s) / whole_s
        said = escape(f"{_date(mark.at_s)}: {told(mark.who, mark.what, mark.because)}")
        drawn.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{TALL}" stroke="var(--quiet)" stroke-dasharray="2 3">'
            f"<title>{said}</title></line>"
        )
    span = f"{_date(past.from_s)} to {_date(past.to_s)}"
    return "".join(
        (
            f'<div class="name">Machines, at most {most:.0f}; {escape(span)}</div>',
            _svg(TALL, f"Machines by pool, at most {most:.0f}", "".join(drawn)),
            f'<ul class="legend">{"".join(legend)}</ul>',
            _line(past, past.steps_per_s, "Steps per second", "c0"),
            _line(past, past.work_usd, "Dollars per 1,000 steps", "c2"),
        )
    )


def _svg(height: int, label: str, inside: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDE} {height}" height="{height}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(label, quote=True)}">{inside}</svg>'
    )


def _places(past: Footprint, values: Sequence[float], most: float, height: int) -> list[str]:
    whole_s = max(past.to_s - past.from_s, 1e-9)
    return [
        f"{WIDE * (at_s - past.from_s) / whole_s:.1f} {height * (1 - 0.96 * value / most):.1f}"
        for at_s, value in zip(past.at_s, values, strict=True)
    ]


def _line(past: Footprint, values: Values, name: str, colour: str) -> str:
    """Draw a line that is broken where nothing was computed."""
    most = max((value for value in values if value is not None), default=0.0)
    if not most:
        return ""
    places = _places(past, [value or 0.0 for value in values], most, LOW)
    path, goes_on = "", False
    for place, value in zip(places, values, strict=True):
        if value is not None:
            path += f"{'L' if goes_on else 'M'}{place}"
        goes_on = value is not None
    line = f'<path class="line" d="{path}" style="stroke:var(--{colour})"/>'
    return f'<div class="name">{name}, at most {most:.4g}</div>{_svg(LOW, name, line)}'


def _loss_curve(points: Sequence[tuple[float, float]]) -> str:
    if len(points) < 2:
        return ""
    x0, x1 = points[0][0], points[-1][0]
    ys = [y for _, y in points]
    y0, y1 = min(ys), max(ys)
    path = "L".join(
        f"{WIDE * (x - x0) / (x1 - x0 or 1):.1f} {LOW * (0.98 - 0.96 * (y - y0) / (y1 - y0 or 1)):.1f}"
        for x, y in points
    )
    name = f"Loss by step, {loss(y1)} to {loss(y0)}, steps {x0:,.0f} to {x1:,.0f}"
    line = f'<path class="line" d="M{path}"/>'
    return f'<div class="chart"><div class="name">{name}</div>{_svg(LOW, name, line)}</div>'


# --- tables --------------------------------------------------------------------------------------


def _job(job: JobView, points: Sequence[tuple[float, float]]) -> str:
    facts = (
        ("Steps", f"{job.step:,} of {job.steps_total:,}" if job.steps_total else f"{job.step:,}"),
        ("Loss", loss(job.loss)),
        ("Time", duration(job.took_s)),
        ("Layout", job.layout or "-"),
        ("Machines taken away", f"{job.preemptions:,}"),
        ("Steps lost", f"{job.steps_lost:,}"),
        ("Spent", usd(job.spent_usd)),
        ("On demand", usd(job.on_demand_usd)),
    )
    list_ = "".join(f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in facts)
    return (
        f'<article class="card"><div class="title"><strong>{escape(job.script)}</strong> '
        f'<code class="quiet">{escape(job.id)}</code> <span class="pill">{job.status.lower()}</span></div>'
        f'<p class="quiet">{escape(job.because)}</p><dl class="facts">{list_}</dl>{_loss_curve(points)}</article>'
    )


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in heads)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _money(lines: Sequence[Spent]) -> str:
    whole = sum(line.usd for line in lines)
    meaning = {str(cause): text for cause, text in MEANING.items()}
    rows = [
        (line.key, usd(line.usd), percent(line.usd, whole) if whole else "", meaning[line.key])
        for line in lines
        if line.usd
    ]
    return _table(("Cause", "Dollars", "Share", "Paid for"), [*rows, ("all", usd(whole), "", "")])


def _machines(view: View) -> str:
    rows = [
        (
            one.id,
            one.pool,
            one.market,
            duration((one.ended_at_s or view.at_s) - one.launched_at_s),
            usd(one.cost_usd),
            one.why_ended or one.why_bought,
        )
        for one in view.machines[:ROWS_MAX]
    ]
    return _table(("Machine", "Pool", "Market", "Held for", "Cost", "Why"), rows)


def _events(events: Sequence[Happening]) -> str:
    lines = "".join(
        f'<li><time>{_date(one.at_s)[-8:]}</time><p><span class="who">{escape(one.who)}</span> '
        f"{escape(told(one.who, one.what, one.because))}</p></li>"
        for one in reversed(events[-EVENTS_MAX:])
    )
    return f'<ul class="events">{lines}</ul>'


def _date(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S")
