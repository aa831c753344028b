"""What is done to a large state leaves the other threads of the process alone: those that say it is alive."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from crews import Crew, played_alone

from agent.backup import Assembly
from agent.checksum import crc32c
from agent.group import REDO_BYTES_MAX
from agent.store.memory import joined

SIZE = 1 << 28
TURNS_MIN = 8  # a call that keeps all others waiting leaves them two at most, before and behind it


def _taken(data: memoryview) -> object:
    assembly = Assembly(SIZE)
    assembly.take(0, data)
    return assembly


WORKS: dict[str, Callable[[memoryview], object]] = {
    "checksum": lambda data: crc32c(0, data),
    "snapshot": lambda data: joined([data[: SIZE // 2], data[SIZE // 2 :]]),
    "assembly": _taken,
}


@pytest.fixture
def quick_turns() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("work", WORKS)
def test_others_have_their_turn_meanwhile(work: str, quick_turns: None) -> None:
    """A quarter of a gigabyte is summed or copied, and another thread runs again and again before it is done."""
    data = np.zeros(SIZE, dtype=np.uint8).data
    begun, turns = threading.Event(), 0

    def perform() -> None:
        begun.set()
        WORKS[work](data)

    thread = threading.Thread(target=perform)
    thread.start()
    begun.wait()
    while thread.is_alive():
        time.sleep(0.0005)
        turns += 1
    assert turns > TURNS_MIN


LARGE = """
import pathlib, sys, time, torch
from agent import Session
torch.manual_seed(0)
model = torch.nn.Linear(2000, 2000, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = Session(model, optimizer, microbatches=1)
x, world, held = torch.randn(2, 2000), session._world, 0
for step in session.steps(10):
    while not held and getattr(getattr(world, "_entered", None), "redo", 0):
        held = len(world._redo) if len(world._redo) > 3 else time.sleep(0.01)
    held = max(held, len(getattr(world, "_redo", ())))
    for batch in session.share([x]):
        session.backward(model(batch).square().mean())
    optimizer.step()
    while step == 8 and pathlib.Path(sys.argv[1]).exists():
        time.sleep(0.01)
print(f"{held} sums held,", repr(session.loss))
"""


@pytest.mark.processes
def test_who_catches_up_holds_a_few_sums_at_a_time(crew: Crew, tmp_path: Path) -> None:
    """Nine sums of 16 MB are applied again by a newcomer that has room for four, and the loss is as alone."""
    script, hold = tmp_path / "train.py", tmp_path / "hold"
    script.write_text(LARGE)
    alone, _ = played_alone(script, script, str(hold))
    hold.touch()
    (first,) = crew.begin(1, LARGE, str(hold), backup_every_steps=100)
    crew.reach(9)
    crew.kill(first)
    crew.start(1)
    hold.unlink()
    crew.completed()
    (line,) = crew.printed()
    held, loss = line.split(" sums held,")
    assert int(held) == REDO_BYTES_MAX // 16_000_000
    assert alone[0].endswith(loss)
