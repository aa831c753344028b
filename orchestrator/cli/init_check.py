"""The commands `init` and `check`: write the settings, and check what this machine needs."""

import contextlib
import fcntl
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import redis
import typer
from rich.text import Text

from cloud.findings import Finding, bad, good
from orchestrator import clouds
from orchestrator.cli import tables, watch
from orchestrator.cli.command import ERROR, Command, CommandError, refuse_options
from orchestrator.client import Client, NotRunning
from orchestrator.config import FILE_NAME, Config, ConfigError, template
from orchestrator.formatting import instead_of
from orchestrator.paths import Places, no_room
from orchestrator.supervisor import processes
from orchestrator.supervisor.redis_server import RedisUnavailable, find_server, version

GIB = 1 << 30
DISK_BYTES_MIN = 2 * GIB
MEMORY_BYTES_MIN = 2 * GIB
SHARED_BYTES_MIN = 256 << 20
IMPORT_S_MAX = 120.0
CLOCK_SLACK_S = 5.0


def init(  # noqa: PLR0913 - a parameter per option
    command: Command,
    cloud: Annotated[
        Literal["aws", "azure"] | None,
        typer.Option(help="Write the section of a real cloud, and say what to do there next."),
    ] = None,
    *,
    region: Annotated[str | None, typer.Option(help="With --cloud: where to buy.")] = None,
    types: Annotated[str | None, typer.Option(help='With --cloud: what to buy, as "g5.*".')] = None,
    bucket: Annotated[str | None, typer.Option(help="AWS: the bucket that keeps states.")] = None,
    subscription: Annotated[str | None, typer.Option(help="Azure: who pays, by its id.")] = None,
    image: Annotated[str | None, typer.Option(help="With --cloud: the image's id.")] = None,
    ssh_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Azure: a public key. Default: yours.")
    ] = None,
    outputs: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --cloud: the outputs of its applied template."),
    ] = None,
) -> None:
    """Write a commented orchestrator.toml with every setting; never over one that is there.

    With --cloud three questions are asked on a terminal, and the lines of that cloud are written,
    also into a file that is there; then the commands are named that make its parts.
    """
    path = command.given_path or Path(FILE_NAME)
    said = {
        "region": region,
        "types": types,
        "bucket": bucket,
        "subscription": subscription,
        "image": image,
        "ssh_key": ssh_key,
        "outputs": outputs,
    }
    if cloud is not None:
        _init_cloud(command, path, cloud, **said)
        return
    options = {f"--{name.replace('_', '-')}": value is not None for name, value in said.items()}
    refuse_options(options, "--cloud aws or --cloud azure")
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


def _init_cloud(command: Command, path: Path, cloud: str, **said: Any) -> None:
    from orchestrator.cli import init_cloud

    done = init_cloud.write(command, path, cloud, init_cloud.Said(**said))
    lines = [
        Text(f"  {section}.{key} = {value}", style="dim")
        for section, keys in done.settings.items()
        for key, value in keys.items()
    ]
    state = "is whole" if done.whole else "is not whole yet, and nothing is bought there"
    command.answer(
        done,
        Text.assemble(("wrote ", "green"), f"{path}: [{cloud}] {state}"),
        *lines,
        *(Text(f"set by hand: {one}", style="yellow") for one in done.lacking),
        then=done.then,
    )


Check = Callable[[Config], Finding]


def check(command: Command) -> None:
    """Check that this machine has what is needed, and show a remedy for what is missing."""
    findings = []
    with command.busy("checking"):
        settings, config = _settings(command)
        running = _runs(config)
        findings = [
            settings,
            *(one(config) for one in CHECKS),
            *clouds.examined(config, running=running),
        ]
    made = tables.table("", "what", "found", "remedy")
    for one in findings:
        mark = Text("OK", style="green") if one.ok else Text("FAIL", style="bold red")
        made.add_row(mark, one.name, Text(one.found), Text(one.remedy))
    all_good = all(one.ok for one in findings)
    then = (f"orchestrator {'status' if running else 'up'}",) if all_good else ()
    command.answer({"ok": all_good, "checks": findings}, made, then=then)
    if not all_good:
        raise typer.Exit(ERROR)


def _settings(command: Command) -> tuple[Finding, Config]:
    try:
        config = command.config
    except ConfigError as error:
        lines = str(error).splitlines()
        return bad(
            "settings", lines[0], "correct it; the other lines are for the default settings"
        ), Config()
    found = (
        str(command.config_path) if command.config_path else "no file: every setting is the default"
    )
    return good("settings", found), config


def _python(_: Config) -> Finding:
    found = ".".join(str(part) for part in sys.version_info[:3])
    new_enough = sys.version_info >= (3, 11)
    return Finding("python", new_enough, found, "" if new_enough else "use 3.11 or newer")


def _torch(_: Config) -> Finding:
    return _importable(
        "torch",
        "torch.__version__ + (' with ' + str(torch.cuda.device_count()) + ' GPUs' if torch.cuda.is_available() else ', cpu')",
    )


def _ray(_: Config) -> Finding:
    return _importable("ray", "ray.__version__")


def _importable(package: str, words: str) -> Finding:
    """Import a package in a separate process, so that a broken install shows up now."""
    program = f"import {package}; print({words})"
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", program],
            capture_output=True,
            text=True,
            timeout=IMPORT_S_MAX,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return bad(
            package,
            f"not imported after {IMPORT_S_MAX:.0f} s",
            "is the disk slow or the memory full?",
        )
    if done.returncode == 0:
        return good(package, done.stdout.strip())
    said = done.stderr.strip().splitlines()
    return bad(
        package,
        said[-1] if said else f"exit code {done.returncode}",
        f"{sys.executable} -m pip install --force-reinstall {package}",
    )


def _redis(config: Config) -> Finding:
    url = config.manager.redis_url
    try:
        if url is not None:
            redis.Redis.from_url(url, socket_timeout=5).ping()
            return good("redis", "manager.redis_url answers")
        server = find_server()
        found = ".".join(str(part) for part in version(server))
        return good("redis", f"{found} at {server}")
    except (
        redis.RedisError,
        RedisUnavailable,
        OSError,
        ValueError,
        subprocess.SubprocessError,
    ) as error:
        remedy = "correct manager.redis_url" if url else "apt install redis-server"
        return bad("redis", str(error).splitlines()[0], remedy)


def _ray_port(config: Config) -> Finding:
    ray = config.ray
    return _port("ray port", config, ray.head_address, ray.port, ("ray.head_address", "ray.port"))


def _dashboard_port(config: Config) -> Finding:
    board = config.dashboard
    if not board.enabled:
        return good("dashboard port", "the dashboard is off")
    return _port(
        "dashboard port", config, board.host, board.port, ("dashboard.host", "dashboard.port")
    )


def _port(name: str, config: Config, host: str, port: int, keys: tuple[str, str]) -> Finding:
    """Check whether the port can be listened on; our own running manager may hold it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.closing(socket.socket(family)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen()
        except OSError as error:
            if _runs(config):
                return good(name, f"{host}:{port} is held by our manager")
            return bad(name, f"{host}:{port}: {error.strerror}", instead_of(error, *keys))
    return good(name, f"{host}:{port or 'any free one'}")


def _state_dir(config: Config) -> Finding:
    """Check whether we can write in the state directory, or create it."""
    place, there = config.state_dir, _existing(config.state_dir)
    try:
        # Permissions alone say nothing of /proc, or to root.
        with tempfile.TemporaryFile(dir=there):
            return good("state_dir", str(place))
    except OSError as error:
        return bad(
            "state_dir",
            f"{there} cannot be written ({error.strerror})",
            "set manager.state_dir to a folder of yours",
        )


def _existing(place: Path) -> Path:
    """Return the place itself, or the closest folder above it that exists."""
    return next(folder for folder in (place, *place.absolute().parents) if folder.exists())


def _disk(config: Config) -> Finding:
    free = shutil.disk_usage(_existing(config.state_dir)).free
    return _enough("disk", free, DISK_BYTES_MIN, "free some, or move manager.state_dir")


def _storage(config: Config) -> Finding:
    """Check the storage by creating an object once, as manifests will be, and deleting it."""
    url = config.storage.checkpoint_url
    if url is None:
        return good("storage", "off: nothing outlives this machine")
    from agent.errors import CheckpointError
    from agent.store.places.objects import open_place

    key = f"check-{secrets.token_hex(8)}"
    try:
        sink = open_place(url)
        created = [sink.create(key, b"checked") for _ in range(2)]
        sink.delete([key])
    except (CheckpointError, OSError) as error:
        return bad(
            "storage",
            str(error).splitlines()[0],
            "correct storage.checkpoint_url, its keys or AWS_REGION in the environment, or what it leads to",
        )
    if created != [True, False]:
        return bad(
            "storage",
            f"{url} lets an object be written twice, so two managers could write one version",
            "use a store that knows If-None-Match, as S3, Azure and Google's do",
        )
    return good(
        "storage", url + _beside(Path(sink.name), config) if url.startswith("file:") else url
    )


def _beside(folder: Path, config: Config) -> str:
    """Say of a folder that it goes with the disk of the states, as one whose disk is not mounted."""
    disks = {_existing(place).stat().st_dev for place in (folder, config.state_dir)}
    return ": on the disk of manager.state_dir, and lost with it" if len(disks) == 1 else ""


def _limits(_: Config) -> Finding:
    narrow = processes.narrow()
    return bad("limits", narrow, "ulimit -f unlimited") if narrow else good("limits", "wide enough")


def _memory(_: Config) -> Finding:
    with Path("/proc/meminfo").open() as lines:
        sizes = {line.partition(":")[0]: int(line.split()[1]) << 10 for line in lines}
    return _enough("memory", sizes["MemAvailable"], MEMORY_BYTES_MIN, "end other programs")


def _shared_memory(config: Config) -> Finding:
    from agent.keeper.storage.memory_log import obstacle

    if because := obstacle(Places(config.state_dir).checkpoints):
        found, _, remedy = because.rpartition("; ")
        return bad("shared memory", found, remedy)
    free = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").exists() else 0  # noqa: S108 - Ray's place
    return _enough("shared memory", free, SHARED_BYTES_MIN, "in a container: --shm-size=1g")


def _enough(name: str, bytes_free: int, bytes_min: int, remedy: str) -> Finding:
    found = f"{bytes_free / GIB:.1f} GiB free"
    if bytes_free >= bytes_min:
        return good(name, found)
    return bad(name, found, f"{bytes_min / GIB:.2g} GiB are needed: {remedy}")


def _cores(_: Config) -> Finding:
    count = len(os.sched_getaffinity(0))
    return good("cores", f"{count}" if count > 1 else "1: it works, slowly")


def _clock(config: Config) -> Finding:
    """Check that the clock is not behind the newest file.

    With such a clock, deadlines would end late and bills would be wrong.
    """
    journal = Places(config.state_dir).redis_dir
    files = [Path(__file__), *(journal.rglob("*") if journal.exists() else ())]
    newest_s = max(file.stat().st_mtime for file in files if file.exists())
    behind_s = newest_s - time.time()
    if behind_s <= CLOCK_SLACK_S:
        return good("clock", time.strftime("%F %T %Z"))
    return bad(
        "clock",
        f"{behind_s:.0f} s behind the newest file",
        "set the clock: timedatectl set-ntp true",
    )


def _played(config: Config) -> Finding:
    """Check that there is a cloud, and that this machine does not sell itself beside real ones."""
    name, others = "local cloud", " and ".join(clouds.NAMES[each] for each in clouds.real(config))
    if not (config.local.enabled or others):
        return bad(
            name,
            "off, and no other cloud is on: nothing could be bought",
            "set local.enabled = true, or: orchestrator init --cloud aws",
        )
    if not config.local.enabled:
        return good(name, "off")
    if not others:
        return good(name, "on: this machine plays the cloud")
    return bad(
        name,
        f"on beside {others}, so jobs would train on this machine, too, at prices that nobody pays",
        "set local.enabled = false",
    )


def _leftovers(config: Config) -> Finding:
    places = Places(config.state_dir)
    with contextlib.suppress(NotRunning):
        return _answering(Client.connect(places.state_dir), places)
    left = processes.marked(places.identity)
    if left and not _locked(places):
        found = f"ended, but {len(left)} of its processes are left"
        return bad("manager", found, "orchestrator tools gc")
    return good("manager", "not running")


def _answering(client: Client, places: Places) -> Finding:
    """Check that a running manager can be asked, and has said something lately."""
    found = f"running in {places.state_dir}"
    log, silent = places.log("redis"), "its Redis does not answer"
    try:
        view = client.view()
        log, silent = places.log("house"), watch.age(view) if view is not None else ""
    except redis.RedisError:
        view = None
    if not silent:
        return good("manager", found)
    full = no_room(places.state_dir)
    return bad(
        "manager",
        f"{found}, but {watch.why_silent(view, places) or silent}",
        full
        or f"what hangs is started again after some minutes; see {log}; without waiting: orchestrator down --force, "
        "then: orchestrator up",
    )


def _runs(config: Config) -> bool:
    try:
        Client.connect(config.state_dir)
    except NotRunning:
        return False
    return True


def _locked(places: Places) -> bool:
    """Return whether a house holds the state directory, even one that is not ready yet."""
    if not places.lock.exists():
        return False
    with places.lock.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


CHECKS: tuple[Check, ...] = (
    _python,
    _torch,
    _ray,
    _redis,
    _ray_port,
    _dashboard_port,
    _state_dir,
    _disk,
    _storage,
    _limits,
    _memory,
    _shared_memory,
    _cores,
    _clock,
    _played,
    _leftovers,
)
