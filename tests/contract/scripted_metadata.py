"""A metadata service that says what a test tells it to say, over real sockets."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

from cloudfake.serving import serving

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

    with serving(Handler) as url:
        yield url
