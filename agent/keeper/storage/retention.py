"""What closed jobs leave on the disk and in Redis, bounded by their number. No torch here.

The manager knows a job as long as it is among the newest thousand. The keeper keeps what a resumed
job needs for somewhat more jobs, and then deletes it: versions, commits, the log, the numbers and
the list of manifests. The trained model and the script's output stay, because they belong to the
person. Of lines and numbers, which lie in memory and no job needs, only so many bytes stay.
"""

import logging
import shutil
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any

from agent.keys import CLOSED_JOBS, KEPT_JOBS, forgotten_keys, log_key, metrics_key
from agent.output.earlier import FOLDER as EARLIER
from agent.store.encoding.format import BAD, CLAIMS, FENCES, FLOORS, MANIFESTS, PARTS

log = logging.getLogger(__name__)

CLOSED_MAX = 1500
SAID_BYTES_MAX = 256 << 20  # in Redis's memory, of lines and numbers; the newest job keeps its own
LATER_S = 1e-3


def note_open(client: Any, job: str) -> None:
    """Keep the records of a job that is open again."""
    client.zrem(CLOSED_JOBS, job)


def note_closed(
    client: Any, checkpoints: Path, job: str, at_s: float, urls: Iterable[str] = ()
) -> None:
    """Note when a job was closed; if there are too many, forget those closed longest ago.

    What open jobs with these URLs begin from stays until they are closed. The newest is later than
    all others, whatever the clock says.
    """
    others = client.zrange(CLOSED_JOBS, -1, -1, withscores=True)
    after_s = max((noted_s + LATER_S for _, noted_s in others), default=at_s)
    client.zadd(CLOSED_JOBS, {job: max(at_s, after_s)})
    places = {url.partition("#")[0].rstrip("/") for url in urls}
    for name in client.zrange(CLOSED_JOBS, 0, -CLOSED_MAX - 1):
        if (checkpoints / name.decode()).resolve().as_uri() not in places:
            forget(client, checkpoints, name.decode())
            client.zrem(CLOSED_JOBS, name)
    _forget_said(client)


def _forget_said(client: Any) -> None:
    """Delete what was printed and logged by the jobs closed longest ago, down to the bound."""
    names = [name.decode() for name in client.zrevrange(CLOSED_JOBS, 0, -1)]
    keys = [key for name in names for key in (log_key(name), metrics_key(name))]
    asked = client.pipeline(transaction=False)
    for key in keys:
        asked.memory_usage(key)
    sums = accumulate(size or 0 for size in asked.execute())
    over = [key for key, used in zip(keys, sums, strict=True) if used > SAID_BYTES_MAX]
    if gone := [key for key in over if key not in keys[:2]]:
        client.delete(*gone)


def forget(client: Any, checkpoints: Path, job: str) -> None:
    client.delete(*forgotten_keys(job))
    client.hdel(KEPT_JOBS, job)
    folder = checkpoints / job
    if folder.parent != checkpoints or not folder.is_dir():
        return
    # In this order no manifest names a part that is gone.
    for part in (MANIFESTS, PARTS, FENCES, FLOORS, CLAIMS, BAD, EARLIER):
        shutil.rmtree(folder / part, ignore_errors=True)
    if not any(folder.iterdir()):
        folder.rmdir()
    log.info("%s was closed long ago; only its model is kept", job)
