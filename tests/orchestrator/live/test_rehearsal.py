"""The manager has compiled what it computes with before anybody waits for it."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

FRESH = """
import gc

import msgspec
import numpy as np
from numba.core.registry import CPUDispatcher

from agent.profile import Link, Network, Profile, Section
from bidding.history import Series
from orchestrator.brain.layouts import Question, Seat, choose
from orchestrator.live.manager import rehearse
from orchestrator.live.quotes import odds_of

def versions():
    ours = [f for f in gc.get_objects() if isinstance(f, CPUDispatcher)]
    ours = [f for f in ours if f.__module__.startswith(("bidding.", "orchestrator."))]
    return {f"{f.__module__}.{f.__name__}{each}" for f in ours for each in f.signatures}

rehearse()
before = versions()
link = Link(bandwidth_bytes_per_s=1e8, latency_s=1e-3)
sections = tuple(
    Section(
        name=str(n),
        forward_s=(1e-3 * (1 + n % 3), 3e-3),
        backward_s=(2e-3, 5e-3),
        activation_bytes=1e4,
        parameter_bytes=4e6,
    )
    for n in range(12)
)
for memory in (1e9, 1e8):
    profile = Profile(
        model="m",
        microbatch_sizes=(1, 2),
        network=Network(intra=link, inter=link, reduce_intra=link, reduce_inter=link),
        memory_bytes=memory,
        sections=sections,
    )
    for paces in ((1.0,) * 2, (1.0,) * 8, (1.0,) * 6 + (2.0,) * 2):
        seats = tuple(
            Seat(worker=str(n), machine=str(n // 2), zone="", pace=pace)
            for n, pace in enumerate(paces)
        )
        choose(Question(microbatches=8, seats=seats, workers_max=8, profile=profile))
at_s = np.arange(100) * 600.0
odds_of(Series(at_s=at_s, value=0.1 + np.sin(at_s)), at_s=60_000.0)
print(*sorted(versions() - before), sep="\\n")
"""


def test_no_decision_is_the_first_to_need_a_function() -> None:
    """On a machine that has never run it, compiling takes seconds in which the loop would say nothing."""
    done = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
