"""Blocks of code that Ctrl-C must not cut short, because they clean up."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C in the block, so that cleaning up is not interrupted."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
