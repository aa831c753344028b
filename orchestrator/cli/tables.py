"""Tables of jobs, machines and costs, for a person."""

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.segment import Segment, Segments
from rich.table import Table
from rich.text import Text

from orchestrator.cli import watch
from orchestrator.formatting import duration, loss, of_budget, percent, plural, usd
from orchestrator.view import JobView, MachineView, Sentence, View

ENDED_SHOWN = 5
JOBS_ENDED_SHOWN = 10
MACHINES_SHOWN = 50
REASON_WIDTH = 32  # the narrowest column in which a sentence reads well
ANY_WIDTH = 9_999


class Plain(Table):
    """A table whose cells are shown as they are: a name in brackets is no markup."""

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        super().add_row(*(Text(one) if isinstance(one, str) else one for one in cells), **options)


def table(*columns: str) -> Table:
    """Return a table without lines; a column whose name ends in $ or # holds numbers."""
    made = Plain(box=None, pad_edge=False, collapse_padding=True, padding=(0, 1))
    for column in columns:
        number = column.endswith(("$", "#"))
        made.add_column(
            _name(column),
            justify="right" if number else "left",
            header_style="dim",
            overflow="fold",
        )
    return made


def _name(column: str) -> str:
    return column.rstrip("#$").strip() or column


def toned(word: str) -> Text:
    return Text(word, style=watch.TONES.get(word, "yellow"))


def _state(one: MachineView) -> Text:
    """Return a machine's state; while it boots, with the last phase that is over, and when."""
    said = toned(one.state)
    if one.boot and one.state in ("pending", "booting"):
        phase, took_s = max(one.boot.items(), key=lambda item: item[1])
        said.append(f", {phase} {duration(took_s)}", "default")
    return said


class Reasoned:
    """A table with a reason for every row: beside the row if there is room, else below it.

    The columns in `aside` move below together with the reason. If even the other columns are too
    wide, their cells are listed one after the other.
    """

    def __init__(self, *columns: str, aside: tuple[str, ...] = ()) -> None:
        self._columns, self._aside = columns, aside
        self._rows: list[tuple[tuple[str | Text, ...], str]] = []
        self.caption = ""

    def add(self, *cells: str | Text, why: str) -> None:
        self._rows.append((cells, why))

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        every, facts = range(len(self._columns)), self._facts()
        if _width(console, self._table(every)) + 1 + REASON_WIDTH <= options.max_width:
            yield self._table(every, reasons=True)
        elif _width(console, self._table(facts)) <= options.max_width:
            head, *rows = console.render_lines(self._table(facts), options, pad=False)
            yield Segments([*head, Segment.line()])
            for row, below in zip(rows, self._below(), strict=True):
                yield Segments([*row, Segment.line()])
                yield below
        else:
            for (cells, _), below in zip(self._rows, self._below(), strict=True):
                yield self._one_by_one(cells)
                yield below
        if self.caption:
            yield Text(self.caption, style="dim italic")

    def _facts(self) -> list[int]:
        return [n for n, name in enumerate(self._columns) if name not in self._aside]

    def _table(self, shown: Sequence[int], *, reasons: bool = False) -> Table:
        made = table(*(self._columns[n] for n in shown), *(("why",) if reasons else ()))
        for cells, why in self._rows:
            made.add_row(*(cells[n] for n in shown), *((why,) if reasons else ()))
        return made

    def _below(self) -> Iterator[Padding]:
        for cells, why in self._rows:
            aside = [str(cells[n]) for n, name in enumerate(self._columns) if name in self._aside]
            yield Padding(
                Text(": ".join(filter(None, (", ".join(aside), why))), style="dim"), (0, 0, 0, 2)
            )

    def _one_by_one(self, cells: Sequence[str | Text]) -> Text:
        """Return a row as a list of cells, the first two alone, the others with column names."""
        first, second, *others = self._facts()
        parts = [Text.assemble((str(cells[first]), "bold"), " ", cells[second])]
        parts += [Text(f"{_name(self._columns[n])} {cells[n]}") for n in others]
        return Text(" · ").join(parts)


def _width(console: Console, made: Table) -> int:
    return console.measure(made, options=console.options.update(width=ANY_WIDTH)).maximum


def jobs(found: Iterable[JobView]) -> Reasoned:
    """Return the table of the jobs that have not ended, and of the last few that have."""
    every = list(found)
    over = [one for one in every if one.ended_at_s is not None]
    made = Reasoned("job", "status", "step#", "loss#", "layout", "spent$", "time")
    for job in [one for one in every if one.ended_at_s is None] + over[:JOBS_ENDED_SHOWN]:
        steps = f"{job.step:,}/{job.steps_total:,}" if job.steps_total else f"{job.step:,}"
        made.add(
            job.id,
            toned(job.status),
            steps,
            loss(job.loss),
            job.layout or "-",
            usd(job.spent_usd),
            duration(job.took_s),
            why="; ".join(
                (job.because, job.bits) if job.unlike_step is not None else (job.because,)
            ),
        )
    if more := len(over[JOBS_ENDED_SHOWN:]):
        made.caption = f"and {more:,} more have ended: orchestrator status --json"
    return made


def machines(found: Iterable[MachineView], now_s: float, count: int = 0) -> Reasoned:
    """Return the table of the machines that are held, and of the last few that have ended.

    `count` is how many live ones there are, as a view lists only the first of them.
    """
    held = [one for one in found if one.ended_at_s is None]
    gone = sorted(
        (one for one in found if one.ended_at_s is not None), key=lambda one: one.ended_at_s or 0.0
    )
    made = Reasoned(
        "machine", "state", "pool", "market", "$/h#", "cost$", "time", aside=("pool", "market")
    )
    for one in held[:MACHINES_SHOWN] + gone[-ENDED_SHOWN:]:
        made.add(
            one.id,
            _state(one),
            one.pool,
            one.market.replace("_", " "),
            usd(one.price_usd_per_h),
            usd(one.cost_usd),
            duration((one.ended_at_s or now_s) - one.launched_at_s),
            why=(one.why_ended or one.why_bought).removeprefix(f"{one.id} "),
        )
    if more := max(count, len(held)) - len(held[:MACHINES_SHOWN]):
        made.caption = f"and {more:,} more: orchestrator status --json"
    return made


def live(view: View) -> int:
    """Return how many machines are live, also of those that the view does not list."""
    listed = sum(one.ended_at_s is None for one in view.machines)
    return listed + sum(one.count for one in view.unlisted)


def cost_line(view: View) -> Text:
    cost = view.cost
    budget = of_budget(cost.budget_usd, view.short_usd)
    saved = f"saved {usd(cost.saved_usd)}"
    if cost.on_demand_usd > 0:
        saved += f" ({percent(cost.saved_usd, cost.on_demand_usd)})"
    return Text(
        f"spent {usd(cost.spent_usd)}{budget} · reserved {usd(cost.reserved_usd)} · "
        f"{usd(cost.now_usd_per_h)}/h now for {plural(cost.machines, 'machine')} · "
        f"on demand {usd(cost.on_demand_usd)} · {saved}"
    )


def costs(view: View) -> Table:
    """Return the table of costs: one line per job and per machine, and the sum."""
    made = table("what", "where", "spent$")
    for job in view.jobs:
        made.add_row(f"job {job.id}", job.script, usd(job.spent_usd))
        if job.traffic_usd:
            made.add_row("  of that, traffic between zones", "", usd(job.traffic_usd), style="dim")
    for one in view.machines:
        made.add_row(f"machine {one.id}", f"{one.pool} ({one.market})", usd(one.cost_usd))
        for part, part_usd in (("disk", one.disk_usd), ("egress", one.egress_usd)):
            if part_usd:
                made.add_row(f"  of that, its {part}", "", usd(part_usd), style="dim")
    cost = view.cost
    if cost.manager_usd:
        made.add_row("the manager's machine", "", usd(cost.manager_usd))
    made.add_section()
    budget = f"of {usd(cost.budget_usd)}" if cost.budget_usd is not None else ""
    made.add_row("spent", budget, usd(cost.spent_usd), style="bold")
    made.add_row("the same on demand", "", usd(cost.on_demand_usd))
    made.add_row("saved", percent(cost.saved_usd, cost.on_demand_usd), usd(cost.saved_usd))
    return made


def sentence(said: Sentence) -> Text:
    return watch.sentence(said, time.time())
