"""Jobs side by side: what each cost and brought, and its loss by step, also of such as ended long ago."""

import msgspec

from orchestrator.dashboard.past import Past, loss_curve
from orchestrator.history.records import Cause, Remembered
from orchestrator.view import JobView


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """One job with what it cost, as far as the history knows."""

    id: str
    job: JobView
    causes: dict[Cause, float]
    machine_hours: float
    usd_per_1000_steps: float | None
    losses: list[tuple[float, float]]  # step and loss


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    jobs: tuple[Compared, ...]


def compared(past: Past, one: Remembered) -> Compared:
    job = msgspec.json.decode(one.view, type=JobView)
    lines = past.money(one.id)
    first_s, last_s = past.span() or (0.0, 0.0)
    return Compared(
        id=one.id,
        job=job,
        causes={cause: usd for line in lines for cause, usd in line.causes.items()},
        machine_hours=sum(line.hours for line in lines),
        usd_per_1000_steps=1000 * job.spent_usd / job.steps_done if job.steps_done else None,
        losses=loss_curve(past, one.id, first_s, last_s),
    )
