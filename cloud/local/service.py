"""The local cloud: the simulated cloud driven by the wall clock, with real processes.

Changes in the simulated cloud (the core) are carried out on processes: a machine that boots becomes
an init process with a metadata service on a separate address; an evicted one is killed with all its
descendants. The core in turn learns of processes: a machine whose init has ended has switched
itself off. The books are written before a launch is answered or an end is told, and at least every
few seconds. So a killed cloud misses at most a few seconds of its bill, and takes back nothing that
it has said.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from shutil import rmtree

from starlette.types import ASGIApp

from cloud import private
from cloud.clock import Clock
from cloud.http_server import Listener
from cloud.local import processes, short_path
from cloud.local.books import Ledger
from cloud.local.identity import Signer
from cloud.local.metadata import Fate, metadata_app
from cloud.log_bounds import bound_logs
from cloud.model import DEPLOYMENT_TAG, Machine, Notice, Recipe
from cloud.simulated import Booted, Change, Evicted, SimulatedCloud

DISKS_KEPT = 8  # of machines that are gone, to see why
DISKS_BYTES_MAX = 256 << 20  # that these may take together
CONSOLE_BYTES_MAX = 4 << 20
LOOK_S = 2.0  # between two looks at how large consoles are
LOGS = ("console.log", "session_*/logs/*")  # the second are Ray's, with what scripts write to fd 2
WAY_S = 1.0  # between two checks that the short path is still there
RECORD_S = 5.0
SHUTDOWN_S = 3.0
INSIST_S = 1.0  # no request is served meanwhile


def _say(line: str) -> None:
    """Print a line; a full disk loses it, but does not end the cloud."""
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)  # noqa: T201


def _bytes_on(disk: Path) -> int:
    """Return what the files on a machine's disk take."""
    found = 0
    for folder, _, names in os.walk(disk):
        for name in names:
            with suppress(OSError):
                found += os.lstat(Path(folder, name)).st_blocks * 512
    return found


class _Host:
    """The processes of one machine. `exited` is readable when its init has ended."""

    def __init__(self, listener: Listener, init: "subprocess.Popen[bytes]") -> None:
        self.listener = listener
        self.init = init
        self.exited = os.pidfd_open(init.pid)


class _Fate:
    """The answers to the metadata service of one machine."""

    def __init__(self, service: "LocalCloud", machine_id: str) -> None:
        self._service = service
        self._id = machine_id

    def machine(self) -> Machine:
        return self._service.core.machine(self._id)

    def notice(self) -> Notice | None:
        return self._service.core.notice(self._id)

    def hinted_at_s(self) -> float | None:
        return self._service.core.hinted_at_s(self._id)

    def acknowledge(self) -> None:
        self._service.core.revoke([self._id], self._service.clock.now_s(), 0.0)
        self._service.nudge()


class LocalCloud:
    """The cloud with its machines. After `stop` every process that it started has ended."""

    def __init__(
        self,
        core: SimulatedCloud,
        clock: Clock,
        ledger: Ledger,
        boot_script: Path,
        boot_env: Path | None,
    ) -> None:
        self.core = core
        self.clock = clock
        self._ledger = ledger
        self._recorded_s = 0.0
        self._recorded_ends = 0
        self._looked_s = 0.0
        self._unwritten = ""
        self._disks = self._ledger.path.parent.resolve() / "machines"
        self._disks.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._short = short_path.short_way(self._disks)
        self._keep_way()
        self._boot_script = boot_script
        boot = blake2b(boot_script.read_bytes(), digest_size=8).hexdigest()
        self.recipe = Recipe({"boot": boot})
        self._boot_env = boot_env
        self._signer = Signer(self._ledger.path.parent)
        self._hosts: dict[str, _Host] = {}
        self._changed = asyncio.Event()

    def nudge(self) -> None:
        """Wake `run` after a request, because the next change may now be due earlier."""
        self._changed.set()

    def _keep_way(self) -> None:
        if self._short != self._disks:
            short_path.keep(self._short, self._disks)

    async def run(self) -> None:
        """Carry out the core's changes when they are due, and write the books regularly."""
        while True:
            self._changed.clear()
            with suppress(OSError):  # the next round tries it again
                self._keep_way()
            await self._perform(self.core.advance(self.clock.now_s()))
            if self.clock.now_s() >= self._recorded_s + RECORD_S:
                self._record_or_say()
            self._bound_consoles()
            due_s = self.core.next_change_s()
            wait_s = WAY_S if due_s is None else min(WAY_S, due_s - self.clock.now_s())
            try:
                async with asyncio.timeout(max(0.0, wait_s)):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def stop(self) -> None:
        """Kill every machine and write the books."""
        await self._kill(self._hosts)
        self._record_or_say()
        if self._short != self._disks:
            short_path.remove(self._short, self._disks)

    def record(self) -> None:
        """Write the books. Raises OSError if the disk is full."""
        self._recorded_s, ends = self.clock.now_s(), self.core.ends
        self._ledger.write(self.core.market.start_s, self.core.books(self._recorded_s))
        self._unwritten, self._recorded_ends = "", ends

    def record_ends(self) -> None:
        """Write when machines ended before anyone is told, so that a restart says the same."""
        if self.core.ends != self._recorded_ends:
            self._record_or_say()

    def _record_or_say(self) -> None:
        """Write the books, or say once that they cannot be written; machines run on meanwhile."""
        try:
            self.record()
        except OSError as error:
            if not self._unwritten:
                self._unwritten = f"the books cannot be written: {error}; free some space"
                _say(self._unwritten)

    def end(self, machine_ids: Iterable[str]) -> None:
        """Press the power button of machines that the core has already ended."""
        self._record_or_say()
        for machine_id in machine_ids:
            if (host := self._hosts.get(machine_id)) is not None:
                host.init.send_signal(signal.SIGTERM)
                loop = asyncio.get_running_loop()
                loop.call_later(SHUTDOWN_S, self._insist, machine_id)

    def _insist(self, machine_id: str) -> None:
        """Kill a machine, and try again later if its processes do not end in time.

        A busy computer may take long to end them. The wait is short, so that all other machines are
        served.
        """
        if machine_id not in self._hosts:
            return
        try:
            processes.kill({self._mark(machine_id): self._hosts[machine_id].init.pid}, INSIST_S)
        except TimeoutError as error:
            _say(f"{machine_id}: {error}; it is killed again")
            asyncio.get_running_loop().call_later(SHUTDOWN_S, self._insist, machine_id)

    async def _perform(self, changes: list[Change]) -> None:
        for change in changes:
            if isinstance(change, Booted) and self._wanted(change.machine):
                try:
                    await self._start(change.machine)
                except (OSError, ValueError) as error:
                    _say(f"{change.machine.id} did not start: {error}")
                    self.core.revoke([change.machine.id], self.clock.now_s(), 0.0)
        evicted = [change.machine_id for change in changes if isinstance(change, Evicted)]
        try:
            await self._kill(evicted)
        except TimeoutError:
            for machine_id in evicted:
                self._insist(machine_id)

    def _wanted(self, machine: Machine) -> bool:
        return self.core.machine(machine.id).state == "running"

    async def _start(self, machine: Machine) -> None:
        listener = Listener(self._metadata(machine))
        await listener.listen(machine.address)
        disk = self._new_disk(machine.id)
        with (disk / "console.log").open("ab") as console:
            init = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "cloud.local.machine_init",
                    str(os.getpid()),
                    str(self._boot(machine, disk)),
                ],
                env={
                    **self._environment(machine, disk, listener.url),
                    processes.MARKER: self._mark(machine.id),
                },
                cwd=disk,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        host = self._hosts[machine.id] = _Host(listener, init)
        asyncio.get_running_loop().add_reader(host.exited, self._exited, machine.id)

    def _metadata(self, machine: Machine) -> ASGIApp:
        """Return the metadata service of a machine."""
        dialect = self.core.market.dialect(machine.pool.zone)

        def sign(nonce: str) -> str:
            return self._signer.sign(machine, nonce, self.clock.now_s())

        return metadata_app(dialect, self._fate(machine.id), self.clock, sign)

    def _mark(self, machine_id: str) -> str:
        return str(self._disks / machine_id)

    def _fate(self, machine_id: str) -> Fate:
        return _Fate(self, machine_id)

    def _boot(self, machine: Machine, disk: Path) -> Path:  # noqa: ARG002 - others have one each
        """Return what a machine runs first."""
        return self._boot_script

    def _environment(self, machine: Machine, disk: Path, metadata_url: str) -> dict[str, str]:
        """Return a new machine's environment: nothing from our process, then what it fetches."""
        slots = {kind.name: kind.slots for kind in self.core.market.catalogue.types}
        return {
            "PATH": os.defpath,
            "HOME": str(disk),
            "LANG": "C.UTF-8",
            **(private.environment(self._boot_env) if self._boot_env else {}),
            "SPOT_DEPLOYMENT": machine.tags.get(DEPLOYMENT_TAG, ""),
            "SPOT_ADDRESS": machine.address,
            "SPOT_SLOTS": str(slots[machine.pool.type]),
            "SPOT_METADATA_URL": metadata_url,
            "SPOT_TEMP_DIR": str(self._short / machine.id),
        }

    def _bound_consoles(self) -> None:
        """Keep what machines print in bounds, because a script may print without end."""
        if (now_s := time.monotonic()) < self._looked_s + LOOK_S:
            return
        self._looked_s = now_s
        for machine_id in self._hosts:
            for pattern in LOGS:
                bound_logs((self._disks / machine_id).glob(pattern), CONSOLE_BYTES_MAX)

    def _new_disk(self, machine_id: str) -> Path:
        """Make a directory for the machine; remove the oldest ones of machines that are gone."""
        unused = [disk for disk in self._disks.iterdir() if disk.name not in self._hosts]
        unused.sort(key=lambda disk: disk.stat().st_mtime, reverse=True)
        bytes_left = DISKS_BYTES_MAX
        for number, disk in enumerate(unused):
            bytes_left -= _bytes_on(disk)
            if number >= DISKS_KEPT or bytes_left < 0:
                rmtree(disk, ignore_errors=True)
        disk = self._disks / machine_id
        disk.mkdir(mode=0o700, exist_ok=True)
        return disk

    def _exited(self, machine_id: str) -> None:
        """End what is left of a machine whose init has ended, and report it to the core."""
        host = self._hosts.pop(machine_id)
        asyncio.get_running_loop().remove_reader(host.exited)
        os.close(host.exited)
        host.listener.close()
        host.init.wait()
        processes.kill({self._mark(machine_id): host.init.pid})
        machine = self.core.machine(machine_id)
        if machine.state != "terminated":
            own = machine.tags.get(DEPLOYMENT_TAG, "")
            self.core.terminate([machine_id], self.clock.now_s(), own)
            self.nudge()

    async def _kill(self, machine_ids: Iterable[str]) -> None:
        inits = {
            self._mark(machine_id): self._hosts[machine_id].init.pid
            for machine_id in machine_ids
            if machine_id in self._hosts
        }
        if inits:
            await asyncio.to_thread(processes.kill, inits)
