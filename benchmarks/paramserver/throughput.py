"""How much of the transport is left to a parameter server? Push and pull of whole models.

    python benchmarks/paramserver/throughput.py [--clocks 60] [--rounds 3]

One worker process and one server process on this machine. In each clock the worker pushes a model
of changes and gets the model back. Peers in the same run: the transport alone (`agent.transport`,
the same bytes to and fro), and a plain Ray actor that adds what it is sent and returns the model.
`waits` has one clock on its way (BSP; one call), `ahead` has up to four (slack 3; four calls).
ps-lite's figures were measured on such a machine earlier.
"""

import argparse
import multiprocessing
import os
import tempfile
import threading
import time
from collections import deque

import numpy as np
from processor_time import busy_s

from agent.paramserver.api import Application, Stop
from agent.paramserver.processes import House, Job
from agent.paramserver.tables import Table
from agent.transport.tcp import Tcp
from agent.transport.transport import Slot

WIDTH = 1024  # float64s in a row: 8 KiB
AHEAD = 3
WARM = 5  # rounds that are not counted
SIZES = (1 << 16, 1 << 20, 1 << 24)
PS_LITE = {1 << 16: 0.028, 1 << 24: 0.94}


class Whole(Application):
    """One block, whose worker pushes and pulls all rows in every clock."""

    grainwise = False
    items = 1

    def __init__(self, keys, clocks):
        self.tables = (Table("model", keys, WIDTH, own_writes=False),)
        self.stop = Stop(clocks=clocks)
        self.ones = np.ones((keys, WIDTH))

    def process_range(self, lo, hi, params):
        keys = np.arange(len(self.ones))
        params.read("model", keys)
        if hi > lo:
            params.update("model", keys, self.ones)


class Side:
    """One side of the transport alone."""

    def __init__(self, name, pipe):
        self.changed = threading.Condition()
        self.tcp = Tcp(name, "secret", self.changed, lambda _: None, host="127.0.0.1")
        pipe.send((name, self.tcp.offer()))
        self.peer, offered = pipe.recv()
        self.tcp.meet(self.peer, offered)

    def push(self, kind, turn, block):
        return self.tcp.push(self.peer, Slot(0, turn, kind, 0), [block])

    def land(self, kind, turn, into):
        self.wait(self.tcp.land(self.peer, Slot(0, turn, kind, 0), into))

    def wait(self, ticket):
        with self.changed:
            self.changed.wait_for(lambda: ticket.done or ticket.failed)


def echo(pipe, size, turns):
    side, into = Side("b", pipe), memoryview(np.zeros(size, np.uint8))
    for turn in range(turns):
        if turn == WARM:
            begun_s = time.process_time()
        side.land("there", turn, into)
        side.wait(side.push("back", turn, into))
    pipe.send(time.process_time() - begun_s)
    pipe.recv()
    side.tcp.close()


def raw(size, turns, ahead):
    """Return the seconds of one way there and back, and those of the processors in it."""
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=echo, args=(theirs, size, turns))
    child.start()
    side = Side("a", ours)
    mine, into = memoryview(np.ones(size, np.uint8)), memoryview(np.zeros(size, np.uint8))
    times = []
    for turn in range(turns + ahead):
        if turn == WARM:
            begun_s = time.process_time()
        if turn < turns:
            side.push("there", turn, mine)
        if turn >= ahead:
            side.land("back", turn - ahead, into)
            times.append(time.perf_counter())
    busy_s = time.process_time() - begun_s + ours.recv()
    ours.send("over")
    child.join()
    side.tcp.close()
    return per_turn(times), busy_s / (turns - WARM)


def per_turn(times):
    return (times[-1] - times[WARM]) / (len(times) - 1 - WARM)


def served(size, clocks, ahead):
    """Return the seconds of a clock, a push and a pull of the model, and those of the processors."""
    with tempfile.TemporaryDirectory() as store:
        job = Job(
            module="throughput",
            kind="Whole",
            folder=__file__.rpartition("/")[0],
            arguments={"keys": size // WIDTH // 8, "clocks": clocks},
            blocks=1,
            grains=1,
            partitions=1,
            expected=2,
            slack=ahead,
            save_every=1 << 20,
            dead_s=60.0,
            store=store,
        )
        house = House(job)
        try:
            house.start("a", reliable=False)  # the first has the only block
            house.wait(lambda brain: "a" in brain.nodes)
            house.start("r", reliable=True)  # stage 1: it serves
            house.wait(lambda brain: brain.ledger.closed >= WARM)
            first, begun_s = house.controller.ledger.closed, busy_s(house)
            house.wait(lambda brain: brain.ledger.closed >= clocks - 2)
            clocked = house.controller.ledger.closed - first
            took_s = (busy_s(house) - begun_s) / clocked
            house.wait(lambda brain: brain.ended)
            return per_turn(house.closed_s), took_s
        finally:
            house.close()


def actor(size, calls, ahead):
    """Return seconds for a call of a plain Ray actor that sums; the driver is the worker."""
    import ray

    class Plain:
        def __init__(self, count):
            self.model = np.zeros(count)

        def push_pull(self, change):
            self.model = self.model + change
            return self.model

    ones = np.ones(size // 8)
    server = ray.remote(Plain).remote(len(ones))
    waiting, times = deque(), []
    for _ in range(calls):
        waiting.append(server.push_pull.remote(ones))
        if len(waiting) > ahead:
            ray.get(waiting.popleft())
            times.append(time.perf_counter())
    ray.kill(server)
    return per_turn(times), float("nan")


def measured(size, clocks, ahead, actors):
    turns = clocks if size > 1 << 20 else 5 * clocks
    found = {"raw": raw(size, turns, ahead), "ours": served(size, turns, ahead)}
    if actors:
        found["actor"] = actor(size, turns, ahead)
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--clocks", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3, help="the median of so many is shown")
    parser.add_argument("--no-actor", action="store_true")
    given = parser.parse_args()
    if not given.no_actor:
        os.environ.setdefault("RAY_raylet_start_wait_time_s", "180")  # on a busy machine
        import ray

        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    print("GiB/s, both ways together; ms of processors for a clock, in all processes")
    print(
        f"{'':16} {'raw':>7} {'ours':>7} {'share':>6} {'actor':>7} {'times':>6} {'ps-lite':>8} "
        f"{'raw ms':>7} {'ours ms':>7} {'share':>6}"
    )
    for size in SIZES:
        for name, ahead in (("waits", 0), ("ahead", AHEAD)):
            rounds = [
                measured(size, given.clocks, ahead, not given.no_actor) for _ in range(given.rounds)
            ]
            rate = {
                kind: 2 * size / (1 << 30) / float(np.median([one[kind][0] for one in rounds]))
                for kind in rounds[0]
            }
            worked = {
                kind: 1e3 * float(np.median([one[kind][1] for one in rounds])) for kind in rounds[0]
            }
            ours, plain = rate["ours"], rate.get("actor", float("nan"))
            print(
                f"{size:9} {name:6} {rate['raw']:7.3f} {ours:7.3f} {ours / rate['raw']:6.2f} "
                f"{plain:7.3f} {ours / plain:6.2f} {PS_LITE.get(size, float('nan')):8.3f} "
                f"{worked['raw']:7.3f} {worked['ours']:7.3f} {worked['raw'] / worked['ours']:6.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
