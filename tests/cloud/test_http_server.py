"""The HTTP server of the page and of the local cloud, among strangers who are idle, slow, many or noisy."""

import asyncio
import contextlib
import os
import resource
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.routing import Route, Router

from cloud import http_server
from cloud.http_server import Crowd, Listener

HEAD = b"GET / HTTP/1.1\r\nHost: a\r\n"
LONG = b"x" * 400_000


async def answer(_):
    return PlainTextResponse("here")


async def much(_):
    return PlainTextResponse(LONG)


async def late(request):
    while not await request.is_disconnected():
        await asyncio.sleep(0.01)
    return PlainTextResponse("too late")


async def echo(request):
    return PlainTextResponse(await request.body())


APP = Router(
    [
        Route("/", answer),
        Route("/much", much),
        Route("/late", late),
        Route("/echo", echo, methods=["POST"]),
    ]
)


def served(act: Callable[[Listener], Awaitable[None]], places: int = 8) -> None:
    """A server of few places while `act` runs."""

    async def run() -> None:
        listener = Listener(APP, Crowd(places))
        await listener.listen("127.0.0.1")
        try:
            await act(listener)
        finally:
            listener.close()

    asyncio.run(run())


async def asked(listener: Listener, path: str = "/") -> str:
    async with httpx.AsyncClient(trust_env=False, timeout=20) as client:
        return (await client.get(listener.url + path)).text


async def stranger(listener: Listener, said: bytes = b""):
    host, _, port = listener.url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(said)
    return reader, writer


async def hung_up(reader: asyncio.StreamReader) -> bytes:
    """What the server said before it closed the connection."""
    said = b""
    with contextlib.suppress(ConnectionError):
        while data := await asyncio.wait_for(reader.read(65536), 20):
            said += data
    return said


@pytest.mark.parametrize(
    "said", [b"", HEAD, HEAD + b"Content-Length: 9\r\n\r\nhalf", HEAD + b"\r\n" + HEAD]
)
def test_request_that_does_not_become_whole_is_given_up(monkeypatch, said):
    """Also the body, and the second request on a connection."""
    monkeypatch.setattr(http_server, "REQUEST_S_MAX", 0.2)

    async def act(listener: Listener) -> None:
        reader, writer = await stranger(listener, said)
        await hung_up(reader)
        writer.close()

    served(act)


def test_dripping_bytes_buy_no_time(monkeypatch):
    monkeypatch.setattr(http_server, "REQUEST_S_MAX", 0.3)

    async def act(listener: Listener) -> None:
        reader, writer = await stranger(listener, HEAD)
        end = asyncio.create_task(hung_up(reader))
        while not end.done():
            writer.write(b"x")
            await asyncio.sleep(0.02)
        writer.close()

    served(act)


@pytest.mark.parametrize("said", [b"", HEAD, HEAD + b"\r\n"], ids=["idle", "slow", "answered"])
def test_who_asks_is_served_among_many_who_do_not(said):
    """However many there are: the oldest ones go."""

    async def act(listener: Listener) -> None:
        others = [await stranger(listener, said) for _ in range(40)]
        assert await asked(listener) == "here"
        assert len(listener._state.connections) <= 8
        for _, writer in others:
            writer.close()

    served(act)


def test_who_does_not_take_an_answer_holds_no_place():
    """Answers fill what the system buffers, and more."""

    async def act(listener: Listener) -> None:
        wanted = 40 * (HEAD.replace(b"/ ", b"/much ") + b"\r\n")
        others = [await stranger(listener, wanted) for _ in range(10)]
        assert await asked(listener) == "here"
        for _, writer in others:
            writer.transport.abort()

    served(act)


def test_who_leaves_before_the_answer_holds_no_place():
    async def act(listener: Listener) -> None:
        for _ in range(3):
            others = [
                await stranger(listener, HEAD.replace(b"/ ", b"/late ") + b"\r\n") for _ in range(8)
            ]
            while len(listener._state.tasks) < 8:
                await asyncio.sleep(0.01)
            for _, writer in others:
                writer.transport.abort()
            assert await asked(listener) == "here"
            while listener._state.tasks:
                await asyncio.sleep(0.01)

    served(act)


def test_lack_of_files_is_waited_out_and_not_logged(capfd, caplog):
    """The one who asked meanwhile is served as soon as a file can be opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def act(listener: Listener) -> None:
        host, _, port = listener.url.removeprefix("http://").rpartition(":")
        caller = socket.create_connection((host, int(port)))
        caller.setblocking(False)
        highest = max(int(file.name) for file in Path("/proc/self/fd").iterdir())
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
        taken = []
        try:
            with pytest.raises(OSError, match="Too many open files"):
                while True:
                    taken.append(os.open("/dev/null", os.O_RDONLY))
            caller.send(HEAD + b"Connection: close\r\n\r\n")
            await asyncio.sleep(3 * http_server.NO_FILES_S)
            assert not listener._state.connections
        finally:
            for fd in taken:
                os.close(fd)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        loop, said = asyncio.get_running_loop(), b""
        while data := await asyncio.wait_for(loop.sock_recv(caller, 65536), 20):
            said += data
        caller.close()
        assert said.endswith(b"here")

    served(act)
    assert capfd.readouterr() == ("", "")
    assert not caplog.records


def test_noise_and_long_heads_are_refused_without_a_line_in_a_log(capfd):
    async def act(listener: Listener) -> None:
        for said in (b"\x00\xff\r\n\r\n", HEAD + b"x: " + b"y" * http_server.HEAD_BYTES_MAX * 2):
            reader, writer = await stranger(listener, said)
            assert b" 400 " in await hung_up(reader) or said.startswith(b"GET")
            writer.close()
        reader, writer = await stranger(
            listener, HEAD.replace(b"GET / ", b"POST /echo ") + b"Content-Length: 9000000\r\n\r\n"
        )
        with contextlib.suppress(ConnectionError):
            for _ in range(9):
                writer.write(b"z" * 1_000_000)
                await writer.drain()
        assert b"z" not in await hung_up(reader)
        writer.close()

    served(act)
    assert capfd.readouterr() == ("", "")
