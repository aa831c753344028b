"""Tables of what there is, for a person."""

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from orchestrator.cli.live_table import TONES
from orchestrator.view import CostView, JobView, MachineView, Sentence, View
from orchestrator.wording import clock, duration, loss, percent, plural, told, usd

ENDED_SHOWN = 5
MACHINES_SHOWN = 50


def table(*columns: str) -> Table:
    """A quiet table; a column that ends in $ or # holds numbers."""
    made = Table(box=None, pad_edge=False, collapse_padding=True, padding=(0, 1))
    for column in columns:
        number = column.endswith(("$", "#"))
        made.add_column(
            column.rstrip("#$").strip() or column, justify="right" if number else "left",
            header_style="dim", overflow="fold",
        )  # fmt: skip
    return made


def toned(word: str) -> Text:
    return Text(word, style=TONES.get(word, "yellow"))


def jobs(found: Iterable[JobView], now_s: float) -> Table:
    made = table("job", "status", "step#", "loss#", "layout", "spent$", "time", "why")
    for job in found:
        steps = f"{job.step:,}/{job.steps_total:,}" if job.steps_total else f"{job.step:,}"
        made.add_row(
            job.id, toned(job.status), steps, loss(job.loss),
            job.layout or "-", usd(job.spent_usd),
            duration((job.ended_at_s or now_s) - job.submitted_at_s), escape(job.because),
        )  # fmt: skip
    return made


def machines(found: Iterable[MachineView], now_s: float) -> Table:
    """All that are held, and the last few that are not."""
    held = [one for one in found if one.ended_at_s is None]
    gone = sorted(
        (one for one in found if one.ended_at_s is not None), key=lambda one: one.ended_at_s or 0.0
    )
    made = table("machine", "pool", "market", "state", "$/h#", "cost$", "time", "why")
    for one in held[:MACHINES_SHOWN] + gone[-ENDED_SHOWN:]:
        made.add_row(
            one.id, one.pool, one.market, toned(one.state), usd(one.price_usd_per_h),
            usd(one.cost_usd), duration((one.ended_at_s or now_s) - one.launched_at_s),
            escape((one.why_ended or one.why_bought).removeprefix(f"{one.id} ")),
        )  # fmt: skip
    if len(held) > MACHINES_SHOWN:
        made.caption = f"and {len(held) - MACHINES_SHOWN:,} more: orchestrator status --json"
    return made


def cost_line(cost: CostView, held: int) -> Text:
    budget = f" of {usd(cost.budget_usd)}" if cost.budget_usd is not None else ""
    saved = f"saved {usd(cost.saved_usd)}"
    if cost.on_demand_usd > 0:
        saved += f" ({percent(cost.saved_usd, cost.on_demand_usd)})"
    return Text(
        f"spent {usd(cost.spent_usd)}{budget} · committed {usd(cost.committed_usd)} · "
        f"{usd(cost.now_usd_per_h)}/h now for {plural(held, 'machine')} · "
        f"on demand {usd(cost.on_demand_usd)} · {saved}"
    )


def costs(view: View) -> Table:
    """One line per job and per machine that cost something, and the sum."""
    made = table("what", "where", "spent$")
    for job in view.jobs:
        made.add_row(f"job {job.id}", escape(job.script), usd(job.spent_usd))
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
    return Text.assemble(
        (clock(said.at_s), "dim"),
        " ",
        (said.who, "bold"),
        " ",
        told(said.who, said.what, said.because),
    )


def held(view: View) -> int:
    """Those that cost something: a launch that has no machine yet costs nothing."""
    return sum(one.ended_at_s is None and one.state != "intended" for one in view.machines)


def stacked(*parts: RenderableType) -> Group:
    return Group(*parts)
