"""The memory of one step serves the next."""

import subprocess
import sys

STEPS = """
import resource, torch
from agent.store.memory import keep_memory
keep_memory()
torch.set_num_threads(1)

def step():
    held = [torch.ones(1 << 20) for _ in range(40)]  # 160 MB, 4 MB a piece
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    return before

step()
first = step()
print(step() - first)
"""


def test_a_step_finds_the_memory_of_the_one_before() -> None:
    """Of forty thousand pages that a step touches almost none has to be mapped again."""
    done = subprocess.run(
        [sys.executable, "-c", STEPS], capture_output=True, text=True, check=True, timeout=60
    )
    assert int(done.stdout) < 4_000
