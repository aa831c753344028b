"""The wall clock can be set, so what runs for long counts time with `CLOCK`, and says why where it does not."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
LASTING = ("agent", "bidding", "orchestrator/brain", "orchestrator/history", "orchestrator/live")
ASKS = re.compile(r"\btime\.time\b|\bdatetime\.(?:now|utcnow|today)\b")
COMPARED = {
    "agent/machine/scratch.py",  # with the time of a file
    "orchestrator/history/outside/hooks.py",  # by whoever receives a message, in its signature
}


def test_nothing_that_runs_for_long_asks_the_wall_clock():
    asking = {
        str(path.relative_to(ROOT))
        for room in LASTING
        for path in (ROOT / room).rglob("*.py")
        if ASKS.search(path.read_text())
    }
    assert asking == COMPARED
