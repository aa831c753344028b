"""Memory for whole states: what is copied is what was there when the copying ended."""

import threading

import numpy as np

from agent.store.memory import PIECE_BYTES, Again, Copying


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
