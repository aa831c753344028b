"""How long processors have worked, which says more than a clock on a machine that others use too."""

import time
from pathlib import Path


def busy_s(house):
    """Return for how long processors have worked for a job: its nodes and the controller here."""
    total_s = time.process_time()
    for spawned in house.nodes.values():
        for task in Path(f"/proc/{spawned.process.pid}/task").glob("*/schedstat"):
            total_s += int(task.read_text().split()[0]) / 1e9
    return total_s
