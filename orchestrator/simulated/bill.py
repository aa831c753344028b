"""The bill of a simulated cloud under a billing rule, from the cloud's own books."""

from itertools import takewhile

from bidding.markets.billing import cost_usd, rule_of
from cloud.clock import HOUR_S
from cloud.model import DEPLOYMENT_TAG, Pool
from cloud.simulated import SimulatedCloud
from orchestrator.settings import Settings


def bill_usd(cloud: SimulatedCloud, settings: Settings, at_s: float) -> float:
    """Return the bill for every machine of the deployment, with the price of its disk."""
    total = 0.0
    on_demand = {kind.name: kind.on_demand_usd_per_h for kind in cloud.market.catalogue.types}
    spot: dict[Pool, list[tuple[float, float]]] = {}
    for entry in cloud.books(at_s).entries:
        machine = entry.machine
        if machine.tags.get(DEPLOYMENT_TAG) != settings.deployment:
            continue
        if machine.pool not in spot:
            steps = takewhile(lambda step: step.at_s <= at_s, cloud.market.prices(machine.pool))
            spot[machine.pool] = [(step.at_s, step.value) for step in steps]
        start_s = machine.launched_at_s
        end_s = at_s if machine.ended_at_s is None else machine.ended_at_s
        prices = spot[machine.pool]
        if machine.market == "on_demand":
            prices = [(start_s, on_demand[machine.pool.type])]
        rule = rule_of(settings.billing, machine.pool.cloud, machine.market)
        total += cost_usd(rule, start_s, end_s, prices, machine.ended_by)
        total += settings.disk_usd_per_h * (end_s - start_s) / HOUR_S
    return total
