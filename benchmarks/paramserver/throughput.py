"""How much of the transport is left to a parameter server? Push and pull of whole models.

    python benchmarks/paramserver/throughput.py [--clocks 30]

One worker process and one server process on this machine. In each clock the worker pushes a model
of changes and gets the model back. The peer is the transport alone: the same bytes, sent to and fro
over one connection with the same tags. ps-lite's figures were measured on such a machine earlier.
"""

import argparse
import multiprocessing
import socket
import tempfile
import time

import numpy as np

from agent.net.wire import Connection
from agent.paramserver.api import Application, Stop
from agent.paramserver.processes import House, Job
from agent.paramserver.tables import Table
from agent.protocol import Part

WIDTH = 1024  # float64s in a row: 8 KiB
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


def echo(called):
    connection = Connection(called)  # made here, because a fork lets go of those of its parent
    part = Part(generation=0, step=0, tag="echo")
    try:
        while True:
            _, payload = connection.receive()
            connection.send(part, payload)
    except Exception:
        return


def raw(size, rounds):
    """Return seconds for one way there and back."""
    listener = socket.create_server(("127.0.0.1", 0))
    caller = socket.create_connection(listener.getsockname())
    called, _ = listener.accept()
    child = multiprocessing.get_context("fork").Process(target=echo, args=(called,))
    child.start()
    called.close()
    connection, payload = Connection(caller), np.ones(size, np.uint8)
    part = Part(generation=0, step=0, tag="echo")
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        connection.send(part, payload)
        connection.receive()
        times.append(time.perf_counter() - start)
    connection.close()
    child.join()
    return float(np.median(times))


def served(size, clocks):
    """Return seconds for a clock: a push of the model's size, and a pull of it."""
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
            save_every=1000,
            dead_s=60.0,
            store=store,
        )
        house = House(job)
        try:
            house.start("a", reliable=False)  # the first has the only block
            house.wait(lambda brain: "a" in brain.nodes)
            house.start("r", reliable=True)  # stage 1: it serves
            house.wait(lambda brain: brain.ended)
            return float(np.median(np.diff(house.closed_s)))
        finally:
            house.close()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--clocks", type=int, default=30)
    given = parser.parse_args()
    print(
        f"{'bytes':>9} {'raw GiB/s':>10} {'ours GiB/s':>11} {'share':>6} {'ps-lite':>8} {'updates/s':>10}"
    )
    for size in (1 << 16, 1 << 20, 1 << 24):
        there, ours = raw(size, given.clocks), served(size, given.clocks)
        gib = 2 * size / (1 << 30)
        peer = PS_LITE.get(size)
        shown = f"{peer:8.3f}" if peer else "       -"
        rows = size / WIDTH / 8 / ours
        print(
            f"{size:9} {gib / there:10.3f} {gib / ours:11.3f} {there / ours:6.2f} {shown} {rows:10.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
