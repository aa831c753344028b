"""Does every route of the page's API keep to its OpenAPI document, whatever it is asked?

    pip install schemathesis    (in any environment; it is not among ours, because it brings its own pytest)
    python benchmarks/page_api.py [--seconds 60] [--program schemathesis]

The page's application serves views and a history as the tests have them; schemathesis makes requests from the document,
valid and not, with a key that may do everything. Its exit code is ours.
"""

import argparse
import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from cloud.http_server import bound, url_of
from orchestrator.dashboard import guard
from orchestrator.dashboard.app import create_app, serve
from orchestrator.dashboard.keys import Keys
from orchestrator.history.reader import History
from orchestrator.paths import Places

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / part) for part in ("ui", "")]
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,"
    "negative_data_rejection,unsupported_method,ignored_auth"
)
# Streams have no end, a session ends the key, and schemathesis 4.32 rewrites the tuples of the curves
# (prefixItems) into a form that it then refuses.
LEFT_OUT = ("/api/stream", "/api/session", "/api/curves")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--program", default="schemathesis")
    options = parser.parse_args()
    if shutil.which(options.program) is None:
        print("schemathesis is not installed, so nothing was asked; see the head of this file")
        return 0  # the other benchmarks go on
    from conftest import FakeSource, foretold, make_view
    from past_hour import write_past
    from test_study import checkpoint, remember, timeline

    guard.PER_S = 1e9  # the bound is tested elsewhere, and would answer most requests here
    source, folder = FakeSource(make_view()), Path(tempfile.mkdtemp())
    source.stored, source.recorded = [checkpoint(2400)], timeline(2413)
    keys, places, listening = Keys(folder / "keys"), Places(folder), bound("127.0.0.1", 0)
    write_past(places)
    remember(places, *source.now.jobs)
    loop, over = asyncio.new_event_loop(), asyncio.Event()
    app = create_app(lambda: source, keys, History.open(places), 0.5, foretold)
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(app, listening, over),))
    thread.start()
    url = url_of(listening)
    words = [
        options.program,
        "run",
        f"{url}/api/openapi.json",
        *("--header", f"Authorization: Bearer {keys.make('admin')}"),
        *("--max-time", str(options.seconds), "--continue-on-failure", "--checks", CHECKS),
        *(word for path in LEFT_OUT for word in ("--exclude-path", path)),
    ]
    try:
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        ran = subprocess.run(words, check=False, timeout=10 * options.seconds + 60, env=clean)
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(30)
        shutil.rmtree(folder, ignore_errors=True)
    return ran.returncode


if __name__ == "__main__":
    sys.exit(main())
