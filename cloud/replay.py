"""Reading recorded prices: the JSON that `aws ec2 describe-spot-price-history` prints.

Real dumps overlap, are sorted newest first, and sometimes hold a row that cannot be true. Rows are
de-duplicated and sorted here. Left out are rows without a valid price or time, with a price that
cannot be meant (zero, negative, more than a hundred times on demand), and of systems other than
Linux, which have rows at the same moments. A time without a zone is UTC.
"""

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

import msgspec

from cloud import plain_file
from cloud.clock import utc_s
from cloud.market import Catalogue, PriceStep
from cloud.model import LINUX, Pool

ABSURD_RATIO = 100.0


class _Row(msgspec.Struct, frozen=True, rename="pascal"):
    availability_zone: str = ""
    instance_type: str = ""
    spot_price: str | float = ""
    timestamp: str = ""
    product_description: str = LINUX


class _History(msgspec.Struct, frozen=True, rename="pascal"):
    spot_price_history: tuple[_Row, ...]


def read_prices(path: Path, catalogue: Catalogue) -> Mapping[Pool, Sequence[PriceStep]]:
    """Return price steps of the pools sold here, in seconds since the first row of all."""
    try:
        history = msgspec.json.decode(plain_file.read(path), type=_History)
    except ValueError as error:
        raise ValueError(
            f"{path}: not the JSON of `aws ec2 describe-spot-price-history`: {error}"
        ) from error
    return prices(history.spot_price_history, catalogue, str(path))


def prices(
    rows: Sequence[_Row], catalogue: Catalogue, source: str
) -> Mapping[Pool, Sequence[PriceStep]]:
    on_demand = {kind.name: kind.on_demand_usd_per_h for kind in catalogue.types}
    pools = {(pool.zone, pool.type): pool for pool in catalogue.pools}
    seen: dict[Pool, dict[float, float]] = {}
    for row in rows:
        pool = pools.get((row.availability_zone, row.instance_type))
        if pool is None or (step := _step(row, on_demand[pool.type])) is None:
            continue
        seen.setdefault(pool, {})[step.at_s] = step.value
    if not seen:
        offered = ", ".join(f"{zone}/{kind}" for zone, kind in sorted(pools))
        raise ValueError(f"{source}: no usable row for any pool that is sold here ({offered})")
    first_s = min(at_s for steps in seen.values() for at_s in steps)
    return {
        pool: _changes([PriceStep(at_s - first_s, steps[at_s]) for at_s in sorted(steps)])
        for pool, steps in seen.items()
    }


def _step(row: _Row, on_demand_usd_per_h: float) -> PriceStep | None:
    try:
        price = float(row.spot_price)
        at_s = utc_s(datetime.fromisoformat(row.timestamp))
    except ValueError:
        return None
    credible = math.isfinite(price) and 0 < price <= ABSURD_RATIO * on_demand_usd_per_h
    return (
        PriceStep(at_s, price) if credible and row.product_description.startswith(LINUX) else None
    )


def _changes(steps: Sequence[PriceStep]) -> Sequence[PriceStep]:
    """Keep only the steps that change the value, since AWS repeats a price every day."""
    return [
        step for nth, step in enumerate(steps) if nth == 0 or step.value != steps[nth - 1].value
    ]
