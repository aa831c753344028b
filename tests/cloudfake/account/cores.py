"""The two fake accounts as the local cloud's machinery knows a cloud: what boots, what goes.

`LocalCloud` runs process groups for whatever its core says. These cores say it of the machines that
the doors sell: one that has come to run is booted, one that was ended or taken is killed, and one
whose processes have ended has shut itself down, with what each cloud makes of that.
"""

import base64
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from threading import RLock
from typing import Any, NamedTuple

from cloudfake.arm import SUBSCRIPTION, ArmDoor, Vm, vm_resource
from cloudfake.arm_catalogue import SIZES
from cloudfake.books import Books
from cloudfake.ec2 import Ec2Door
from cloudfake.ec2_account import Instance
from cloudfake.papers import AwsPapers, AzurePapers

from cloud.clock import CLOCK
from cloud.model import DEPLOYMENT_TAG, Machine, MachineState, Notice, Pool
from cloud.simulated import Booted, Change, Evicted

LOOK_S = 0.2


class Host(NamedTuple):
    """What a machine needs to be run: itself, its first-boot script, and its size."""

    machine: Machine
    user_data: str
    slots: int


class Core(ABC):
    """Machines of a door, by their ids; `lock` is the door's."""

    dialect = ""

    def __init__(self, lock: RLock, network: str) -> None:
        self._lock = lock
        self._network = network
        self._addresses: dict[str, str] = {}
        self._booted: dict[str, Host] = {}
        self._gone: set[str] = set()

    def advance(self, at_s: float) -> list[Change]:
        """Let the account's time pass; return which machines boot and which are gone."""
        with self._lock:
            self._pass(at_s)
            hosts = {host.machine.id: host for host in self._running()}
            new = [host for name, host in hosts.items() if name not in self._booted]
            gone = [name for name in self._booted if name not in hosts and name not in self._gone]
            self._booted |= {host.machine.id: host for host in new}
            self._gone.update(gone)
        changes: list[Change] = [Booted(machine=host.machine, at_s=at_s) for host in new]
        return changes + [Evicted(machine_id=name, at_s=at_s) for name in gone]

    def next_change_s(self) -> float:
        """Return when the account is to be looked at again, because a door tells nobody of a sale."""
        return CLOCK.now_s() + LOOK_S

    def host(self, machine_id: str) -> Host:
        return self._booted[machine_id]

    def machine(self, machine_id: str) -> Machine:
        """Return the machine, as terminated if it does not run any more."""
        machine = self._booted[machine_id].machine
        if machine_id not in self._gone:
            return machine
        return _ended(machine)

    def notice(self, machine_id: str) -> Notice | None:
        with self._lock:
            deadline_s = self._deadline_s(machine_id)
        if deadline_s is None:
            return None
        return Notice(machine_id=machine_id, kind="terminate", deadline_s=deadline_s)

    def hinted_at_s(self, machine_id: str) -> float | None:
        return None

    def terminate(self, machine_ids: Iterable[str], at_s: float, own: str) -> None:
        """Power machines off from inside; what that costs is the cloud's affair."""
        with self._lock:
            for name in machine_ids:
                self._shut_down(name, at_s)
                self._gone.add(name)

    def revoke(self, machine_ids: Iterable[str], at_s: float, warning_s: float) -> None:
        with self._lock:
            for name in machine_ids:
                self._take(name, at_s, warning_s)

    def spot(self, deployment: str) -> list[str]:
        """Return the running spot machines of a deployment that stay for now, oldest first."""
        with self._lock:
            found = [host.machine for host in self._running()]
        return [
            x.id
            for x in sorted(found, key=lambda x: x.launched_at_s)
            if x.market == "spot"
            and x.tags.get(DEPLOYMENT_TAG) == deployment
            and self.notice(x.id) is None
        ]

    def address(self, machine_id: str) -> str:
        """Return a loopback address that no other machine has."""
        nth = len(self._addresses) + 1
        return self._addresses.setdefault(
            machine_id, f"{self._network}.{nth // 250 % 250 + 1}.{nth % 250 + 2}"
        )

    @property
    @abstractmethod
    def books(self) -> Books: ...

    @abstractmethod
    def papers(self, machine_id: str, path: str, nonce: str, at_s: float) -> Any:
        """Return the identity document at a path of the machine's metadata, or None."""

    @abstractmethod
    def _pass(self, at_s: float) -> None: ...

    @abstractmethod
    def _running(self) -> Iterator[Host]: ...

    @abstractmethod
    def _deadline_s(self, machine_id: str) -> float | None: ...

    @abstractmethod
    def _shut_down(self, machine_id: str, at_s: float) -> None: ...

    @abstractmethod
    def _take(self, machine_id: str, at_s: float, warning_s: float) -> None: ...


class Ec2Core(Core):
    """The instances of a fake EC2."""

    dialect = "ec2"

    def __init__(self, door: Ec2Door, network: str) -> None:
        super().__init__(door.lock, network)
        self._account = door.account
        self._account.address_of = lambda x: self.address(x.id)
        self._papers = AwsPapers()
        self.certificates = [self._papers.certificate]

    @property
    def books(self) -> Books:
        return self._account.books

    def papers(self, machine_id: str, path: str, nonce: str, at_s: float) -> Any:
        machine = self._booted[machine_id].machine
        document = self._papers.document(machine_id, machine.pool.region, machine.address)
        return {"document": document, "rsa2048": self._papers.rsa2048(document)}.get(path)

    def _pass(self, at_s: float) -> None:
        self._account.advance(at_s)

    def _running(self) -> Iterator[Host]:
        for x in list(self._account.instances.values()):
            if x.state == "running":
                yield Host(self._machine(x), self._script(x), self._account.kinds[x.type].gpus or 1)

    def _machine(self, x: Instance) -> Machine:
        return Machine(
            id=x.id,
            token=x.token,
            pool=Pool("aws", x.region, x.zone, x.type),
            market="spot" if x.market == "spot" else "on_demand",
            state="running",
            launched_at_s=x.launched_s,
            tags={name: value for _, name, value in x.tags},
            address=x.address,
        )

    @staticmethod
    def _script(x: Instance) -> str:
        return base64.b64decode(x.request.get("UserData", "")).decode()

    def _deadline_s(self, machine_id: str) -> float | None:
        x = self._account.instances.get(machine_id)
        return None if x is None else x.notice_deadline_s

    def _shut_down(self, machine_id: str, at_s: float) -> None:
        x = self._account.instances.get(machine_id)
        if x is not None and not x.done:
            self._account.shut_down(machine_id, at_s)

    def _take(self, machine_id: str, at_s: float, warning_s: float) -> None:
        self._account.interrupt(machine_id, at_s, warning_s)


class ArmCore(Core):
    """The virtual machines of a fake Azure, by their names."""

    dialect = "azure"

    def __init__(self, door: ArmDoor, network: str) -> None:
        super().__init__(door.lock, network)
        self._door = door
        self._papers = AzurePapers()
        self._lines: dict[str, str] = {}
        self.certificates = [self._papers.root]

    @property
    def books(self) -> Books:
        return self._door.books

    def papers(self, machine_id: str, path: str, nonce: str, at_s: float) -> Any:
        if path != "attested/document":
            return None
        return self._papers.attested(self.vm_id(machine_id), nonce, at_s, SUBSCRIPTION)

    def vm_id(self, machine_id: str) -> str:
        return self._lines[machine_id]

    def compute(self, machine_id: str) -> dict[str, Any]:
        """Return what a machine's metadata says of itself."""
        machine = self._booted[machine_id].machine
        return {
            "name": machine_id,
            "vmId": self.vm_id(machine_id),
            "vmSize": machine.pool.type,
            "location": machine.pool.region,
            "zone": machine.pool.zone,
            "resourceId": vm_resource(machine_id),
            "subscriptionId": SUBSCRIPTION,
        }

    def token_of(self, machine_id: str) -> dict[str, str] | None:
        with self._lock:
            return self._door.machine_token(machine_id)

    def manager_token(self) -> dict[str, str]:
        """Return what the metadata service of the manager's machine gives."""
        with self._lock:
            return self._door.bearer()

    def _pass(self, at_s: float) -> None:
        self._door.work_off(at_s)

    def _running(self) -> Iterator[Host]:
        for vm in list(self._door.vms.values()):
            if vm.state in ("Succeeded", "Updating") and vm.power == "running":
                self._lines[vm.name] = vm.line
                yield Host(self._machine(vm), self._script(vm), SIZES[vm.size].gpus or 1)

    def _machine(self, vm: Vm) -> Machine:
        zones: Sequence[str] = vm.body.get("zones") or ()
        zone = f"{vm.region}-{zones[0]}" if zones else vm.region
        return Machine(
            id=vm.name,
            token=vm.name,
            pool=Pool("azure", vm.region, zone, vm.size),
            market="spot" if vm.spot else "on_demand",
            state="running",
            launched_at_s=vm.born_s,
            tags=vm.tags,
            address=self.address(vm.name),
        )

    @staticmethod
    def _script(vm: Vm) -> str:
        return base64.b64decode(vm.body["properties"].get("userData", "")).decode()

    def _deadline_s(self, machine_id: str) -> float | None:
        vm = self._door.vms.get(machine_id.lower())
        return None if vm is None else vm.notice_deadline_s

    def _shut_down(self, machine_id: str, at_s: float) -> None:
        if machine_id.lower() in self._door.vms:
            self._door.shut_down(machine_id)

    def _take(self, machine_id: str, at_s: float, warning_s: float) -> None:
        if machine_id.lower() in self._door.vms:
            self._door.evict(machine_id, warning_s)


def _ended(machine: Machine) -> Machine:
    from msgspec.structs import replace

    state: MachineState = "terminated"
    return replace(machine, state=state)
