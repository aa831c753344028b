"""What is done to a large state leaves the other threads of the process alone: those that say it is alive."""

import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from agent.backup import Assembly
from agent.checksum import crc32c
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
