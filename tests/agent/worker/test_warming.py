"""A newcomer has the memory of its first step before it says that it is ready."""

from pathlib import Path

import numpy as np
import pytest
from crews import Nursery

from agent.net.mesh import STATE
from agent.protocol import Part
from agent.worker.state.prefault import SHARES_MAX, Landing

COMING = """
import resource, sys, torch
from agent.replica import Replica
from agent.checks.registry import registered
from agent.tensors.metrics import Numbers
from agent.tensors.partial_sum import partial_of
from agent.store.layers import collect, share_of
from agent.store.shares import Gathered
from agent.worker.state.prefault import Landing, warm
from agent.net.mesh import STATE
from agent.protocol import Part
from agent.store.memory import keep_memory
keep_memory()

def made():
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8)))
    return model, torch.optim.AdamW(model.parameters(), foreach=True)

other, updated = made()
other(torch.ones(2, 1024)).sum().backward()
updated.step()
share, pieces = share_of(collect(Replica(registered([other, updated])).objects).finish(), 1, 0)
sent = b"".join(pieces)

model, optimizer = made()
replica, landing = Replica(registered([model, optimizer])), Landing()
partial = partial_of(replica.space, 2, deterministic=True)
replica.reserve = partial.reserve
warm(replica, landing, len(sent) if sys.argv[1] == "warm" else 0)

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

before = faults()
place = landing.place(Part(generation=1, step=1, tag=STATE), len(sent))
payload = memoryview(bytearray(len(sent))) if place is None else place
payload[:] = sent
gathered = Gathered()
gathered.add(share, payload)
replica.load(gathered, 1)
replica.space.begin()
for microbatch in range(2):
    model(torch.ones(2, 1024)).sum().backward()
    partial.add(microbatch, Numbers(), 0, 2)
replica.total().flat.copy_(partial.nodes(0, 2)[0].flat)
print(faults() - before)
assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))
for mine, theirs in zip(model.parameters(), other.parameters()):
    assert torch.equal(optimizer.state[mine]["exp_avg"], updated.state[theirs]["exp_avg"])
"""


def test_the_state_and_the_first_step_of_a_newcomer_find_their_memory(
    nursery: Nursery, tmp_path: Path
) -> None:
    """Of what one that is not ready for it has to map (some 250 MB) next to nothing is left."""
    script = tmp_path / "coming.py"
    script.write_text(COMING)
    warm, cold = (int(nursery.play([str(script), how], tmp_path)) for how in ("warm", "cold"))
    assert warm < cold / 5


def test_no_byte_of_a_landing_is_used_twice_and_nothing_else_lands_there() -> None:
    """What comes late of an older layout cannot write into what has come of a newer one."""
    landing, share = Landing(), Part(generation=1, step=3, tag=STATE)
    assert landing.place(share, 10) is None
    landing.make(1000)
    first, second = landing.place(share, 300), landing.place(share, 700)
    assert first is not None
    assert second is not None
    starts = [np.frombuffer(view, dtype=np.uint8).ctypes.data for view in (first, second)]
    assert [view.nbytes for view in (first, second)] == [300, 700]
    assert starts[1] >= starts[0] + 300
    assert [start % 64 for start in starts] == [0, 0]
    assert landing.place(Part(generation=1, step=3, tag="sum"), 10) is None
    assert landing.place(share, 64 * SHARES_MAX) is None


@pytest.mark.parametrize("count", [0, 10])
def test_a_landing_that_is_cleared_takes_nothing(count: int) -> None:
    """Whoever has its state needs no room for it."""
    landing = Landing()
    landing.make(100)
    landing.clear()
    assert not landing.place(Part(generation=1, step=1, tag=STATE), count)
