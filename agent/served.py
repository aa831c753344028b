"""A job whose workers are nodes of a parameter server: the one line that its script needs.

    ParamServerJob(Mine(), blocks=24, slack=1).run()

Alone, with no manager anywhere, the application runs in this process. In a job each worker is a
node, which computes its blocks and serves its partitions; the keeper has the controller and a copy
of every table. `docs/parameter-servers.md` says what an application is.
"""

from numbers import Integral
from typing import Protocol, runtime_checkable

import msgspec
import numpy as np

from agent import session
from agent.errors import Misuse
from agent.paramserver.api import Alone, Application, Work, checked, even, run_alone
from agent.paramserver.tables import Table
from agent.protocol import Serving, Shape


@runtime_checkable
class Serves(Protocol):
    def serve(self, application: Application, serving: Serving) -> str:
        """Be a node of this job until it ends, and return why it has ended."""


class ParamServerJob:
    """One per script, in place of a session. A clock is one batch of every block of the items."""

    def __init__(  # noqa: PLR0913 - what a person may say of a job
        self,
        application: Application,
        *,
        blocks: int = 24,
        grains: int = 20,
        batches: int = 1,
        partitions: int = 4,
        slack: int | None = 0,
        help_size: int = 0,
    ) -> None:
        """Share the items out in `blocks`, so that more workers than that have nothing to do.

        `slack` is how many clocks a worker may be ahead (0 is BSP, none is ASP), and `help_size`
        how many others may do a late worker's work (0 is nobody).
        """
        _check_counts(1, blocks=blocks, grains=grains, batches=batches, partitions=partitions)
        _check_counts(0, slack=0 if slack is None else slack, help_size=help_size)
        stop, tables = application.stop, checked(application).values()
        if not (stop.clocks or stop.seconds or stop.change):
            raise Misuse("the application's stop says nothing, so the job would have no end")
        self.application = application
        self.serving = _plain(
            Serving(
                items=application.items,
                blocks=blocks,
                grains=grains,
                batches=batches,
                partitions=partitions,
                tables=tuple(_shape(table) for table in tables),
                slack=slack,
                help_size=help_size,
                clocks=stop.clocks,
                seconds=stop.seconds,
                change=stop.change,
                over=stop.over,
            )
        )

    def run(self) -> Alone | None:
        """Run to the end. Alone, return the tables; in a job they lie in its storage."""
        world: object = session.world()
        if not isinstance(world, Serves):
            return run_alone(self.application, self._work())
        world.serve(self.application, self.serving)
        return None

    def _work(self) -> Work:
        one = self.serving
        return even(one.items, one.blocks, one.grains, one.batches)


def _check_counts(least: int, **counts: object) -> None:
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, Integral) or int(count) < least:
            raise Misuse(f"ParamServerJob: {name}={count!r}: a whole number, {least} or more")


def _shape(table: Table) -> Shape:
    rule = table.rule.name if table.rule else ""
    kind = np.dtype(table.dtype).name
    return Shape(table.name, table.keys, table.width, table.columns, kind, rule)


def _plain(serving: Serving) -> Serving:
    """Return this with NumPy's numbers as plain ones, or name what the keeper could not read."""
    try:
        plain = msgspec.to_builtins(serving, enc_hook=lambda number: number.item())
        return msgspec.convert(plain, Serving)
    except (msgspec.ValidationError, AttributeError) as error:
        raise Misuse(f"the job cannot be described to its keeper: {error}") from error
