"""What closed jobs leave behind, bounded by their number. No torch here.

The manager knows a job for as long as it is among the newest thousand. The keeper keeps what a resumed job needs
for more than that, and then lets go of it: versions, commits, the log, the numbers and the list of manifests. The
trained model and the script's output stay: they are the person's own.
"""

import logging
import shutil
from pathlib import Path
from typing import Any

from agent.store.format import BAD, CLAIMS, FENCES, FLOORS, MANIFESTS, PARTS

log = logging.getLogger(__name__)

CLOSED = "orch:jobs:closed"  # sorted set: jobs by when they were closed
CLOSED_MAX = 1500
KEPT_JOBS = "orch:jobs:kept"  # hash: closed jobs that are in memory only
KEYS = ("orch:commit", "orch:log", "orch:metrics", "orch:manifest", "orch:jobs:script")


def note_open(client: Any, job: str) -> None:
    """It is needed again."""
    client.zrem(CLOSED, job)


def note_closed(client: Any, checkpoints: Path, job: str, at_s: float) -> None:
    """Remember when, and forget those that were closed longest ago if there are too many."""
    client.zadd(CLOSED, {job: at_s})
    for name in client.zrange(CLOSED, 0, -CLOSED_MAX - 1):
        forget(client, checkpoints, name.decode())
        client.zrem(CLOSED, name)


def forget(client: Any, checkpoints: Path, job: str) -> None:
    client.delete(*(f"{key}:{job}" for key in KEYS))
    client.hdel(KEPT_JOBS, job)
    folder = checkpoints / job
    if folder.parent != checkpoints or not folder.is_dir():
        return
    # In this order no manifest points at what is gone.
    for part in (MANIFESTS, PARTS, FENCES, FLOORS, CLAIMS, BAD):
        shutil.rmtree(folder / part, ignore_errors=True)
    if not any(folder.iterdir()):
        folder.rmdir()
    log.info("%s was closed long ago; only its model is kept", job)
