"""An HTTP server for an ASGI application on one loopback address.

The local cloud listens on many addresses at once, closes single ones while it runs, and handles
signals itself; so it uses uvicorn's protocol only.
"""

import asyncio

from starlette.types import ASGIApp
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState


class Listener:
    """One address. `url` is known once it listens."""

    def __init__(self, app: ASGIApp) -> None:
        self._config = Config(app, log_config=None, access_log=False, server_header=False)
        self._config.load()
        self._state = ServerState()
        self._server: asyncio.Server | None = None
        self.url = ""

    async def listen(self, host: str, port: int = 0) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._protocol, host, port)
        bound = self._server.sockets[0].getsockname()
        self.url = f"http://{bound[0]}:{bound[1]}"

    def close(self) -> None:
        """Stop listening and drop every connection, as a machine that is switched off."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._state.connections):
            if connection.transport is not None:
                connection.transport.abort()

    def _protocol(self) -> H11Protocol:
        return H11Protocol(config=self._config, server_state=self._state, app_state={})
