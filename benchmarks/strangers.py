"""Do strangers without a token slow down training, hinder recovery, or take memory and disk?

    python benchmarks/strangers.py [--seconds 60] [--all-doors]

A house trains a script on machines of the local cloud. Meanwhile another user (nobody, if this is started by root) holds
1,100 idle connections to each of its ports, then 1,100 that send a byte now and then, and opens new ones again as soon as
they are closed; then it announces payloads of 64 GiB, sends noise, and plays a caller's proof that was made for another
challenge. Each is compared with the undisturbed house just before it: steps per second (0.9 of it at least), the time from SIGKILL of
all workers to the next committed step (twice as long at most), memory of keeper and house (50 MB more at most) and logs
(1 MB more at most). Ray's own ports are left out unless `--all-doors` is given.
"""

import argparse
import contextlib
import os
import selectors
import signal
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import NamedTuple

from _memory import resident_bytes

from agent.keys import commit_key
from agent.net.frames import Tags
from agent.net.handshake import encode
from agent.protocol import Proof
from cloud.local.processes import living
from cloud.open_files import raise_limit

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "faults"), str(ROOT / "tests")]

from houses import RunningHouse, command_line, until  # noqa: E402
from sockets import Door, doors  # noqa: E402

MANY = 1100
NOBODY = 65534
OPENED_PER_TURN = 200
TURN_S = 0.5
LOUD_PER_TURN = 10
KINDS = ("idle", "slow", "64 GiB", "noise", "replay")
PATIENCE_S = 120.0


# --- the stranger, in a process for each port -----------------------------------------------------


def bother(kind: str, address: str, port: int) -> None:
    """Bother one port until this process is ended."""
    raise_limit()
    if kind in {"idle", "slow"}:
        hold(address, port, slow=kind == "slow")
    while True:
        for _ in range(LOUD_PER_TURN):
            with (
                contextlib.suppress(OSError),
                socket.create_connection((address, port), 1) as loud,
            ):
                loud.sendall(said(kind))
        time.sleep(TURN_S)


def started(kind: str, address: str, port: int) -> int:
    """A process of another user that bothers this port."""
    "".encode("idna")  # loads what a first connection needs: the other user may not read it
    pid = os.fork()  # no new program, for the same reason
    if not pid:
        try:
            if os.getuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            bother(kind, address, port)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return pid


def said(kind: str) -> bytes:
    proof = encode(Proof(job="job", nonce=os.urandom(16), mac=os.urandom(32)))
    if kind == "noise":
        return os.urandom(1 << 12)
    if kind == "replay":
        return Tags().frame(proof)
    return (100).to_bytes(4, "little") + (1 << 36).to_bytes(8, "little") + bytes(1 << 16)


def hold(address: str, port: int, *, slow: bool) -> None:
    """Hold many connections, and open new ones for those that are closed."""
    selector, held = selectors.DefaultSelector(), set[socket.socket]()
    while True:
        for _ in range(min(OPENED_PER_TURN, MANY - len(held))):
            with contextlib.suppress(OSError):
                sock = socket.create_connection((address, port), 1)
                sock.setblocking(False)
                held.add(sock)
                selector.register(sock, selectors.EVENT_READ)
        for key, _ in selector.select(TURN_S):
            if not _still_open(key.fileobj):
                selector.unregister(key.fileobj)
                held.discard(key.fileobj)
                key.fileobj.close()
        for sock in held if slow else ():
            with contextlib.suppress(OSError):
                sock.send(b"\x01")
        time.sleep(TURN_S)


def _still_open(sock: socket.socket) -> bool:
    try:
        return bool(sock.recv(1 << 12))
    except BlockingIOError:
        return True
    except OSError:
        return False


# --- the house ------------------------------------------------------------------------------------


class Measured(NamedTuple):
    steps_per_s: float
    recovery_s: float
    keeper_bytes: int
    house_bytes: int
    log_bytes: int


def kind_of(door: Door) -> str:
    words = command_line(door.pid)
    names = {"cloud.local": "cloud", "orchestrator.supervisor": "house", "dashboard": "dashboard"}
    if door.is_local and words.startswith("ray::KeeperActor"):
        return "keeper"
    if door.is_local and "agent.machine.fork_server" in words:
        return "worker"
    return next((name for part, name in names.items() if part in words), "ray")


def doors_of(house: RunningHouse) -> list[Door]:
    return doors(living({"none": house.process.pid}) | {house.process.pid})


def log_bytes(house: RunningHouse) -> int:
    found = 0
    for path in house.folder.rglob("*"):
        with contextlib.suppress(OSError):
            if path.suffix in {".log", ".out", ".err"} and not path.is_symlink():
                found += path.stat().st_size
    return found


def step(house: RunningHouse) -> int:
    return int(house.store().hget(commit_key("job"), "step") or 0)


def workers(house: RunningHouse) -> set[int]:
    """Processes that listen for other workers; those that wait for an order do not."""
    found = {door.pid for door in doors_of(house) if kind_of(door) == "worker"}
    assert found, "no worker is found, so none could be killed"
    return found


def recovery_s(house: RunningHouse) -> float:
    """Kill all workers, and wait for the next commit."""
    for pid in workers(house):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    begun_s, before = time.monotonic(), step(house)
    until("a step after the kill", lambda: step(house) > before, PATIENCE_S)
    return time.monotonic() - begun_s


def measured(house: RunningHouse, seconds: float) -> Measured:
    keeper = next(door.pid for door in doors_of(house) if kind_of(door) == "keeper")
    first, begun_s, before = step(house), time.monotonic(), log_bytes(house)
    time.sleep(seconds)
    rate = (step(house) - first) / (time.monotonic() - begun_s)
    recovered_s = recovery_s(house)
    sizes = resident_bytes(keeper), resident_bytes(house.process.pid)
    return Measured(rate, recovered_s, *sizes, log_bytes(house) - before)


def disturbed(house: RunningHouse, kind: str, seconds: float, every: bool) -> Measured:
    found = {
        (door.address, door.port) for door in doors_of(house) if every or kind_of(door) != "ray"
    }
    strangers = [
        started(kind, address.replace("0.0.0.0", "127.0.0.1"), port) for address, port in found
    ]
    begun_s, took_s = time.monotonic(), 0.0
    try:
        time.sleep(5.0)  # until each has opened its connections
        return measured(house, seconds)
    finally:
        for pid in strangers:
            os.kill(pid, signal.SIGKILL)
            _, status, used = os.wait4(pid, 0)
            took_s += used.ru_utime + used.ru_stime
            assert os.WIFSIGNALED(status), "a stranger ended by itself, so nothing was disturbed"
        share = took_s / (time.monotonic() - begun_s)
        print(f"        the strangers themselves take {share:.2f} of a core of this machine")


def show(kind: str, calm: Measured, found: Measured) -> None:
    print(
        f"{kind:6} {found.steps_per_s:6.1f} steps/s ({found.steps_per_s / calm.steps_per_s:.2f}), recovery "
        f"{found.recovery_s:5.1f} s ({found.recovery_s / calm.recovery_s:.2f}), keeper "
        f"{(found.keeper_bytes - calm.keeper_bytes) / 1e6:+.1f} MB, house "
        f"{(found.house_bytes - calm.house_bytes) / 1e6:+.1f} MB, logs {found.log_bytes / 1e6:+.2f} MB "
        f"(undisturbed {calm.log_bytes / 1e6:+.2f})",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="for each kind of strangers")
    parser.add_argument("--all-doors", action="store_true", help="those of Ray as well")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="strangers-") as name:
        house = RunningHouse(Path(name))
        try:
            house.start()
            script = (ROOT / "tests" / "faults" / "killable.py").read_text()
            house.submit(script, argv=("1000000", "0.01", f"{name}/out"), slots_max=2)
            house.reached(20)
            recovery_s(house)  # whatever is done once is over
            for kind in KINDS:
                calm = measured(house, options.seconds)
                show(kind, calm, disturbed(house, kind, options.seconds, options.all_doors))
        finally:
            house.close()


if __name__ == "__main__":
    main()
