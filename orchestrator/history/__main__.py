"""The history as a process, apart from the manager, so that writing it slows no decision.

    python -m orchestrator.history --house STATE_DIR   (run by the house)

It may be killed at any moment: the file says where to go on.
"""

import argparse
import os
import signal
import sqlite3
import sys
from pathlib import Path
from threading import Event, Thread

import msgspec
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from cloud import private
from cloud.clock import CLOCK
from orchestrator.history.order import VARIABLE, HistoryOrder
from orchestrator.history.outside.hooks import Sender, mail_of, say
from orchestrator.history.recorder import LOOK_S, Recorder
from orchestrator.paths import Places

ANSWER_S_MAX = 5.0
NICENESS = 5
PASSING = (
    redis.RedisError,
    sqlite3.Error,
    OSError,
)  # what a restart or room on the disk puts right


def run(places: Places, order: HistoryOrder, over: Event) -> None:
    """Keep the history until this process is asked to end."""
    store = redis.Redis.from_url(
        order.redis_url, socket_timeout=ANSWER_S_MAX, retry=Retry(NoBackoff(), 1)
    )
    mail = mail_of(order.deployment, order.hook_kinds if order.hook_url else (), CLOCK.now_s)
    if order.hook_url:
        sender = Sender(places.history, order.hook_url, private.secret(places.secret("hooks")))
        Thread(target=sender.run, args=(over,), name="hooks", daemon=True).start()
    recorder, said = None, ""
    while True:
        last = over.wait(LOOK_S)
        try:
            recorder = recorder or Recorder(store, places.history, mail)
            recorder.look(CLOCK.now_s(), last=last)
            said = ""
        except PASSING as error:
            if str(error) != said:
                said = str(error)
                say(f"history: {said}; trying again")
        if last:
            break
    if recorder is not None:
        recorder.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m orchestrator.history", description=__doc__)
    parser.add_argument("--house", type=Path, required=True, help="the state directory")
    options = parser.parse_args()
    over = Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: over.set())
    os.nice(NICENESS)
    order = msgspec.json.decode(os.environ[VARIABLE], type=HistoryOrder)
    run(Places(options.house), order, over)
    return 0


if __name__ == "__main__":
    sys.exit(main())
