"""Turns of a script's loop that train nothing: they belong to the step after them."""

from typing import Any

import msgspec
import pytest
import torch
from test_elastic import Held, ends_alike

# Turns train nothing at an epoch's start, within it, and at its end, where all else is drawn as well.
EPOCHS = """
import torch
from torch.utils.data import TensorDataset
from orchestrator import Session

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
session = Session(model, optimizer)
session.state.update(turns=[], drawn=0.0)
data = session.data(TensorDataset(torch.randn(56, 4), torch.randn(56, 1)), batch_size=8, microbatches=2)
scale = 1.0
for epoch in session.epochs(4):
    scale = float(torch.rand(())) + 0.5
    for microbatches in data:
        turn = session.step
        session.state["turns"] += [turn]
        session.state["drawn"] += float(torch.rand(()))
        if turn % 7 in (0, 3, 6):
            continue
        optimizer.zero_grad()
        session.backward(lambda mb: scale * (model(mb[0]) - mb[1]).square().mean(), microbatches)
        optimizer.step()
    session.state["drawn"] += float(torch.rand(()))
"""
# The second worker was started later, and counts its own turns.
PARTS = (
    EPOCHS.replace("scale = 1.0", "seen = 0")
    .replace("    scale = float", "    scale = 1.0 + 0 * float")
    .replace("        if turn % 7 in (0, 3, 6):", "        seen += 1\n        if seen == 7:")
)
PLAIN = """
import torch
from orchestrator import Session

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = Session(model, optimizer, microbatches=2)
for step in session.steps(6):
{body}
"""
TRAINS = """
    session.backward(lambda mb: model(mb).square().mean(), [torch.ones(1, 2), torch.zeros(1, 2)])
    optimizer.step()
    optimizer.zero_grad()
"""


WRITES = """
from orchestrator import Session
import torch

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = Session(model, optimizer, microbatches=2)
lines = session.output / "lines.txt"
for turn in session.steps(20):
    with lines.open("a") as file:
        file.write(f"{turn}\\n")
    session.log(turn=turn)
    if turn % 2:
        continue
    session.backward(lambda mb: model(mb).square().mean(), [torch.ones(1, 2), torch.zeros(1, 2)])
    optimizer.step()
    optimizer.zero_grad()
with lines.open("a") as file:
    file.write("the end\\n")
"""


@pytest.mark.processes
def test_what_idle_turns_write_and_log_is_kept(crew):
    """Also that of turns after the last one that trains."""
    crew.begin(1, WRITES)
    crew.completed()
    (stored,) = crew.folder.rglob("lines.txt")
    rows = [row for _, row in crew.client.xrange(f"orch:metrics:{crew.job}")]
    logged = {int(row[b"step"]): msgspec.msgpack.decode(row[b"numbers"]) for row in rows}
    assert {at: numbers["turn"] for at, numbers in logged.items()} == {at: at for at in range(20)}
    assert stored.read_text().split("\n")[:-1] == [*map(str, range(20)), "the end"]


@pytest.mark.processes
def test_turns_of_epochs_that_train_nothing_are_elastic(crew, player, tmp_path):
    ends_alike(EPOCHS, crew, player, tmp_path, "replica.version")
    ended: dict[str, Any] = torch.load(crew.folder / "out.pt", weights_only=False)
    assert ended["state"]["turns"] == [*range(28)]


@pytest.mark.processes
def test_a_replacement_that_proves_an_epoch_s_first_training_begins_it_again(
    crew, player, tmp_path
):
    """It ends the epoch on what it had until then, though a turn that trained nothing was before."""
    made = "        optimizer.step()\n"
    source = EPOCHS.replace(made, f"{made}        session.state[str(epoch)] = 1\n")
    source += "    session.state[str(epoch)]\n"
    ends_alike(source, crew, player, tmp_path, "replica.version", begin=5)


@pytest.mark.processes
def test_workers_that_train_in_different_turns_are_stopped(crew):
    job = Held(crew, PARTS, "replica.version")
    first = job.begin(4)
    with pytest.raises(
        AssertionError,
        match=r"some workers train in turn [67] of the script's loop and w[12] in turn [67]",
    ):
        second = job.joins(first)
        job.go(first, *second, steps=4)
        job.go(first, *second, steps=4)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("    pass", "no step of it called session.backward"),
        (
            "    optimizer.zero_grad(); model(torch.ones(1, 2)).sum().backward(); optimizer.step()",
            "step 0 changed the model or the optimizer without session.backward",
        ),
        (
            f"    if step == 2:\n        torch.nn.init.zeros_(model.weight)\n        continue\n{TRAINS}",
            "step 2 changed the model or the optimizer without session.backward",
        ),
    ],
)
def test_a_loop_that_trains_by_itself_or_never_is_refused(body, why, player, tmp_path):
    with pytest.raises(AssertionError, match=why):
        player.play(PLAIN.format(body=body), tmp_path / "alone")


# As replay memories are written: what was observed last is in two rows, and in a variable.
MEMORY = """
import random
from collections import deque, namedtuple

import numpy as np
import torch
from orchestrator import Session, Variables

Transition = namedtuple("Transition", ("state", "reward", "next_state"))
torch.manual_seed(0)
np.random.seed(0)

class ReplayMemory:
    def __init__(self):
        self.memory = deque([], maxlen=12)

    def push(self, *row):
        self.memory.append(Transition(*row))

memory, state = ReplayMemory(), np.random.randn(2).astype(np.float32)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
session = Session(model, optimizer, memory, Variables(globals(), "state"), microbatches=2)
for turn in session.steps(24):
    next_state = (0.9 * state + 0.1 * np.random.randn(2)).astype(np.float32)
    memory.push(state, float(state.sum()), next_state)
    state = next_state
    if turn < 4:
        continue
    rows = Transition(*zip(*random.sample(memory.memory, 4)))
    states, rewards = torch.tensor(np.array(rows.state)), torch.tensor(rows.reward)
    optimizer.zero_grad()
    session.backward(lambda x, y: (model(x)[:, 0] - y).square().mean(), states, rewards)
    optimizer.step()
"""


@pytest.mark.processes
def test_a_memory_that_shares_its_rows_with_a_variable_is_elastic(crew, player, tmp_path):
    ends_alike(MEMORY, crew, player, tmp_path, "replica.version")
