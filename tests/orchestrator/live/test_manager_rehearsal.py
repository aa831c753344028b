"""The manager has compiled what it computes with before anybody waits for it."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

FRESH = """
import gc

import numpy as np
from numba.core.registry import CPUDispatcher

from bidding.markets.history import Series
from orchestrator.live.manager import rehearse
from orchestrator.live.price_files import odds_of
from orchestrator.simulated.restarts import live
from orchestrator.simulated.scenario import wild

def versions():
    ours = [f for f in gc.get_objects() if isinstance(f, CPUDispatcher)]
    ours = [f for f in ours if f.__module__.startswith(("bidding.", "orchestrator."))]
    return {f"{f.__module__}.{f.__name__}{each}" for f in ours for each in f.signatures}

rehearse()
before = versions()
for seed in range(12):
    live(wild(seed))
at_s = np.arange(100) * 600.0
odds_of(Series(at_s=at_s, value=0.1 + np.sin(at_s)), at_s=60_000.0)
print("\\n".join(sorted(versions() - before)))
"""


def test_no_decision_is_the_first_to_need_a_function():
    """On a machine that has never run it, compiling takes seconds in which the loop would say nothing."""
    done = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [""]
