"""The plan of a job under the manager, as its workers and the keeper make it from one value."""

from agent.paramserver.api import Stop, even
from agent.paramserver.controller import Plan
from agent.paramserver.tables import Table
from agent.protocol import Serving

KEPT = "keeper"  # the node that has the copies
PATIENT_S = 1e9  # who is alive is the keeper's to say


def plan_of(serving: Serving, workers: int = 1) -> Plan:
    """Return the plan of a job that begins with so many workers."""
    one = serving
    return Plan(
        work=even(one.items, one.blocks, one.grains, one.batches),
        stop=Stop(one.clocks, one.seconds, one.change, one.over),
        partitions=one.partitions,
        expected=workers + 1,
        help_size=one.help_size,
        save_every=1,
        dead_s=PATIENT_S,
        apart=True,
    )


def copies_of(serving: Serving) -> dict[str, Table]:
    """Return the tables as their copies are kept: numbers, without what the script says of them."""
    return {one.name: Table(one.name, one.keys, one.columns, one.dtype) for one in serving.tables}
