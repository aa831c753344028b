"""Serving the page from the house: one thread, and a socket bound before it is announced."""

import socket
import threading

import uvicorn
from fastapi import FastAPI


class Server:
    """The server of the page.

    `start` returns when the port is bound, or raises OSError; `stop` ends thread and socket.
    """

    def __init__(self, app: FastAPI, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._address = (host, port)
        settings = uvicorn.Config(
            app, log_level="warning", access_log=False, timeout_graceful_shutdown=1, ws="none"
        )
        self._server = uvicorn.Server(settings)
        self._thread = threading.Thread(target=self._serve, name="dashboard", daemon=True)

    @property
    def url(self) -> str:
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"

    def start(self) -> str:
        """Bind the port, start serving, and return the address of the page without the token."""
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(self._address)
            self._socket.listen()
        except OSError:
            self._socket.close()
            raise
        self._thread.start()
        return self.url

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=10)
        self._socket.close()

    def _serve(self) -> None:
        self._server.run(sockets=[self._socket])
