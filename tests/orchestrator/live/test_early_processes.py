"""The processes of keeper and manager are there before anybody asks for them."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray_head import RayHead
from waiting import until

from agent.boot.node import EARLY
from cloud.local.processes import living

KEPT_S = 3.0  # Ray's own bound is one second


@pytest.fixture
def head() -> Iterator[RayHead]:
    with tempfile.TemporaryDirectory(dir="/tmp") as short:  # sockets are below it
        made = RayHead(Path(short) / "ray")
        made.environment |= EARLY
        try:
            yield made.start()
        finally:
            made.stop()


def test_processes_that_nobody_has_asked_for_yet_are_kept(head):
    """A driver that is slow, as on a busy machine, would find none, and it takes two starts instead of one."""
    root = {"head": head.process.pid}

    def idle():
        return [pid for pid in living(root) if "ray::IDLE" in _words(pid)]

    until("one to be there", idle, 20.0)
    with pytest.raises(AssertionError, match="it to be ended"):
        until("it to be ended", lambda: not idle(), KEPT_S)


def _words(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""  # it has just ended
