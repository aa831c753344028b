"""A real Ray head with token authentication, on a loopback address of its own."""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
from running_cloud import until

from cloud import private
from orchestrator.supervisor.ray_head import HeadOrder

ADDRESS = "127.0.40.1"
START_S_MAX = 60.0
LOOK_S_MAX = 90

LOOK = """
import sys, time
from ray._raylet import GcsClient
address, name, wanted = sys.argv[1], sys.argv[2], sys.argv[3] == "alive"
deadline_s = time.monotonic() + float(sys.argv[4])
client = GcsClient(address=address)
while time.monotonic() < deadline_s:
    nodes = client.get_all_node_info().values()
    alive = any(node.state == 0 and name in node.resources_total for node in nodes)
    if alive == wanted:
        sys.exit(0)
    time.sleep(0.1)
sys.exit(3)
"""


class RayHead:
    """A head without slots of its own; ends wholly with `stop`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.token = secrets.token_hex(16)
        with socket.create_server((ADDRESS, 0)) as probe:
            self.port = probe.getsockname()[1]
        self.address = f"{ADDRESS}:{self.port}"
        plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self.environment = {
            **plain,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self.token,
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> "RayHead":
        boot, order = self.directory.parent / "boot", self.directory.parent / "order"
        asked = HeadOrder(
            host=ADDRESS,
            port=self.port,
            folder=str(self.directory),
            object_store_bytes=80_000_000,
            boot=str(boot),
            told={
                "SPOT_HEAD": self.address,
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN": self.token,
                "SPOT_OBJECT_STORE_BYTES": "80000000",
            },
        )
        private.write(order, msgspec.json.encode(asked))
        with (self.directory.parent / "head.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "orchestrator.supervisor.ray_head", str(order)],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        until("the Ray head to be ready", lambda: not order.exists(), START_S_MAX)
        return self

    def sees(self, machine_id: str, state: str, token: str | None = None) -> bool:
        """Whether a node of this machine is `alive` or `gone`, or comes to be so in time."""
        environment = {**self.environment, "RAY_AUTH_TOKEN": token or self.token}
        words = [self.address, f"machine:{machine_id}", state, str(LOOK_S_MAX)]
        done = subprocess.run([sys.executable, "-c", LOOK, *words], env=environment, timeout=120)
        return done.returncode == 0

    def handed_out(self) -> str:
        """The lines that a machine gets at the join door."""
        return (self.directory.parent / "boot").read_text()

    def boot_environment(self, token_file: Path, token: str | None = None) -> str:
        """The lines with which `boot.sh` makes a node of a machine, and the file that they name."""
        token_file.write_text(token or self.token)
        token_file.chmod(0o600)
        handed = [x for x in self.handed_out().splitlines() if not x.startswith("RAY_AUTH_TOKEN=")]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return "\n".join([*handed, f"PATH={path}", f"RAY_AUTH_TOKEN_PATH={token_file}", ""])

    def stop(self) -> None:
        """The whole process group: Ray's own processes share it with the one that we started."""
        if self.process is None:
            return
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(15)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)
