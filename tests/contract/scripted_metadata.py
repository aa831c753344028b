"""A metadata service that says what a test tells it to say, over real sockets."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = tuple[int, str]
Script = Callable[[str, str, dict[str, str]], Answer]
"""From method, path and headers (names in lower case) to a status and a body."""


@contextmanager
def scripted(script: Script) -> Iterator[str]:
    """The address of a service that follows the script."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            self.rfile.read(length)
            named = {name.lower(): value for name, value in self.headers.items()}
            status, body = script(self.command, self.path, named)
            self.send_response(status)
            self.send_header("content-length", str(len(body.encode())))
            self.end_headers()
            self.wfile.write(body.encode())

        do_GET = do_PUT = do_POST = _answer  # noqa: N815 - the names of the base class

        def log_message(self, *_: object) -> None:
            """Nothing is logged."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
