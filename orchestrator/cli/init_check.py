"""This machine before anything runs on it: writing the settings, and checking what is needed."""

import contextlib
import fcntl
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import redis
import typer
from rich.text import Text

from orchestrator.cli import tables
from orchestrator.cli.command import ERROR, Command, CommandError
from orchestrator.client import Client, NotRunning
from orchestrator.config import FILE_NAME, Config, ConfigError, template
from orchestrator.house import processes
from orchestrator.house.redis_server import RedisUnavailable, find_server, version
from orchestrator.places import Places
from orchestrator.wording import instead_of

GIB = 1 << 30
DISK_BYTES_MIN = 2 * GIB
MEMORY_BYTES_MIN = 2 * GIB
SHARED_BYTES_MIN = 256 << 20
IMPORT_S_MAX = 120.0
CLOCK_SLACK_S = 5.0


def init(command: Command) -> None:
    """Write a commented orchestrator.toml with every setting; never over one that is there."""
    path = command.given_path or Path(FILE_NAME)
    try:
        with path.open("x") as sink:
            sink.write(template())
    except FileExistsError:
        raise CommandError(
            f"{path} is there already and is left as it is; edit it, or give a new name: "
            "orchestrator init --config OTHER.toml"
        ) from None
    except OSError as error:
        raise CommandError(f"{path}: cannot be written: {error.strerror}") from None
    command.answer(
        {"path": str(path.absolute())},
        Text.assemble(("wrote ", "green"), str(path)),
        then=("orchestrator check", "orchestrator up"),
    )


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `orchestrator check`."""

    name: str
    ok: bool
    found: str
    remedy: str = ""


Check = Callable[[Config], Finding]


def check(command: Command) -> None:
    """Check that this machine has what is needed; what is missing is shown with its remedy."""
    findings = []
    with command.busy("checking"):
        settings, config = _settings(command)
        findings = [settings, *(one(config) for one in CHECKS)]
    made = tables.table("", "what", "found", "remedy")
    for one in findings:
        mark = Text("OK", style="green") if one.ok else Text("FAIL", style="bold red")
        made.add_row(mark, one.name, Text(one.found), Text(one.remedy))
    good = all(one.ok for one in findings)
    command.answer(
        {"ok": good, "checks": findings}, made, then=("orchestrator up",) if good else ()
    )
    if not good:
        raise typer.Exit(ERROR)


def _settings(command: Command) -> tuple[Finding, Config]:
    try:
        config = command.config
    except ConfigError as error:
        lines = str(error).splitlines()
        return Finding(
            name="settings", ok=False, found=lines[0],
            remedy="correct it; the other lines are for the default settings",
        ), Config()  # fmt: skip
    found = (
        str(command.config_path) if command.config_path else "no file: every setting is the default"
    )
    return Finding(name="settings", ok=True, found=found), config


def _python(_: Config) -> Finding:
    found = ".".join(str(part) for part in sys.version_info[:3])
    good = sys.version_info >= (3, 11)
    return Finding(name="python", ok=good, found=found, remedy="" if good else "use 3.11 or newer")


def _torch(_: Config) -> Finding:
    return _importable(
        "torch",
        "torch.__version__ + (' with ' + str(torch.cuda.device_count()) + ' GPUs' if torch.cuda.is_available() else ', cpu')",
    )


def _ray(_: Config) -> Finding:
    return _importable("ray", "ray.__version__")


def _importable(package: str, words: str) -> Finding:
    """Imported for real, in a process of its own: a broken install shows up here and not later."""
    program = f"import {package}; print({words})"
    try:
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=IMPORT_S_MAX, check=False
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Finding(
            name=package, ok=False, found=f"not imported after {IMPORT_S_MAX:.0f} s",
            remedy="is the disk slow or the memory full?",
        )  # fmt: skip
    if done.returncode == 0:
        return Finding(name=package, ok=True, found=done.stdout.strip())
    said = done.stderr.strip().splitlines()
    return Finding(
        name=package, ok=False, found=said[-1] if said else f"exit code {done.returncode}",
        remedy=f"{sys.executable} -m pip install --force-reinstall {package}",
    )  # fmt: skip


def _redis(config: Config) -> Finding:
    url = config.manager.redis_url
    try:
        if url is not None:
            redis.Redis.from_url(url, socket_timeout=5).ping()
            return Finding(name="redis", ok=True, found="manager.redis_url answers")
        server = find_server()
        found = ".".join(str(part) for part in version(server))
        return Finding(name="redis", ok=True, found=f"{found} at {server}")
    except (
        redis.RedisError,
        RedisUnavailable,
        OSError,
        ValueError,
        subprocess.SubprocessError,
    ) as error:
        remedy = "correct manager.redis_url" if url else "apt install redis-server"
        return Finding(name="redis", ok=False, found=str(error).splitlines()[0], remedy=remedy)


def _ray_port(config: Config) -> Finding:
    return _port(
        "ray port",
        config,
        config.ray.head_address,
        config.ray.port,
        ("ray.head_address", "ray.port"),
    )


def _dashboard_port(config: Config) -> Finding:
    board = config.dashboard
    if not board.enabled:
        return Finding(name="dashboard port", ok=True, found="the dashboard is off")
    return _port(
        "dashboard port", config, board.host, board.port, ("dashboard.host", "dashboard.port")
    )


def _port(name: str, config: Config, host: str, port: int, keys: tuple[str, str]) -> Finding:
    """Whether it can be listened on; our own running manager may hold it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.closing(socket.socket(family)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen()
        except OSError as error:
            if _runs(config):
                return Finding(name=name, ok=True, found=f"{host}:{port} is held by our manager")
            return Finding(
                name=name, ok=False, found=f"{host}:{port}: {error.strerror}",
                remedy=instead_of(error, *keys),
            )  # fmt: skip
    return Finding(name=name, ok=True, found=f"{host}:{port or 'any free one'}")


def _state_dir(config: Config) -> Finding:
    """Ours to write in, or to make."""
    place = config.state_dir
    there = next(folder for folder in (place, *place.absolute().parents) if folder.exists())
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        return Finding(name="state_dir", ok=True, found=str(place))
    return Finding(
        name="state_dir", ok=False, found=f"{there} cannot be written",
        remedy="set manager.state_dir to a folder of yours",
    )  # fmt: skip


def _disk(config: Config) -> Finding:
    place = config.state_dir.absolute()
    there = next(folder for folder in (place, *place.parents) if folder.exists())
    free = shutil.disk_usage(there).free
    return _enough("disk", free, DISK_BYTES_MIN, "free some, or move manager.state_dir")


def _storage(config: Config) -> Finding:
    """Written to for real, as copies will be, and left as it was."""
    url = config.storage.checkpoint_url
    if url is None:
        return Finding(name="storage", ok=True, found="off: nothing outlives this machine")
    from agent.errors import CheckpointError
    from agent.reliable.offsite import open_place

    key = f"check-{secrets.token_hex(8)}"
    try:
        sink = open_place(url)
        sink.put(key, [b"checked"])
        sink.delete([key])
    except (CheckpointError, OSError) as error:
        return Finding(
            name="storage", ok=False, found=str(error).splitlines()[0],
            remedy="correct storage.checkpoint_url, its keys in the environment, or what it leads to",
        )  # fmt: skip
    return Finding(name="storage", ok=True, found=url)


def _limits(_: Config) -> Finding:
    narrow = processes.narrow()
    return Finding(
        name="limits",
        ok=not narrow,
        found=narrow or "wide enough",
        remedy="ulimit -f unlimited" if narrow else "",
    )


def _memory(_: Config) -> Finding:
    with Path("/proc/meminfo").open() as lines:
        sizes = {line.partition(":")[0]: int(line.split()[1]) << 10 for line in lines}
    return _enough("memory", sizes["MemAvailable"], MEMORY_BYTES_MIN, "end other programs")


def _shared_memory(_: Config) -> Finding:
    free = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").exists() else 0  # noqa: S108 - Ray's place
    return _enough("shared memory", free, SHARED_BYTES_MIN, "in a container: --shm-size=1g")


def _enough(name: str, bytes_free: int, bytes_min: int, remedy: str) -> Finding:
    good = bytes_free >= bytes_min
    found = f"{bytes_free / GIB:.1f} GiB free"
    need = f"{bytes_min / GIB:.2g} GiB are needed: {remedy}"
    return Finding(name=name, ok=good, found=found, remedy="" if good else need)


def _cores(_: Config) -> Finding:
    count = len(os.sched_getaffinity(0))
    found = f"{count}" if count > 1 else "1: it works, slowly"
    return Finding(name="cores", ok=True, found=found)


def _clock(config: Config) -> Finding:
    """A clock behind what was written before would end deadlines late and read bills wrongly."""
    journal = Places(config.state_dir).redis_dir
    files = [Path(__file__), *(journal.rglob("*") if journal.exists() else ())]
    newest_s = max(file.stat().st_mtime for file in files if file.exists())
    behind_s = newest_s - time.time()
    if behind_s <= CLOCK_SLACK_S:
        return Finding(name="clock", ok=True, found=time.strftime("%F %T %Z"))
    return Finding(
        name="clock", ok=False, found=f"{behind_s:.0f} s behind the newest file",
        remedy="set the clock: timedatectl set-ntp true",
    )  # fmt: skip


def _leftovers(config: Config) -> Finding:
    places = Places(config.state_dir)
    if _runs(config):
        return Finding(name="manager", ok=True, found=f"running in {places.state_dir}")
    left = processes.marked(places.identity)
    if left and not _locked(places):
        found = f"ended, but {len(left)} of its processes are left"
        return Finding(name="manager", ok=False, found=found, remedy="orchestrator tools gc")
    return Finding(name="manager", ok=True, found="not running")


def _runs(config: Config) -> bool:
    try:
        Client.connect(config.state_dir)
    except NotRunning:
        return False
    return True


def _locked(places: Places) -> bool:
    """Whether a house holds the state directory, ready or not yet."""
    if not places.lock.exists():
        return False
    with places.lock.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


CHECKS: tuple[Check, ...] = (
    _python, _torch, _ray, _redis, _ray_port, _dashboard_port, _state_dir, _disk, _storage, _limits, _memory,
    _shared_memory, _cores, _clock, _leftovers,
)  # fmt: skip
