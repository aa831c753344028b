"""The tool `backtest`: runs the manager's decision and others over recorded markets."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from orchestrator.backtest.measure import Choices, figures, measure
from orchestrator.cli import tables
from orchestrator.cli.command import USAGE, Command, CommandError


def backtest(  # noqa: PLR0913 - a parameter per option
    command: Command,
    *,
    data: Annotated[
        str, typer.Option(metavar="DIR", help="Folder of price files, or synthetic.")
    ] = "synthetic",
    strategy: Annotated[str, typer.Option(help="One of them, or all.")] = "all",
    starts: Annotated[int, typer.Option(help="How many random moments to start at.")] = 1000,
    report: Annotated[Path, typer.Option(metavar="FILE", help="Where to write the page.")] = Path(
        "backtest.html"
    ),
    hours: Annotated[float, typer.Option(help="Work of the job, in hours.")] = 20.0,
    slots: Annotated[int, typer.Option(help="How many slots it trains on.")] = 1,
    billing: Annotated[str, typer.Option(help="Name of the billing rule.")] = "aws_today",
    seed: Annotated[int, typer.Option(min=0, help="Which random moments.")] = 0,
    market: Annotated[str, typer.Option(help="Only markets whose name holds this.")] = "",
) -> None:
    """Run the manager's decision over recorded markets, beside other strategies and the bound."""
    choices = Choices(hours=hours, slots=slots, billing=billing, seed=seed, market=market)
    try:
        with command.busy("running"):
            sections, summary = measure(data, strategy, starts, report, choices)
    except (OSError, ValueError) as error:
        raise CommandError(str(error), USAGE) from None
    value = {"report": str(report.absolute()), "data": data, "starts": starts, "seed": seed}
    markets = [figures(section) for section in sections]
    value = {"report": str(report.absolute()), "data": data, "starts": starts, "seed": seed}
    command.answer(
        {**value, "summary": summary, "markets": markets},
        *(_table(market) for market in markets),
        f"{summary}\nreport: {report}",
    )


def _table(market: dict[str, Any]) -> Table:
    made = tables.table(
        "strategy",
        "cost$",
        "95 %#",
        "hours#",
        "lost#",
        "evict#",
        "free#",
        "bound#",
        "95th#",
        "plain#",
    )
    made.title, made.title_justify = market["market"], "left"
    for one in market["strategies"]:
        made.add_row(
            one["strategy"],
            f"{one['cost_usd']:.4g}",
            f"±{(one['cost_usd_high'] - one['cost_usd_low']) / 2:.2g}",
            f"{one['hours']:.1f}",
            f"{100 * one['lost_slot_h'] / one['held_slot_h']:.1f}%",
            f"{one['evictions']:.1f}",
            f"{100 * one['free_share']:.0f}%",
            *(
                f"{one[name]:.2f}"
                for name in ("to_bound_median", "to_bound_p95", "to_plain_median")
            ),
            style="bold" if one["strategy"] == "ours" else "",
        )
    return made
