"""What the workers of one machine send over its link together, counted worker by worker."""

import numpy as np
import pytest
from blocks import make_profile

from orchestrator.planner import cost_model
from orchestrator.planner.search import Way

SLOTS = 8


def seats(way: Way, width: int) -> dict[tuple[int, int], int]:
    """The machine of each stage of each replica, laid end to end."""
    chain = way.placement == "chain"
    return {
        (stage, replica): (replica * way.depth + stage if chain else stage * width + replica)
        // SLOTS
        for stage in range(way.depth)
        for replica in range(width)
    }


def exchanged_bytes(way: Way, width: int, stage_bytes: float) -> float:
    """The most that a machine sends: each worker sends a slice to every other replica, twice."""
    machines = seats(way, width)
    sent = np.zeros(max(machines.values()) + 1)
    for (stage, replica), machine in machines.items():
        others = [machines[stage, other] for other in range(width) if other != replica]
        sent[machine] += 2 * stage_bytes / width * sum(other != machine for other in others)
    return float(sent.max())


def priced_bytes(way: Way, width: int, stage_bytes: float) -> float:
    profile = make_profile(way.depth, apply_s_per_byte=0.0)
    links = [cost_model.reduce_link(cost_model.tables(profile), way, width, SLOTS)]
    assert links[0][0] is profile.network.reduce_inter
    found = cost_model.reduce_s(np.array([stage_bytes]), np.array([float(width)]), links)[0, 0]
    seconds = found - 2 * (width - 1) * links[0][0].latency_s
    return float(seconds * links[0][0].bandwidth_bytes_per_s)


@pytest.mark.parametrize("placement", ["chain", "ring"])
@pytest.mark.parametrize(
    ("depth", "width"), [(1, 16), (1, 256), (2, 128), (4, 64), (8, 32), (16, 16)]
)
def test_an_exchange_takes_what_all_workers_of_a_machine_send(placement, depth, width):
    """Every worker of a machine sends to the replicas on other machines at once, over one link."""
    way = Way(schedule="1f1b", depth=depth, microbatch_size=1, placement=placement)
    counted = exchanged_bytes(way, width, 1e9)
    assert priced_bytes(way, width, 1e9) == pytest.approx(counted)


@pytest.mark.parametrize("placement", ["chain", "ring"])
@pytest.mark.parametrize(
    ("depth", "width"), [(2, 5), (2, 11), (3, 6), (3, 40), (5, 20), (6, 21), (12, 20)]
)
def test_an_exchange_of_an_uneven_layout_is_never_priced_too_short(placement, depth, width):
    """Where machines differ the fullest counts; a price is at most twice what it sends."""
    way = Way(schedule="1f1b", depth=depth, microbatch_size=1, placement=placement)
    counted = exchanged_bytes(way, width, 1e9)
    assert counted * (1 - 1e-9) <= priced_bytes(way, width, 1e9) <= 2 * counted


@pytest.mark.parametrize(("depth", "width"), [(2, 128), (4, 64), (8, 32), (4, 4)])
def test_replicas_of_a_stage_on_one_machine_share_its_link_for_their_messages(depth, width):
    """Placed in rings, a machine's workers of one stage send to the next machine at the same time."""
    way = Way(schedule="1f1b", depth=depth, microbatch_size=1, placement="ring")
    machines = seats(way, width)
    most = max(
        sum(
            machines[stage, replica] == machine != machines[stage + 1, replica]
            for replica in range(width)
        )
        for stage in range(depth - 1)
        for machine in set(machines.values())
    )
    profile = make_profile(depth)
    tables, firsts = cost_model.tables(profile), tuple(range(depth))
    wide = cost_model.variant(way, SLOTS, width)
    wire = cost_model.wires(tables, firsts, way, SLOTS, wide)
    sent = profile.sections[0].activation_bytes * most
    priced = wire[0, : depth - 1, 0] * profile.network.inter.bandwidth_bytes_per_s
    assert priced.max() == pytest.approx(sent)
