"""Does a day at one change a second grow anything: the page's process, the history's, or an open tab?

    python benchmarks/page_day.py [--hours 24] [--messages 3000]

The clock is compressed: a view of 50 machines and 3 jobs changes once for each second of the day, and the feed encodes it for
five pages that read, while the history's writer takes its numbers and writes a turn for each two seconds. Printed is the
memory of the process, and the size of its file, after each quarter. Then a real tab (Debian's chromium) is shown `messages`
changes as fast as it draws them, and its heap after a collection is printed.
"""

import argparse
import asyncio
import gc
import resource
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from cloud.http_server import bound, url_of
from orchestrator.dashboard.app import create_app, serve
from orchestrator.dashboard.feed import Feed
from orchestrator.dashboard.keys import Keys
from orchestrator.history.reader import History
from orchestrator.history.records import LeaseReading, Reading
from orchestrator.history.writer import Writer
from orchestrator.paths import Places
from orchestrator.view import View

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / part) for part in ("ui", "")]
PAGES, JOBS, MACHINES = 5, 3, 50
QUARTERS = 4


def view_at(base: View, at_s: float, second: int) -> View:
    """A view in which every number has moved."""
    jobs = tuple(
        msgspec.structs.replace(
            base.jobs[0], id=f"job-{n}", step=second, loss=1 / (1 + second), logged={"lr": second}
        )
        for n in range(JOBS)
    )
    machines = tuple(
        msgspec.structs.replace(
            base.machines[0], id=f"m-{n}", token=f"t-{n}", cost_usd=second / 1e5
        )
        for n in range(MACHINES)
    )
    return msgspec.structs.replace(base, at_s=at_s, jobs=jobs, machines=machines)


def reading_at(at_s: float, second: int) -> Reading:
    leases = tuple(
        LeaseReading(
            f"t-{n}-{second // 3600}",  # each machine lives for an hour
            f"m-{n}",
            f"job-{n % JOBS}",
            "local/local-a/local.small",
            "spot",
            at_s - second % 3600,
            None,
            (second % 3600) / 1e5,
            0.0,
            0.0,
            0.03,
            0.1,
            (("useful", 1.0),),
            "the cheapest",
        )
        for n in range(MACHINES)
    )
    spent = sum(lease.cost_usd for lease in leases)
    return Reading(
        at_s=at_s, ledger="one", spent_usd=spent, manager_usd=0.0, leases=leases, jobs=()
    )


async def server_day(base: View, hours: float, folder: Path) -> None:
    feed, writer, begun_s = Feed(lambda: None), Writer(folder / "history.db"), 1_790_000_000.0  # type: ignore[arg-type, return-value]

    async def read(page: Any) -> None:
        async for _ in page:
            pass

    readers = [asyncio.create_task(read(feed.messages())) for _ in range(PAGES)]
    seconds = int(3600 * hours)
    for second in range(1, seconds + 1):
        at_s = begun_s + second
        feed.view = view_at(base, at_s, second)
        await feed._show("")
        await asyncio.sleep(0)
        for job in feed.view.jobs:
            writer.show(job)
            for name in ("loss", "step", "spent_usd", "log/lr"):
                writer.note(f"job/{job.id}/{name}", at_s, float(second))
        writer.take(reading_at(at_s, second))
        writer.seen_s = at_s
        if second % 2 == 0:
            writer.flush()
        if second % (seconds // QUARTERS) == 0:
            gc.collect()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            held = pages * resource.getpagesize() / 1e6
            size = (folder / "history.db").stat().st_size / 1e6
            print(
                f"after {second / 3600:5.1f} h: the process has {held:6.1f} MB, the file {size:6.2f} MB",
                flush=True,
            )
    for reader in readers:
        reader.cancel()
    writer.close()


def tab(base: View, messages: int, folder: Path) -> None:
    binary = shutil.which("chromium")
    if binary is None:
        print("no chromium here, so no tab is looked at")
        return
    from conftest import Browser, FakeSource, foretold
    from past_hour import write_past

    source, keys, places = FakeSource(view_at(base, 1.0, 1)), Keys(folder / "keys"), Places(folder)
    (folder / "history.db").unlink(missing_ok=True)
    write_past(places)
    loop, over, listening = asyncio.new_event_loop(), asyncio.Event(), bound("127.0.0.1", 0)
    app = create_app(lambda: source, keys, History.open(places), 0.005, foretold)
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(app, listening, over),))
    thread.start()
    browser = Browser(binary, folder / "chromium")
    try:
        browser.open(f"{url_of(listening)}/#key={keys.make('admin')}")
        browser.wait_for("document.querySelector('#link')?.textContent == 'live'")
        for second in range(2, messages + 2):
            source.now = view_at(base, 1_790_000_000.0 + second, second)
            if second % 25 == 0:
                browser.wait_for(
                    f"document.querySelector('#jobs').innerText.includes('step {second:,}')"
                )
            else:
                time.sleep(0.006)
            if second % (messages // QUARTERS) == 0:
                browser.call("HeapProfiler.collectGarbage")
                heap = browser.call("Runtime.getHeapUsage")["usedSize"] / 1e6
                nodes = browser.run("document.querySelectorAll('*').length")
                print(f"tab after {second:6,} messages: heap {heap:6.2f} MB, {nodes:,} elements")
    finally:
        browser.close()
        loop.call_soon_threadsafe(over.set)
        thread.join(30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--messages", type=int, default=3000)
    options = parser.parse_args()
    from conftest import make_view

    base, folder = make_view(), Path(tempfile.mkdtemp())
    try:
        if options.hours:
            asyncio.run(server_day(base, options.hours, folder))
        if options.messages:
            tab(base, options.messages, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
