"""A state that is put aside, while the script ends an epoch in vain, comes back whole."""

from collections.abc import Callable

import pytest

SCRIPT = """
import torch
from agent.store.layers import REST
from orchestrator import Session

model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
groups = [{"params": layer.parameters()} for layer in model]
optimizer = torch.optim.Adam(groups, lr=torch.tensor(0.5), foreach=False)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
replica = Session(model, optimizer, scheduler).replica
replica._keep(frozenset({HERE}))
replica.begin_boundary()
replica.set_aside(comes_in=False)
optimizer.step()
scheduler.step()
for group in optimizer.param_groups:
    group["calls"] = 1
replica.take_up()
assert [float(group["lr"]) for group in optimizer.param_groups] == [0.5, 0.5]
assert not any("calls" in group for group in optimizer.param_groups)
assert scheduler.last_epoch == 0
"""


@pytest.mark.parametrize("here", ['"0", "1", REST', '"1", REST', "REST"])
def test_the_settings_of_groups_whose_layers_are_elsewhere_come_back(
    here: str, by_hand: Callable[[str], None]
) -> None:
    """A worker that waits for its place in a chain may have none of the layers yet."""
    by_hand(SCRIPT.replace("HERE", here))


def test_a_state_that_comes_again_takes_nothing_from_an_epoch_s_end(
    by_hand: Callable[[str], None],
) -> None:
    """The layout may change before this worker has said that it has the state, so it gets it once more."""
    by_hand(
        """
import torch
from orchestrator import Session

model = torch.nn.Linear(2, 1)
session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1))
replica = session.replica
replica.begin_boundary()
before = replica._copied()
session.state["made"] = True
replica.version = 1
replica.begin_boundary()
replica.keeps_own = True
replica.load(before, 0)
replica.load(before, 0)
replica.set_aside(comes_in=False)
assert session.state["made"]
replica.take_up()
assert not session.state
"""
    )
