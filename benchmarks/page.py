"""How fast does the page answer 50 viewers while everything changes, and does it grow?

    python benchmarks/page.py [--viewers 50] [--seconds 30] [--machines 200]

The page's application in a process apart, as in a house, with a source whose every machine changes each second. Each
viewer holds a stream open, and asks for the view and for the footprint over time once a second. The age of a message is from
the moment of its view to the moment at which a viewer has it, whole; it includes up to one second between two looks.
"""

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import re
import ssl
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from _memory import resident_bytes

from cloud.http_server import bound, url_of
from orchestrator.client import House
from orchestrator.dashboard.app import create_app, serve
from orchestrator.dashboard.keys import Keys
from orchestrator.history.reader import History
from orchestrator.paths import Places
from orchestrator.view import CostView, MachineView, Sentence, View

AT = re.compile(rb'data: {"view":{"at_s":([0-9.]+)')


class Changing:
    """A source whose view is new at each look."""

    def __init__(self, machines: int) -> None:
        self._machines = machines

    def view(self) -> View:
        now_s = time.time()
        machines = tuple(
            MachineView(
                id=f"i-{n:016x}",
                token=f"t-{n}",
                job="job",
                pool="aws/us-east-1/us-east-1a/g5.xlarge",
                market="spot",
                state="working",
                price_usd_per_h=0.4,
                on_demand_usd_per_h=1.0,
                cost_usd=now_s % 1000,
                launched_at_s=now_s - n,
                ended_at_s=None,
                why_bought="the cheapest work of 200 pools; next best is 4 % dearer",
                why_ended="",
            )
            for n in range(self._machines)
        )
        said = Sentence(at_s=now_s, who="job", what="goes on", because="nothing has changed")
        cost = CostView(
            spent_usd=1.0,
            reserved_usd=0.1,
            budget_usd=None,
            now_usd_per_h=80.0,
            on_demand_usd=3.0,
            saved_usd=2.0,
            manager_usd=0.0,
            machines=self._machines,
        )
        return View(
            at_s=now_s,
            epoch=1,
            deployment="bench",
            jobs=(),
            machines=machines,
            pools=(),
            cost=cost,
            events=(said,) * 100,
        )

    def house(self) -> House:
        raise NotImplementedError

    def post(self, event: Any) -> None:
        raise NotImplementedError

    def has_script(self, _: str) -> bool:
        return True

    def last_lines(self, *_: Any) -> list[tuple[str, str, str]]:
        return []


def page(folder: Path, machines: int, sent: Any) -> None:
    places, listening = Places(folder), bound("127.0.0.1", 0)
    keys = Keys(places.secret("dashboard"))
    keys.begin()
    app = create_app(lambda: Changing(machines), keys, History.open(places))
    sent.send(url_of(listening))
    asyncio.run(serve(app, listening, asyncio.Event()))


async def follow(client: httpx.AsyncClient, ages: list[float], until_s: float) -> None:
    """Hold a stream open, and open it again as the page does when the connection is lost."""
    while time.monotonic() < until_s:
        with contextlib.suppress(httpx.TransportError):
            await listen(client, ages, until_s)


async def listen(client: httpx.AsyncClient, ages: list[float], until_s: float) -> None:
    held = b""
    async with client.stream("GET", "/api/stream") as answer:
        async for part in answer.aiter_raw():
            held += part
            if held.endswith(b"\n\n"):
                if found := AT.match(held):
                    ages.append(time.time() - float(found[1]))
                held = b""
            if time.monotonic() > until_s:
                return


async def ask(client: httpx.AsyncClient, took: list[float], until_s: float) -> None:
    while time.monotonic() < until_s:
        for path in ("/api/view", "/api/footprint?last_s=3600"):
            begun_s = time.monotonic()
            with contextlib.suppress(httpx.RemoteProtocolError):  # it was kept open for too long
                (await client.get(path)).raise_for_status()
                took.append(time.monotonic() - begun_s)
        await asyncio.sleep(1.0)


async def crowd(
    url: str, keys: Keys, viewers: int, seconds: float
) -> tuple[list[float], list[float]]:
    ages, took = list[float](), list[float]()
    plain = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # unused; each client would load its own
    clients = [
        httpx.AsyncClient(
            base_url=url, timeout=60, verify=plain, headers={"Authorization": f"Bearer {key}"}
        )
        for key in [keys.make("read-only") for _ in range(viewers)]
    ]
    until_s = time.monotonic() + seconds
    streams = [follow(one, ages, until_s) for one in clients]
    await asyncio.gather(*streams, *(ask(one, took, until_s) for one in clients))
    for one in clients:
        await one.aclose()
    return ages, took


def processor_s(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--viewers", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--machines", type=int, default=200)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        receive, send = multiprocessing.Pipe(duplex=False)
        served = multiprocessing.get_context("spawn").Process(
            target=page, args=(Path(folder), options.machines, send), daemon=True
        )
        served.start()
        url = receive.recv()
        keys = Keys(Places(Path(folder)).secret("dashboard"))
        asyncio.run(crowd(url, keys, options.viewers, 3.0))
        before, begun_s = resident_bytes(served.pid) / 2**20, processor_s(served.pid)
        ages, took = asyncio.run(crowd(url, keys, options.viewers, options.seconds))
        after, used_s = resident_bytes(served.pid) / 2**20, processor_s(served.pid) - begun_s
        served.terminate()
        served.join(10)
    for name, found in (("answers", took), ("messages", ages)):
        p95 = statistics.quantiles(found, n=20)[-1]
        print(
            f"{name:9} {len(found):7,}   median {1000 * statistics.median(found):6.1f} ms   p95 {1000 * p95:6.1f} ms"
        )
    print(f"processor {100 * used_s / options.seconds:.0f} % of one core")
    print(
        f"memory    {before:.1f} MB before, {after:.1f} MB after {options.seconds:.0f} s with {options.viewers} viewers"
    )


if __name__ == "__main__":
    main()
