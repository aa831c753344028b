"""Every socket that some processes listen on, and what each answers a stranger."""

import contextlib
import ipaddress
import socket
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

import grpc
import httpx
import msgspec

PATHS = ("/metrics", "/machines", "/api/jobs/", "/api/view")
METHODS = (
    "NodeManagerService/GetNodeStats",
    "ObjectManagerService/Pull",
    "CoreWorkerService/GetCoreWorkerStats",
    "NodeInfoGcsService/GetAllNodeInfo",
    "ReporterService/HealthCheck",
)
LISTENS = "0A"  # in /proc/net/tcp
ACCEPTS = 0x10000  # in /proc/net/unix
ANSWER_S_MAX = 10.0


class Door(msgspec.Struct, frozen=True):
    """One TCP socket that is listened on."""

    address: str
    port: int
    pid: int

    @property
    def is_local(self) -> bool:
        return ipaddress.ip_address(self.address).is_loopback

    def is_grpc(self) -> bool:
        """An HTTP/2 server says its settings first; others wait for a request."""
        with socket.create_connection((self._reached_at(), self.port), ANSWER_S_MAX) as stranger:
            stranger.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5))
            with contextlib.suppress(OSError):
                return stranger.recv(9)[3:4] == b"\x04"
        return False

    def web_answers(self) -> set[int]:
        """The statuses of what a stranger asks; empty if the server hangs up without an answer."""
        found = set()
        with httpx.Client(trust_env=False, timeout=ANSWER_S_MAX) as stranger:
            for path in PATHS:
                with contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError):
                    url = f"http://{self._reached_at()}:{self.port}{path}"
                    found.add(stranger.get(url).status_code)
        return found

    def grpc_answers(self) -> set[str]:
        """What calls without the token come to, those aside that this server does not offer."""
        with grpc.insecure_channel(f"{self._reached_at()}:{self.port}") as channel:
            return {_outcome(channel, method) for method in METHODS} - {"UNIMPLEMENTED"}

    def _reached_at(self) -> str:
        return self.address if self.is_local else "127.0.0.1"


def _outcome(channel: grpc.Channel, method: str) -> str:
    try:
        channel.unary_unary(f"/ray.rpc.{method}")(b"", timeout=ANSWER_S_MAX)
    except grpc.RpcError as error:
        return error.code().name
    return "OK"


def doors(pids: Iterable[int]) -> list[Door]:
    """The TCP sockets that these processes listen on."""
    owners = dict(_sockets(pids))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS and (pid := owners.get(fields[9])) is not None:
                address, _, port = fields[1].partition(":")
                found.append(Door(_address(address), int(port, 16), pid))
    return found


def paths(pids: Iterable[int]) -> list[str]:
    """The Unix sockets that these processes listen on; an abstract one begins with `@`."""
    owners = dict(_sockets(pids))
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return [
        fields[7]
        for fields in lines
        if int(fields[3], 16) & ACCEPTS and fields[6] in owners and len(fields) > 7
    ]


def _sockets(pids: Iterable[int]) -> Iterator[tuple[str, int]]:
    for pid in pids:
        with contextlib.suppress(OSError):  # a process that has just ended
            for number in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    kind, _, rest = str(number.readlink()).partition(":[")
                    if kind == "socket":
                        yield rest.rstrip("]"), pid


def _address(text: str) -> str:
    """As /proc writes it: words of 32 bits in the machine's own order."""
    words = struct.unpack(f">{len(text) // 8}I", bytes.fromhex(text))
    return str(ipaddress.ip_address(struct.pack(f"={len(words)}I", *words)))
