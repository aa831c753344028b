"""Scripts that give their optimizer more parameters in mid-run, `optimizer.add_param_group(...)`."""

import pytest
from test_elastic import ends_alike

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from orchestrator import Session

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
for p in model[:5].parameters():
    p.requires_grad = False
optimizer = torch.optim.Adam(model[5].parameters(), lr=1e-2)
session = Session(model, optimizer, unfreezes=True)
data = session.data(TensorDataset(torch.randn(32, 4), torch.randn(32, 1)), batch_size=8, microbatches=2)

def unfreeze(module, lr):
    for p in module.parameters():
        p.requires_grad = True
    optimizer.add_param_group({"params": module.parameters(), "lr": lr})
    optimizer.param_groups[0]["lr"] *= 0.5

def train(microbatches):
    session.backward(lambda mb: (model(mb[0]) - mb[1]).square().mean(), microbatches)
    optimizer.step()
    optimizer.zero_grad()
"""
LATER = "[(3, 1e-3), (slice(0, 2), 1e-4)]"
AT_THE_START = f"""
for epoch in session.epochs(4):
    if 0 < epoch < 3:
        unfreeze(*[(model[at], lr) for at, lr in {LATER}][epoch - 1])
    for microbatches in data:
        train(microbatches)
"""
AT_THE_END = f"""
for epoch in session.epochs(4):
    for microbatches in data:
        train(microbatches)
    if epoch < 2:
        unfreeze(*[(model[at], lr) for at, lr in {LATER}][epoch])
        optimizer.param_groups[epoch + 1]["lr"] *= 2
"""
IN_A_STEP = f"""
for step in session.steps(16):
    train(data.at(step))
    if step in (3, 7):
        unfreeze(*[(model[at], lr) for at, lr in {LATER}][step // 4])
"""


@pytest.mark.processes
@pytest.mark.parametrize("begin", [5, 7])
@pytest.mark.parametrize("loop", [AT_THE_START, AT_THE_END, IN_A_STEP])
def test_added_parameters_come_to_whoever_joins(loop, begin, crew, player, tmp_path):
    """In the middle of an epoch whose start has added some, and where the next ones are added."""
    ends_alike(SCRIPT + loop, crew, player, tmp_path, begin=begin)


def test_parameters_without_room_are_told_how_to_get_it(player, tmp_path):
    script = SCRIPT.replace(", unfreezes=True", "") + IN_A_STEP
    with pytest.raises(AssertionError, match=r"'3.weight' was unfrozen.*unfreezes=True"):
        player.play(script, tmp_path / "alone")


def test_parameters_of_no_model_are_refused(player, tmp_path):
    script = SCRIPT + IN_A_STEP.replace("model[at], lr", "nn.Linear(1, 1), lr")
    with pytest.raises(AssertionError, match=r"step \d: .*shape \[1, 1\] was added to Adam"):
        player.play(script, tmp_path / "alone")
