"""What is done to a large state leaves the other threads of the process alone: those that say it is alive."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from crews import Crew, played_alone, until

from agent.checksum import crc32c
from agent.keeper.storage.backup import Assembly
from agent.store.memory import copy_bytes, fresh

SIZE = 1 << 28
TRIES = 40
TURNS_MIN = 8  # a call that keeps all others waiting leaves them two at most, before and behind it


def _taken(data: memoryview) -> object:
    assembly = Assembly(SIZE)
    assembly.take(0, data)
    return assembly


WORKS: dict[str, Callable[[memoryview], object]] = {
    "checksum": lambda data: crc32c(0, data),
    "snapshot": lambda data: copy_bytes(data, fresh(data.nbytes)),
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
    """A quarter of a gigabyte is summed or copied, and another thread runs again and again before it is done: seen at
    least once, since on a busy machine it may find no core meanwhile."""
    data = np.zeros(SIZE, dtype=np.uint8).data
    assert any(_turns(lambda: WORKS[work](data)) > TURNS_MIN for _ in range(TRIES))


def _turns(perform: Callable[[], object]) -> int:
    begun, turns = threading.Event(), 0

    def performed() -> None:
        begun.set()
        perform()

    thread = threading.Thread(target=performed)
    thread.start()
    begun.wait()
    while thread.is_alive():
        time.sleep(0.0001)
        turns += 1
    return turns


LARGE = """
import pathlib, sys, time, torch
from orchestrator import Session
torch.manual_seed(0)
model = torch.nn.Linear(2000, 2000, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = Session(model, optimizer, microbatches=1)
x, world, held = torch.randn(2, 2000), session._world, {0}
for step in session.steps(10):
    entered = getattr(world, "entered", None)
    end = entered.version if entered and entered.redo else 0
    base = end - entered.redo if end else 0
    while base < step < end and not world._redo:
        time.sleep(0.01)
    if base < step < end:
        held.add(len(world._redo))
    result = session.backward(lambda batch: model(batch).square().mean(), [x])
    optimizer.step()
    while step == 8 and pathlib.Path(sys.argv[1]).exists():
        time.sleep(0.01)
print(f"{max(held)} sums held,", repr(result.loss))
"""


@pytest.mark.processes
def test_who_catches_up_holds_a_few_sums_at_a_time(crew: Crew, tmp_path: Path) -> None:
    """Some sums of 16 MB are applied again by a newcomer, each comes when it is asked for, and the loss is as alone."""
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
    assert int(held) == 1
    assert alone[0].endswith(loss)


@pytest.mark.processes
def test_who_catches_up_hears_of_a_new_layout_before_it_has_all_sums(
    crew: Crew, tmp_path: Path
) -> None:
    """A newcomer that has applied two of some large sums waits until a newer layout is heard of, which does not
    stand behind the others; it gives up and begins again, and the loss is as alone."""
    script, hold, waiting = tmp_path / "train.py", tmp_path / "hold", tmp_path / "waiting"
    waits = LARGE.replace(
        "    result =",
        "    if end and step == base + 2 and entered.layout.generation == 2:\n"
        "        pathlib.Path(sys.argv[2]).touch()\n"
        "        while not world.superseded():\n"
        "            time.sleep(0.01)\n"
        "    result =",
    )
    script.write_text(LARGE)
    alone, _ = played_alone(script, script, str(hold))
    hold.touch()
    (first,) = crew.begin(1, waits, str(hold), str(waiting), backup_every_steps=100)
    crew.reach(9)
    crew.kill(first)
    crew.start(1)
    until("the wait", waiting.exists)
    with crew._lock:
        assert crew.generation == 2
        crew.regroup("now")
    hold.unlink()
    crew.completed()
    (line,) = crew.printed()
    assert line.endswith(alone[0].split(" sums held,")[1])
