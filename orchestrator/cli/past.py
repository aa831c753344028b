"""Looking back: would we have bought well, and would we decide the same again."""

import asyncio
import io
from contextlib import redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import redis.asyncio
import typer
from rich.text import Text

from orchestrator.cli.desk import USAGE, CommandError, Desk, command
from orchestrator.redis_client import retry_policy
from orchestrator.wording import plural

if TYPE_CHECKING:
    from orchestrator.state import State
    from orchestrator.world import Entry

RUNNING = "the running manager"


def add(app: typer.Typer) -> None:
    for function in (backtest, replay):
        command(app)(function)


def backtest(  # noqa: PLR0913 - a parameter per option
    desk: Desk,
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
    """The manager's own decision over recorded markets, beside other strategies and the bound."""
    from bidding.errors import BiddingError, ConstraintError
    from orchestrator.backtest.command import Choices, figures, measure
    from orchestrator.backtest.command import backtest as run

    try:
        choices = Choices(hours=hours, slots=slots, billing=billing, seed=seed, market=market)
    except ConstraintError as error:
        raise CommandError(str(error), USAGE) from None
    if desk.json:
        try:
            sections, summary = measure(data, strategy, starts, report, choices)
        except (BiddingError, OSError, ValueError) as error:
            raise CommandError(str(error), USAGE) from None
        markets = [figures(section) for section in sections]
        told = {"report": str(report.absolute()), "data": data, "starts": starts, "seed": seed}
        desk.answer({**told, "summary": summary, "markets": markets})
        return
    complaint = io.StringIO()
    with redirect_stderr(complaint), desk.busy("running"):
        code = run(data, strategy, starts, report, choices)
    if code != 0:
        raise CommandError(
            complaint.getvalue().strip().removeprefix("orchestrator backtest: "), code
        )


def replay(
    desk: Desk,
    file: Annotated[
        Path | None, typer.Argument(help="A journal. Default: that of the running manager.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the journal there too.")
    ] = None,
) -> None:
    """Decide again what a journal says was decided; the first difference is shown."""
    from orchestrator.replay import read_incident
    from orchestrator.replay import replay as run
    from orchestrator.world import Diverged

    if file is not None and not file.exists():
        raise CommandError(f"{file}: no such file", USAGE)
    try:
        if file is not None:
            state, entries = read_incident(file)
        else:
            state, entries = asyncio.run(_from_redis(desk.client().house().redis_url, save))
    except ValueError as error:
        raise CommandError(str(error), USAGE) from None
    try:
        run(entries, state)
    except Diverged as error:
        raise CommandError(f"decided otherwise now: {error}") from None
    source = str(file) if file is not None else RUNNING
    saved = None if save is None or file is not None else str(save.absolute())
    line = f"{plural(len(entries), 'event')} of {source}: every decision is the same"
    desk.answer(
        {"source": source, "events": len(entries), "saved": saved},
        Text(line),
        *((Text(f"saved in {saved}"),) if saved else ()),
    )


async def _from_redis(redis_url: str, save: Path | None) -> "tuple[State | None, list[Entry]]":
    """What the journal holds from its last snapshot on; reading it changes nothing."""
    from orchestrator.journal import RedisJournal
    from orchestrator.replay import export

    store = redis.asyncio.Redis.from_url(redis_url, **retry_policy(asynchronous=True))
    try:
        journal = RedisJournal(store)
        if save is not None:
            await export(journal, save)
        state, entries = await journal.load()
        return state, list(entries)
    finally:
        await store.aclose()
