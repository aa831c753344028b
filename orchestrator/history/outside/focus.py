"""The money as a table with the columns of FOCUS 1.0, which cost tools read. Pure.

A row is a day of one job in one pool for one cause. What FOCUS has no column for, the job and the
cause, is in `Tags` and in columns that begin with `x_`. `BilledCost` adds up to the ledger, `ListCost` to
the same machine time on demand and to what has one price only: what is refunded was used all the same.
"""

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime

import msgspec

from cloud.clock import DAY_S
from orchestrator.history.records import MEANING, Daily

COLUMNS = (
    "BillingAccountId",
    "BillingCurrency",
    "BillingPeriodStart",
    "BillingPeriodEnd",
    "ChargePeriodStart",
    "ChargePeriodEnd",
    "ChargeCategory",
    "ChargeClass",
    "ChargeFrequency",
    "ChargeDescription",
    "BilledCost",
    "EffectiveCost",
    "ContractedCost",
    "ListCost",
    "ConsumedQuantity",
    "ConsumedUnit",
    "PricingQuantity",
    "PricingUnit",
    "PricingCategory",
    "ProviderName",
    "PublisherName",
    "InvoiceIssuerName",
    "AvailabilityZone",
    "ResourceId",
    "ResourceType",
    "ServiceCategory",
    "ServiceName",
    "SkuId",
    "Tags",
    "x_Job",
    "x_Cause",
)
CATEGORIES = {"traffic": "Networking", "disk": "Storage"}
UNDISCOUNTED = ("manager", "traffic", "disk", "other")  # what is the same on spot and on demand


def rows(found: Iterable[Daily], deployment: str) -> Iterator[dict[str, object]]:
    """Yield a row for each line, with a value for each of `COLUMNS`; None for what is not known."""
    for one in found:
        cloud, zone, kind = _parts(one.pool)
        day = datetime.fromtimestamp(one.day * DAY_S, UTC)
        after = datetime.fromtimestamp((one.day + 1) * DAY_S, UTC)
        month = day.replace(day=1)
        next_month = month.replace(year=month.year + month.month // 12, month=month.month % 12 + 1)
        hours = one.hours or None
        values = (
            deployment,
            "USD",
            _said(month),
            _said(next_month),
            _said(day),
            _said(after),
            "Adjustment" if one.cause == "billing" else "Usage",
            None,
            "Usage-Based",
            f"{one.cause}: {MEANING[one.cause]}",
            one.usd,
            one.usd,
            one.usd,
            one.usd if one.cause in UNDISCOUNTED else one.on_demand_usd,
            hours,
            "Hours" if hours else None,
            hours,
            "Hours" if hours else None,
            None if not one.market else "Dynamic" if one.market == "spot" else "Standard",
            cloud or "spot-orchestrator",
            cloud or "spot-orchestrator",
            cloud or "spot-orchestrator",
            zone or None,
            one.pool or None,
            "Machine" if one.pool else None,
            CATEGORIES.get(one.cause, "Compute"),
            kind or one.cause,
            kind or None,
            msgspec.json.encode({"job": one.job, "cause": one.cause}).decode(),
            one.job,
            one.cause,
        )
        yield dict(zip(COLUMNS, values, strict=True))


def _parts(pool: str) -> tuple[str, str, str]:
    """Return cloud, zone and type of a pool's key."""
    cloud, _, rest = pool.partition("/")
    zone, _, kind = rest.rpartition("/")
    return cloud, zone, kind


def _said(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
