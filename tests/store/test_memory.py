"""Memory for whole states: what is copied is what was there when the copying ended."""

import threading

import numpy as np

from agent.store.memory import PIECE_BYTES, Copying


def test_whoever_has_time_copies():
    """Several threads share out the pieces, and each of them may rely on all of them when it goes on."""
    rng = np.random.default_rng(3)
    sizes = (PIECE_BYTES + 5, 0, 3, 2 * PIECE_BYTES)
    sources = [rng.integers(0, 256, size, dtype=np.uint8) for size in sizes]
    expected = b"".join(source.tobytes() for source in sources)
    copying, seen = Copying([source.data for source in sources]), []

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
    copying = Copying([])
    copying.finish()
    assert copying.whole.nbytes == 0
