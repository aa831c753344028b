"""What the processes that fetch have in common with the training process: no lock, and no pipe.

The system may kill a process at any moment, as where memory runs out. One that dies while it holds
the lock of an event, or amid what it writes to a pipe, stops all who use them for ever. Both happen
with those of `multiprocessing`. A kill takes from others nothing here but messages of the killed
process: one that was not sent whole, and those whose tensors, which torch has the reader fetch from
their sender, were not fetched yet. Its reader meets an error then, and waits for nothing.
"""

import contextlib
import multiprocessing
import os
import queue
import socket
import struct
import threading
from collections.abc import Sequence
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

PIECE = 64 * 1024
HEAD = struct.Struct("=i?")  # who sends, and whether the message goes on in another piece

Leaving = queue.SimpleQueue[memoryview | None]
Ends = tuple[socket.socket, socket.socket]


class Flag:
    """An event that is looked at and never waited for."""

    def __init__(self) -> None:
        value = torch.zeros(1, dtype=torch.uint8)
        self._value: torch.Tensor = value.share_memory_()  # type: ignore[no-untyped-call]

    def set(self) -> None:
        self._value.fill_(1)

    def is_set(self) -> bool:
        return bool(self._value.item())


class Mailbox:
    """A queue from several processes to one, in pieces that the system takes whole or not at all.

    Who made it ends it.
    """

    def __init__(self, senders: Sequence[BaseProcess] = ()) -> None:
        self._senders = senders
        self._begin(socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET), os.getpid())

    def __reduce__(self) -> tuple[Any, ...]:
        return _given, (self._reader, self._writer, self._maker)

    def _begin(self, ends: Ends, maker: int) -> None:
        self._reader, self._writer = ends
        self._maker = maker
        self._begun: dict[int, bytearray] = {}  # by sender, what has come of its message
        self._leaving: Leaving = queue.SimpleQueue()
        self._sender: threading.Thread | None = None

    def put(self, message: Any) -> None:
        """Send a message without waiting for the reader. What cannot be pickled raises here."""
        pickled = ForkingPickler.dumps(message)
        if self._sender is None:
            self._sender = threading.Thread(
                target=_send, args=(self._leaving, self._writer), daemon=True
            )
            self._sender.start()
        self._leaving.put(pickled)

    def get(self, timeout: float | None = None) -> Any:
        """Return the next whole message.

        Raise `queue.Empty` if no piece comes within `timeout`, or as soon as a sender is gone.
        """
        ends = [each.sentinel for each in self._senders] if self._maker == os.getpid() else []
        while True:
            if self._reader not in wait([self._reader, *ends], timeout):
                raise queue.Empty
            piece = self._reader.recv(HEAD.size + PIECE)
            if not piece:
                raise EOFError("nobody sends any more")
            sender, goes_on = HEAD.unpack_from(piece)
            message = self._begun.setdefault(sender, bytearray())
            message += memoryview(piece)[HEAD.size :]
            if not goes_on:
                return ForkingPickler.loads(self._begun.pop(sender))

    def close(self) -> None:
        """End it for all if it is our own, else send what was put before."""
        if self._maker == os.getpid():
            _end(self._writer)
        self._reader.close()
        if self._sender is not None and self._sender.is_alive():
            self._leaving.put(None)
        else:
            self._writer.close()

    def cancel_join_thread(self) -> None:
        """Nothing, because no process waits for its sender."""

    def __del__(self) -> None:
        if "_sender" in self.__dict__:  # no file was left for its ends otherwise
            self.close()


class Context(BaseContext):
    """What torch's `DataLoader` makes its processes with, and all that it shares with them."""

    def __init__(self, method: str | None) -> None:
        self._made: Any = multiprocessing.get_context(method)
        self._processes: list[BaseProcess] = []

    def Process(self, *given: Any, **more: Any) -> BaseProcess:  # noqa: N802
        process: BaseProcess = self._made.Process(*given, **more)
        self._processes.append(process)
        return process

    def Event(self) -> Flag:  # type: ignore[override] # noqa: N802
        return Flag()

    def Queue(self) -> Mailbox:  # type: ignore[override] # noqa: N802
        return Mailbox(self._processes)


def _given(reader: socket.socket, writer: socket.socket, maker: int) -> Mailbox:
    """Return the mailbox in a process that was given its ends."""
    mailbox = Mailbox.__new__(Mailbox)
    mailbox._senders = ()
    mailbox._begin((reader, writer), maker)
    return mailbox


def _send(leaving: Leaving, writer: socket.socket) -> None:
    sender = os.getpid()
    with writer:
        try:
            while (message := leaving.get()) is not None:
                for at in range(0, len(message), PIECE):
                    head = HEAD.pack(sender, at + PIECE < len(message))
                    writer.sendmsg([head, message[at : at + PIECE]])
        except OSError:
            _end(writer)  # what could not be sent would be waited for


def _end(writer: socket.socket) -> None:
    """End a mailbox for all its processes."""
    with contextlib.suppress(OSError):
        writer.shutdown(socket.SHUT_RDWR)
