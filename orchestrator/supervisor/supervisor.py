"""The house: the one process on the manager's machine that owns all the others.

It starts Redis, the Ray head, the join door, the local cloud, the manager with its keeper, and the
dashboard. It restarts a part that dies, and ends all of them when it ends. It holds no state of the
product, so it may be killed at any moment: the next house sweeps up what the last one left.

    python -m orchestrator.supervisor --config orchestrator.toml [--give-back]
"""

import argparse
import contextlib
import fcntl
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from agent.boot.node import EARLY
from agent.keeper.storage.memory_log import kept, obstacle, root_of
from agent.keys import EVENTS
from cloud import private
from cloud.clock import CLOCK, ZERO_VARIABLE
from cloud.http_server import bound, url_of
from cloud.local.processes import MARKER
from cloud.log_bounds import bound_logs
from cloud.open_files import raise_limit
from orchestrator.client import House as HouseFile
from orchestrator.client import post
from orchestrator.clouds import enabled, real, region_of_buckets
from orchestrator.clouds import obstacle as cloud_obstacle
from orchestrator.config import URL_PASSWORD, Config, frozen, in_force, load
from orchestrator.dashboard.keys import Keys
from orchestrator.door import certificate
from orchestrator.door.address import DoorFile, first_boot_of, publish_door, read_door
from orchestrator.door.order import VARIABLE, DoorOrder
from orchestrator.errors import OrchestratorError
from orchestrator.events import ShutdownAsked
from orchestrator.formatting import instead_of
from orchestrator.history.order import VARIABLE as HISTORY_VARIABLE
from orchestrator.history.order import HistoryOrder
from orchestrator.live.order import Order
from orchestrator.paths import (
    BACK_S,
    FULL,
    TAKES_NOTHING,
    UP_AGAIN,
    Places,
    StateDirError,
    dangling_links,
    no_room,
)
from orchestrator.redis_client import connect
from orchestrator.supervisor import processes
from orchestrator.supervisor.ray_head import HeadOrder
from orchestrator.supervisor.redis_server import RedisServer, RedisUnavailable
from orchestrator.supervisor.watchdog import LOOK_S, LOOKS_MAX, Pulse
from orchestrator.view import Sentence

STARTUP_S_MAX = 120.0
OTHER_S_MAX = 3.0  # for the door of the house that a folder was copied from
WATCH_S = 0.2
LOGS_S = 2.0  # between two looks at how large they are
PACED = {"dashboard", "door", "history"}  # the house goes on without them, so they never end it
PACE_S = 5.0  # at least, between two starts of one of these
RESTARTS_MAX = 20
RESTART_WINDOW_S = 60.0
OBJECT_STORE_BYTES = 100_000_000
PORTS = range(10_000, 32_768)
PORTS_TRIED = 100
SESSIONS_KEPT = 3  # directories with Ray's own logs
# Ray serves its metrics on all interfaces and does not ask for the token, so they are off. The
# metrics of Ray's dashboard have no switch, but an invalid port keeps their server from starting.
NO_METRICS = {"RAY_enable_metrics_collection": "0", "DASHBOARD_METRIC_PORT": "-1"}


class HouseError(OrchestratorError):
    """The house cannot be started or kept running; the message says what to do about it."""


class ToldToEnd(HouseError):  # noqa: N818 - it names what happened
    """The house received a signal to end before it was ready; it ends what it has started."""


class Killed(HouseError):  # noqa: N818 - it names what happened
    """A part was killed while it started, which does not tell against its settings."""


class House:
    """Starts all parts, restarts those that die, and ends them."""

    def __init__(
        self, config: Config, config_path: Path | None, *, give_back: bool = False
    ) -> None:
        self.config = config
        self.places = Places(config.state_dir)
        # For managers that start later in this life too: the file may be half edited then.
        self._settings = frozen(config, config_path)
        self._give_back = give_back
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._restarts: list[float] = []
        self._told = ""
        self._warnings: list[str] = []  # what a person should see in the events, too
        self._redis: RedisServer | None = None
        self._page: socket.socket | None = None  # its port, which outlives its process
        self._started_s: dict[str, float] = {}  # of those that are paced
        self._door: socket.socket | None = None  # the join door's port, for the house's life
        self._pulse: Pulse | None = None
        self._felt_s = 0.0
        self._bounded_s = 0.0
        self._stopping = False
        self._lock: os.stat_result | None = None  # of the file by which the directory is ours
        self._whole_s = 0.0  # when nothing was lacking last
        self._kept: dict[Path, bytes] = {}  # files that are brought back if somebody removes them
        self._life = secrets.token_hex(8)
        self._env: dict[str, str] = {}
        self._ray_address = ""

    @property
    def redis_url(self) -> str:
        return self.config.manager.redis_url or f"unix://{self.places.redis_socket}"

    def start(self) -> None:
        """Start all parts, each after the parts it needs, and return when they are ready."""
        self._lock = self.places.lock.stat()
        if not self._give_back:  # what is held is given back whatever could be bought
            self._look_at_clouds()
        for line in self.places.secure():
            _say(line)
        self._look_at_memory()
        for told in (self.places.given_back, self.places.superseded, self.places.broke_off):
            told.unlink(missing_ok=True)  # written by the manager of an earlier house
        processes.sweep(self.places.identity)
        self._refuse_if_copied()
        self._clear_up()
        self._env = self._environment()
        self._begin_head()
        self._start_redis()
        self._choose_addresses()
        self._open_door()
        self._start_door()
        self._start_history()
        self._start_cloud()
        self._start_manager()
        if self.config.dashboard.enabled:
            self._open_page()
        self._announce()

    def watch(self) -> None:
        """Restart parts that die, until the house is asked to end."""
        with contextlib.suppress(ToldToEnd):
            while not (self._stopping or self.places.given_back.exists()):
                time.sleep(WATCH_S)
                self._end_if_moved()
                with contextlib.suppress(StateDirError, OSError):  # the next round tries again
                    self.places.make_way()
                    self._put_right()
                self._end_if_superseded()
                self._revive()
                self._replace_stuck()
                self._bound_logs()

    def _keep(self, *files: Path) -> None:
        """Note what these files hold now: the parts that start later in this life need them."""
        self._kept |= {file: file.read_bytes() for file in files}

    def _put_right(self) -> None:
        """Bring back what somebody else removed or changed, if it is not the whole folder that goes.

        Without our note nobody could ask or end us, and without a secret no next manager can begin.
        """
        server, now_s = self._redis, time.monotonic()
        lacking = [f for f, content in self._kept.items() if not _holds(f, content)]
        harmed = server is not None and server.is_harmed()
        deaf = server is not None and server.alive() and not self.places.redis_socket.exists()
        if not (lacking or harmed or deaf):
            self._whole_s = now_s
        elif now_s > self._whole_s + BACK_S:
            for file in lacking:
                private.write(file, self._kept[file])
            if server is not None and harmed:
                server.rewrite()
            elif server is not None and deaf:
                server.stop()  # and it is started again

    def _revive(self) -> None:
        """Restart the parts that have ended, as soon as the disk has room.

        On a full disk Redis dies at its next write, and so would a part that is restarted then.
        """
        redis_ended = self._redis_ended()
        ended = [
            name
            for name, process in self._children.items()
            if name != "dashboard" and process.poll() is not None and self._may_start(name)
        ]
        if self._page_is_asked_for():
            ended.append("dashboard")
        if not (redis_ended or ended) or self._waits_for_room():
            return
        self._revive_redis()
        for name in ended:
            if name not in PACED:
                self._count_restart(name)
            elif name != "dashboard":
                what = "the join door" if name == "door" else "the process that keeps the history"
                _say(f"{what} ended and is started again; see {self.places.log(name)}")
            self._restart(name)

    def _revive_redis(self) -> None:
        if self._redis is not None and self._redis_ended():
            self._count_restart("Redis")
            _say(self._redis.start())

    def _page_is_asked_for(self) -> bool:
        """Return whether a browser waits for the page, and no process serves it.

        A page that nobody looks at takes no process.
        """
        page = self._children.get("dashboard")
        if self._page is None or (page is not None and page.poll() is None):
            return False
        return self._may_start("dashboard") and bool(select.select([self._page], [], [], 0)[0])

    def _may_start(self, name: str) -> bool:
        """Return whether it is not too soon to start a part again."""
        return time.monotonic() >= self._started_s.get(name, float("-inf")) + PACE_S

    def _redis_ended(self) -> bool:
        return self._redis is not None and not self._redis.alive()

    def _replace_stuck(self) -> None:
        """Kill what hangs: an actor, which Ray takes for alive, or our Redis."""
        if self._pulse is None or time.monotonic() < self._felt_s + LOOK_S:
            return
        self._felt_s = time.monotonic()
        for name in self._pulse.look():
            _say(f"{name} hung, and was killed: Ray starts the next one")
        if self._redis is not None and self._pulse.unanswered >= LOOKS_MAX:
            self._pulse.unanswered = 0
            self._redis.kill()
            _say("Redis hung, and was killed: it is started again")

    def _bound_logs(self) -> None:
        if time.monotonic() >= self._bounded_s + LOGS_S:
            self._bounded_s = time.monotonic()
            bound_logs((self.places.state_dir / "logs").glob("*.log"))
            bound_logs(self.places.ray_dir.glob("session_*/logs/*"))

    def _waits_for_room(self) -> bool:
        full = no_room(self.places.state_dir)
        if full != self._told:
            self._told = full
            _say(full or "there is room again")
        return bool(full)

    def ask_to_stop(self, *_: object) -> None:
        self._stopping = True

    def stop(self) -> None:
        """End all parts, each before the parts it uses.

        Ray is slow to end and holds nothing that is not in Redis or on the disk, so its init
        kills it. The sweep alone would not do: Ray writes process titles over our mark, and a
        process without the mark is not swept up. Where the directory is not ours any more, the
        mark, the files and the links are those of the next house that begins there.
        """
        if self._is_ours():
            self.places.house.unlink(missing_ok=True)
        for name in ("dashboard", "door", "history"):
            if (served := self._children.pop(name, None)) is not None:
                processes.end(served)
        for listening in filter(None, (self._page, self._door)):
            listening.close()
        if (cloud := self._children.pop("cloud", None)) is not None:
            processes.end(cloud)
        if (ray := self._children.pop("ray", None)) is not None:
            processes.end(ray, word=signal.SIGHUP)
        if self._redis is not None:
            self._redis.stop()
        if not self._is_ours():
            return
        self.places.secret("head").unlink(missing_ok=True)  # it is left if the start broke off
        processes.sweep(self.places.identity, grace_s=0)
        if self.places.given_back.exists():
            root = root_of(self.places.checkpoints)
            if not kept(root):  # every job is on the disk
                shutil.rmtree(root, ignore_errors=True)
        self.places.remove_links()

    def _clear_up(self) -> None:
        """Remove what earlier houses left, so that it does not accumulate."""
        for link in dangling_links():
            link.unlink(missing_ok=True)
        for session in sorted(self.places.ray_dir.glob("session_2*"))[:-SESSIONS_KEPT]:
            shutil.rmtree(session, ignore_errors=True)

    # --- the parts --------------------------------------------------------------------------

    def _environment(self) -> dict[str, str]:
        """Return the environment of every child.

        It has our mark, our interpreter first on the path, and the Ray token.
        """
        token = self.places.secret("ray")
        for secret in (token, self.places.secret("mesh")):
            private.made_secret(secret)
            self._keep(secret)
        env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        return env | {
            processes.MARK: self.places.identity,
            ZERO_VARIABLE: repr(CLOCK.zero_s),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_USAGE_STATS_ENABLED": "0",
            **NO_METRICS,
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "RAY_worker_niceness": "0",  # manager and keeper get this; Ray's default is 15
            **EARLY,
            "RAY_worker_maximum_startup_concurrency": "2",  # these two, or one waits for the other
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }

    def _look_at_clouds(self) -> None:
        """Refuse to start if no cloud is left to buy from, and say which one is closed and why."""
        names = enabled(self.config)
        closed = [why for name in names if (why := cloud_obstacle(self.config, name))]
        if len(closed) == len(names):
            raise HouseError(
                "; ".join(closed)
                or "no cloud is enabled, so nothing could be bought; set local.enabled or "
                "aws.enabled to true, or azure.subscription"
            )
        for why in closed:
            _say(why)

    def _refuse_if_copied(self) -> None:
        """Refuse to start from a copy of a living house's folder; its door answers.

        Each of the two would take the machines of both for its own, and end what the other buys.
        """
        known = read_door(self.places)
        if known is None or not real(self.config):
            return
        from agent.machine.join.door import Door, NoAnswer, TurnedAway

        with contextlib.suppress(NoAnswer, TurnedAway):
            Door(known.address, known.fingerprint).call("GET", "/nonce", None, OTHER_S_MAX)
            raise HouseError(
                f"{self.places.state_dir} is a copy, and the manager of its original still answers at {known.address}: each "
                "would end the other's machines. There: orchestrator down. Then copy the folder again, and: orchestrator up"
            )

    def _look_at_memory(self) -> None:
        """Say it if the keeper's memory could not outlive it, before anything depends on that."""
        if warning := obstacle(self.places.checkpoints):
            _say(warning)
            self._warnings.append(warning)

    def _start_redis(self) -> None:
        if self.config.manager.redis_url is None:
            self._redis = RedisServer(self.places, self._env)
            _say(self._redis.start())
        import redis

        store = connect(self.redis_url)
        try:
            store.ping()
        except redis.RedisError as error:
            raise RedisUnavailable(
                f"{URL_PASSWORD.sub('://***@', self.redis_url)} does not answer ({error}); "
                "check manager.redis_url"
            ) from error
        for warning in self._warnings:
            said = Sentence(at_s=time.time(), who="manager", what="note", because=warning)
            store.xadd(EVENTS, {"e": msgspec.json.encode(said)})
        if self._give_back:  # before the manager starts, so that it is the first event it reads
            post(store, ShutdownAsked(at_s=time.time(), by="orchestrator down", house=self._life))

    def _choose_addresses(self) -> None:
        """Choose where the Ray head listens."""
        host = self.config.ray.head_address
        self._ray_address = f"{host}:{self._free_port('ray.port', host, self.config.ray.port)}"

    def _open_door(self) -> None:
        """Bind the join door's port, that of the last time if it can be had, and publish it.

        Machines that are there know the door by this address and by its certificate.
        """
        host, port = self.config.ray.head_address, self.config.manager.door_port
        known, why = read_door(self.places), "other settings"
        before, _, number = known.address.rpartition(":") if known else ("", "", "")
        if not port and before.strip("[]") == host:
            try:
                self._door = bound(host, int(number))
            except OSError as error:
                why = error.strerror or "it cannot be used"
        if self._door is None:
            self._door = self._listen("manager.door_port", host, port)
        address = url_of(self._door).removeprefix("http://")
        fingerprint = certificate.make_if_missing(self.places.secret("door"))
        publish_door(self.places, DoorFile(address=address, fingerprint=fingerprint))
        self._keep(self.places.secret("door"), self.places.door)
        if known is not None and known.address != address:
            _say(
                f"the join door is at {address} now and no longer at {known.address} ({why}); "
                "machines that know the old address hear no word, so they end themselves after "
                f"{self.config.silent_after_s:g} s"
            )

    def _start_door(self) -> None:
        """Start the process that serves the door, on the port that this house keeps."""
        assert self._door is not None
        self._started_s["door"] = time.monotonic()
        number = self._door.fileno()
        words = ["--house", str(self.places.state_dir), "--socket", str(number)]
        aws, azure = self.config.aws, self.config.azure
        order = DoorOrder(
            redis_url=self.redis_url,
            deployment=self.config.manager.deployment,
            local=self.config.local.enabled,
            aws_certificates=(aws.certificates or "") if aws.enabled else "",
            azure_certificates=(azure.certificates or "") if azure.subscription else "",
            subscription=azure.subscription or "",
        )
        self._children["door"] = processes.start(
            [sys.executable, "-P", "-m", "orchestrator.door", *words],
            env={**self._env, VARIABLE: msgspec.json.encode(order).decode()},
            log=self.places.log("door"),
            files=[number],
        )

    def _start_cloud(self) -> None:
        """Start the local cloud, whose machines boot as those of any cloud do.

        What they find in their environment besides is what a machine's image holds.
        """
        local, folder = self.config.local, self.places.cloud_dir
        if not local.enabled:
            return
        image = {
            "PATH": self._env["PATH"],
            "SPOT_PYTHON": sys.executable,
            processes.MARK: self.places.identity,
        }
        folder.mkdir(mode=0o700, exist_ok=True)
        private.write(folder / "image.env", _lines(image))
        script = first_boot_of(self.config, self.places, "local")
        private.write(folder / "first_boot.sh", script.encode())
        (folder / "first_boot.sh").chmod(0o700)
        words = ["--boot-env", str(folder / "image.env")]
        words += ["--boot-script", str(folder / "first_boot.sh")]
        words += ["--seed", str(local.seed), "--tempo", str(local.tempo)]
        if local.prices:
            words += ["--prices", local.prices]
        ready = self.places.cloud_dir / "cloud.json"
        for left in reversed(range(processes.STARTS_MAX)):
            ready.unlink(missing_ok=True)  # a killed cloud leaves this file
            self._children["cloud"] = self._python(
                "cloud",
                ["-m", "cloud.local", "--dir", str(self.places.cloud_dir), *words],
            )
            try:
                self._wait("the local cloud", "cloud", ready.exists)
                break
            except Killed:
                if not left:
                    raise

    def _free_port(self, setting: str, host: str, port: int) -> int:
        """Return the port in the settings, or a port that is free now."""
        with contextlib.closing(self._listen(setting, host, port)) as probe:
            return int(probe.getsockname()[1])

    def _listen(self, setting: str, host: str, port: int) -> socket.socket:
        """Take the port in the settings, or a port that is free.

        The search leaves out the range from which the system takes ports for outgoing
        connections, because the system could take the port before Ray has started, or while no
        house runs.
        """
        for left in reversed(range(1 if port else PORTS_TRIED)):
            try:
                return bound(host, port or PORTS.start + secrets.randbelow(len(PORTS)))
            except OSError as error:
                if not left:
                    raise HouseError(
                        f"{setting}: {host} port {port or 'any'} cannot be used ({error.strerror}); "
                        f"{instead_of(error, 'ray.head_address', setting)}"
                    ) from error
        raise AssertionError("the last attempt returns or raises")

    def _start_manager(self) -> None:
        """Start the Ray head with manager and keeper on it, with a new attempt if that fails.

        Ray allows its own start half a minute, which may be too short on a busy machine. Every
        new attempt chooses new ports, because another process may have taken the old ones. Redis
        may have died meanwhile, and with it whatever waits for it.
        """
        for left in reversed(range(processes.STARTS_MAX)):
            try:
                self._start_head()
                break
            except ToldToEnd:
                raise
            except HouseError:
                processes.end(self._children["ray"], word=signal.SIGHUP)
                if not left:
                    raise
                self._begin_head()
                self._choose_addresses()
                self._revive_redis()
        self._pulse = Pulse(
            self.redis_url, self.places.identity, self.config.manager.control_period_s
        )

    def _begin_head(self) -> None:
        """Start the head's process, which imports Ray until it is told what to start.

        It runs under an init, as every machine does, because some of Ray's processes would outlive
        it by a minute.
        """
        private.write(self.places.settings, self._settings.encode())
        order, boot = self.places.secret("head"), self.places.secret("boot")
        order.unlink(missing_ok=True)  # it is left if a start broke off
        self._kept.pop(boot, None)
        boot.unlink(missing_ok=True)  # an earlier head's; the door waits
        words = ["-m", "cloud.local.machine_init", str(os.getpid()), sys.executable, "-P"]
        words += ["-m", "orchestrator.supervisor.ray_head", str(order)]
        marked = {MARKER: f"head-{self.places.identity}"}
        self._children["ray"] = self._python("ray", words, marked)

    def _start_head(self) -> None:
        order = self.places.secret("head")
        private.write(order, msgspec.json.encode(self._head_order()))
        self._wait("the Ray head with the manager", "ray", lambda: not order.exists())
        self._keep(self.places.secret("boot"))

    def _head_order(self) -> HeadOrder:
        host, _, port = self._ray_address.rpartition(":")
        storage = self.config.storage
        return HeadOrder(
            host=host,
            port=int(port),
            folder=str(self.places.ray_dir),
            object_store_bytes=OBJECT_STORE_BYTES,
            boot=str(self.places.secret("boot")),
            told={
                "SPOT_HEAD": self._ray_address,
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN": private.secret(self.places.secret("ray")),
                "RAY_USAGE_STATS_ENABLED": "0",
                "OMP_NUM_THREADS": "1",
                **({"AWS_REGION": region} if (region := region_of_buckets(os.environ)) else {}),
            },
            actors=Order(
                state_dir=str(self.places.state_dir),
                redis_url=self.redis_url,
                ray_address=self._ray_address,
                settings=self._settings,
                house=self._life,
            ),
            copies=(storage.checkpoint_url, storage.copy_every_s)
            if storage.checkpoint_url
            else None,
        )

    def _start_history(self) -> None:
        """Start the process that keeps the history: it reads what is published, and is asked by nobody."""
        self._started_s["history"] = time.monotonic()
        hooks = self.config.hooks
        if hooks.url:
            private.made_secret(self.places.secret("hooks"))
            self._keep(self.places.secret("hooks"))
        order = HistoryOrder(
            redis_url=self.redis_url,
            deployment=self.config.manager.deployment,
            hook_url=hooks.url or "",
            hook_kinds=hooks.kinds,
        )
        self._children["history"] = processes.start(
            [
                sys.executable,
                "-P",
                "-m",
                "orchestrator.history",
                "--house",
                str(self.places.state_dir),
            ],
            env={**self._env, HISTORY_VARIABLE: msgspec.json.encode(order).decode()},
            log=self.places.log("history"),
        )

    def _open_page(self) -> None:
        """Take the page's port; its process starts when a browser comes."""
        board = self.config.dashboard
        Keys(self.places.secret("dashboard")).begin()
        try:
            self._page = bound(board.host, board.port)
        except OSError as error:
            raise HouseError(
                f"dashboard.host {board.host} port {board.port} cannot be used: {error.strerror}; "
                f"{instead_of(error, 'dashboard.host', 'dashboard.port')}"
            ) from error

    def _start_page(self) -> None:
        """Start the process that serves the page, on the port that this house keeps."""
        assert self._page is not None
        self._started_s["dashboard"] = time.monotonic()
        number = self._page.fileno()
        words = ["--house", str(self.places.state_dir), "--socket", str(number)]
        self._children["dashboard"] = processes.start(
            [sys.executable, "-P", "-m", "orchestrator.dashboard", *words],
            env=self._env,
            log=self.places.log("dashboard"),
            files=[number],
        )

    def _announce(self) -> None:
        """Write the file in which clients look up this house."""
        note = HouseFile(
            pid=os.getpid(),
            life=self._life,
            redis_url=self.redis_url,
            dashboard_url=f"{url_of(self._page)}/" if self._page else "",
            ray_address=self._ray_address,
            local_cloud=str(self.places.cloud_dir) if self.config.local.enabled else "",
            deployment=self.config.manager.deployment,
            started_at_s=CLOCK.now_s(),
            clock_zero_s=CLOCK.zero_s,
            settings=in_force(self.config),
        )
        private.write(self.places.house, msgspec.json.encode(note))
        self._keep(self.places.house)

    # --- looking after them -----------------------------------------------------------------

    def _python(
        self, name: str, words: list[str], more: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[bytes]":
        return processes.start(
            [sys.executable, "-P", *words],
            env={**self._env, **(more or {})},
            log=self.places.log(name),
            cwd=Path.cwd(),
        )

    def _restart(self, name: str) -> None:
        """Restart a dead part, and after it the parts that depend on it."""
        starts = {
            "cloud": self._start_cloud,
            "dashboard": self._start_page,
            "door": self._start_door,
            "history": self._start_history,
        }
        try:
            if name in starts:
                starts[name]()
            else:
                self._begin_head()
                self._start_manager()
                self._announce()
        except ToldToEnd:
            raise
        except HouseError as error:
            _say(f"{error}; it is tried again")  # by the next round, as it has ended

    def _count_restart(self, name: str) -> None:
        now = time.monotonic()
        self._restarts = [at for at in self._restarts if now - at < RESTART_WINDOW_S] + [now]
        if len(self._restarts) > RESTARTS_MAX:
            raise HouseError(
                f"{name} died again; {RESTARTS_MAX} restarts within {RESTART_WINDOW_S:.0f} s are "
                f"too many; see the logs in {self.places.state_dir / 'logs'}"
            )

    def _end_if_superseded(self) -> None:
        """Raise if a newer manager uses this journal: two would undo each other's work."""
        told = self.places.superseded
        if told.exists() and (why := told.read_text()):
            raise HouseError(why)

    def _end_if_moved(self) -> None:
        """Raise if the directory is gone: nobody could ask or end us, and nothing would be kept."""
        lock = self.places.lock
        if not self._is_ours() and (lock.exists() or not lock.parent.is_dir()):
            raise HouseError(
                f"{self.places.state_dir} was moved or removed while its manager ran, so that ends with all that it "
                "started; machines of a real cloud end after limits.silent_after_s, or with the next: orchestrator up"
            )

    def _is_ours(self) -> bool:
        """Return whether what has the name of our directory is that for sure, and no other house's."""
        try:
            found = self.places.lock.stat()
        except OSError:
            return False  # it is not there, or cannot be seen
        return os.path.samestat(found, self._lock or found)

    def _wait(self, what: str, name: str, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + STARTUP_S_MAX
        while not ready():
            process = self._children[name]
            if process.poll() is not None or time.monotonic() > deadline:
                kind = Killed if processes.was_killed(process) else HouseError
                raise kind(f"{what} did not start; see {self.places.log(name)}")
            self._pause()

    def _pause(self) -> None:
        """Wait a moment for a part; raise `ToldToEnd` if the house is asked to end."""
        if self._stopping:
            raise ToldToEnd("told to end while it was starting; nothing is left of it")
        time.sleep(0.02)


def _holds(file: Path, content: bytes) -> bool:
    return file.exists() and file.read_bytes() == content


def _lines(environment: Mapping[str, str]) -> bytes:
    return "".join(f"{name}={value}\n" for name, value in environment.items()).encode()


@contextlib.contextmanager
def only_one(places: Places) -> Iterator[None]:
    """Hold the state directory's lock; raise `HouseError` if another house holds it."""
    places.make()
    with places.lock.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise HouseError(
                f"another manager already runs in {places.state_dir}; see it with: orchestrator status"
            ) from None
        yield


def sweep_up(places: Places) -> list[int]:
    """End the processes that a killed house has left, and return their pids.

    Raises `HouseError` if a house lives there.
    """
    with only_one(places):
        left = processes.marked(places.identity)
        processes.sweep(places.identity)
        places.house.unlink(missing_ok=True)
        places.remove_links()
    return left


def _say(text: str) -> None:
    if not text:
        return
    with contextlib.suppress(OSError):  # on a full disk the line is lost
        print(text, file=sys.stderr, flush=True)  # noqa: T201


def keep(config: Config, config_path: Path | None, *, give_back: bool = False) -> None:
    """Run a house from start to end in this process."""
    house = House(config, config_path, give_back=give_back)
    try:
        with only_one(house.places):
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, house.ask_to_stop)
            try:
                house.start()
                house.watch()
            finally:
                house.stop()
    except OSError as error:
        if error.errno in FULL:
            told = TAKES_NOTHING.format(house.places.state_dir, error.strerror, UP_AGAIN)
            raise HouseError(told) from error
        raise


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m orchestrator.supervisor", description=__doc__)
    parser.add_argument("--config", type=Path)
    parser.add_argument(
        "--give-back", action="store_true", help="only to end jobs and machines of a killed house"
    )
    options = parser.parse_args()
    raise_limit()
    try:
        config = load(options.config, os.environ)
        keep(config, options.config, give_back=options.give_back)
    except OrchestratorError as error:
        print(f"orchestrator: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0
