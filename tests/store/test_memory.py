"""Memory for whole states: what is copied is what was there when the copying ended."""

import subprocess
import sys
import threading

import numpy as np

from agent.store.memory import (
    PAGE_BYTES,
    PIECE_BYTES,
    RETURNING_BYTES_MIN,
    Again,
    Copying,
    Returning,
    fresh,
    give_back,
)


def test_whoever_has_time_copies():
    """Several threads share out the pieces, and each of them may rely on all of them when it goes on."""
    rng = np.random.default_rng(3)
    sizes = (PIECE_BYTES + 5, 0, 3, 2 * PIECE_BYTES)
    sources = [rng.integers(0, 256, size, dtype=np.uint8) for size in sizes]
    expected = b"".join(source.tobytes() for source in sources)
    copying, seen = Copying(lambda: [source.data for source in sources], Again()), []

    def finish() -> None:
        copying.finish()
        seen.append(bytes(copying.whole) == expected)

    threads = [threading.Thread(target=finish) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert seen == [True, True, True]
    sources[0][:] = 0
    assert bytes(copying.whole) == expected


def test_the_beginning_is_copied_first_and_the_rest_before_it_changes():
    source = np.arange(4 * PIECE_BYTES, dtype=np.uint32).view(np.uint8)[: 3 * PIECE_BYTES + 7]
    expected = source.tobytes()
    copying = Copying(lambda: [source.data], Again())
    copying.begin()
    assert copying.left_bytes == source.nbytes
    copying.reach(PIECE_BYTES + 1)
    assert copying.left_bytes == PIECE_BYTES + 7
    assert bytes(copying.whole[: 2 * PIECE_BYTES]) == expected[: 2 * PIECE_BYTES]
    copying.let_change()
    source[:] = 0
    assert bytes(copying.whole) == expected


def test_what_nobody_will_read_is_not_copied():
    source = np.ones(2 * PIECE_BYTES, dtype=np.uint8)
    copying = Copying(lambda: [source.data], Again())
    copying.reach(1)
    copying.give_up()
    copying.let_change()
    assert not any(copying.whole[PIECE_BYTES:])


def test_pages_are_given_back_and_no_byte_beside_them():
    memory = fresh(4 * PAGE_BYTES)
    memory[:] = b"x" * memory.nbytes
    give_back(memory, PAGE_BYTES - 1, 3 * PAGE_BYTES + 1)
    held = [bytes(memory[at : at + PAGE_BYTES]) for at in range(0, memory.nbytes, PAGE_BYTES)]
    assert held == [b"x" * PAGE_BYTES, bytes(PAGE_BYTES), bytes(PAGE_BYTES), b"x" * PAGE_BYTES]


FREED = """
import numpy as np
from agent.store.memory import keep_memory, resident_bytes, return_memory
keep_memory()
held = [np.ones(1 << 20, np.uint8) for _ in range(200)]
full = resident_bytes()
del held
kept = resident_bytes()
return_memory()
print(full, kept, resident_bytes())
"""


def test_freed_memory_is_kept_until_it_is_returned():
    said = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True)
    full, kept, returned = map(int, said.stdout.split())
    assert kept > full - (50 << 20)
    assert returned < full - (150 << 20)


def test_nothing_is_copied_at_once():
    """An empty state is one, too."""
    copying = Copying(list, Again())
    copying.finish()
    assert copying.whole.nbytes == 0


def test_memory_is_used_again_by_one_at_a_time():
    """What was given back is taken next, unless it is too small or much too large; and never twice."""
    again = Again()
    first = again.take(1000)
    again.give(first)
    second = again.take(900)
    second[0] = 7
    assert first[0] == 7
    again.give(second)
    assert again.take(1000).nbytes == 1000
    again.give(first)
    again.take(400)[0] = 9
    assert first[0] == 7
    one, other = again.take(500), again.take(500)
    one[0], other[0] = 1, 2
    assert one[0] == 1


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)


def test_memory_comes_back_when_the_last_view_of_it_goes():
    """Not before: somebody may look at a part of a part of it. Other sizes have memory of their own."""
    memory, size = Returning(), RETURNING_BYTES_MIN
    first = memory.take(size)
    address, part = _address(first), first[10:][10:20]
    part[:] = b"0123456789"
    first.release()
    second = memory.take(size)
    second[:] = bytes(size)
    assert bytes(part) == b"0123456789"
    assert _address(second) != address
    del part
    assert _address(memory.take(size + 1)) != address
    third = memory.take(size)
    assert _address(third) == address
    assert _address(memory.take(size)) != address


def test_memory_that_nobody_wants_is_given_back():
    """What has come back is there until the next rest, and no longer."""
    memory, size = Returning(), RETURNING_BYTES_MIN
    areas = [memory.take(size) for _ in range(3)]
    held = areas.pop()
    memory.rest()
    areas.clear()
    again = memory.take(size)
    assert [len(idle) for idle in memory._idle.values()] == [1]
    memory.rest()
    assert not any(memory._idle.values())
    del held, again
    assert [len(idle) for idle in memory._idle.values()] == [2]


def test_small_things_are_none_of_it():
    """A page for each would be more than they are."""
    memory = Returning()
    view = memory.take(100)
    del view
    assert not memory._idle and memory.take(0).nbytes == 0
