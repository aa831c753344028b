"""Make this machine a node of the manager's Ray cluster: `python -m agent.boot.node`.

It becomes the node's own process, the raylet, and so ends when the node ends. `ray start` does the
same by way of an interpreter that imports most of Ray and stays, and of two more for Ray's agents,
which serve metrics and environments of packages. Nobody here uses those, and they would listen on
all interfaces. So a machine starts without them, in a hundredth of the processor time.

Given by the environment:
  SPOT_MACHINE_ID   what the cloud calls this machine
  SPOT_HEAD         address of the Ray head, host:port
  SPOT_CLUSTER      which cluster the head has, as `Cluster` writes it
  SPOT_ADDRESS      the machine's own private address
  SPOT_SLOTS        how many workers it has room for
  RAY_AUTH_TOKEN_PATH   how it proves that it belongs: the file with the token
  SPOT_TEMP_DIR     where Ray puts its sockets and logs, a short path (optional)
  SPOT_IDLE_CARDS   how many cards it has that no driver serves (optional)
  SPOT_OBJECT_STORE_BYTES         memory for Ray's object store (optional)
"""

import os
import secrets
import shutil
import sys
from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from subprocess import list2cmdline
from typing import NamedTuple

NEEDED = (
    "SPOT_MACHINE_ID",
    "SPOT_HEAD",
    "SPOT_CLUSTER",
    "SPOT_ADDRESS",
    "SPOT_SLOTS",
    "RAY_AUTH_TOKEN_PATH",
)
CLUSTER_VARIABLE, IDLE_CARDS_VARIABLE = "SPOT_CLUSTER", "SPOT_IDLE_CARDS"
USAGE, DIFFERS = 64, 65
SOCKET_BYTES_MAX = 107  # of the path of a Unix socket
OBJECT_STORE_BYTES = 100 << 20
BECOME_WORKER = Path(__file__).with_name("worker.py")
SHARED = "/dev/shm"  # noqa: S108 - where Ray's object store belongs
# Many: the machine's own resource pins its agent to it, and nobody is to wait for it.
PINS = 1000
# Ray wants two processes that live as long as the node. These read until the node has ended.
IDLE_AGENT = list2cmdline(["/bin/sh", "-c", "exec cat"])
UNUSED_PORT = 1  # nobody listens there, and with a number the node waits for nobody's
WITHOUT_AGENTS = {
    "--dashboard_agent_command": IDLE_AGENT,
    "--runtime_env_agent_command": IDLE_AGENT,
    "--metrics-agent-port": UNUSED_PORT,
    "--metrics_export_port": UNUSED_PORT,
    "--runtime_env_agent_port": UNUSED_PORT,
    "--dashboard_agent_listen_port": UNUSED_PORT,
}
# A node starts the processes of the actors that come for sure before it is asked for them. Else it
# would end what idles for a second, and start it again when it is asked.
EARLY = {
    "RAY_enable_worker_prestart": "1",
    "RAY_idle_worker_killing_time_threshold_ms": "60000",
}
EARLY_WORKERS = "--num_prestart_python_workers"
ENVIRONMENT = {
    **EARLY,
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    # The agents then end with the node, because their standard input does.
    "RAY_enable_pipe_based_agent_to_parent_health_check": "1",
    # Ray serves its metrics on all interfaces and does not ask for the token, so they are off.
    "RAY_enable_metrics_collection": "0",
    # When memory runs out Ray would end the agent, the only process here that it can end, and with
    # it the whole machine. The kernel ends the script that takes the memory.
    "RAY_memory_monitor_refresh_ms": "0",
    # How often a node asks whether it still belongs. One of an earlier cluster asks the next head
    # for news thousands of times a second until then, and it is to join that one soon.
    "RAY_raylet_liveness_self_check_interval_ms": "1000",
}


class Cluster(NamedTuple):
    """What a node has to know of its cluster, besides the head's address and the token."""

    id: str
    session: str
    versions: str  # of Ray and Python, which have to be the same on all nodes

    @classmethod
    def read(cls, text: str) -> "Cluster":
        return cls(*text.split("/"))

    def __str__(self) -> str:
        return "/".join(self)

    def socket(self, temp: Path) -> Path:
        """Return where a node with this folder listens; the socket is there when the node is up."""
        return temp / self.session / "sockets" / "raylet"

    def store_socket(self, temp: Path) -> Path:
        return temp / self.session / "sockets" / "plasma_store"


def versions() -> str:
    return f"Ray {version('ray')} on Python {sys.version_info.major}.{sys.version_info.minor}"


def command(known: Mapping[str, str], node_id: str) -> list[str]:
    """Return the words that start the raylet of this machine; its folders are there then."""
    cluster, address, gcs = (
        Cluster.read(known["SPOT_CLUSTER"]),
        known["SPOT_ADDRESS"],
        known["SPOT_HEAD"],
    )
    spec = find_spec("ray")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    ray = Path(spec.submodule_search_locations[0])
    temp = _temp(known)
    folder = temp / cluster.session
    for name in ("logs", "sockets", "runtime_resources"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    store_bytes = int(known.get("SPOT_OBJECT_STORE_BYTES") or OBJECT_STORE_BYTES)
    fits = Path(SHARED).is_dir() and shutil.disk_usage(SHARED).free >= store_bytes
    common = {
        "--node-ip-address": address,
        "--node-manager-port": "RAY_NODE_MANAGER_PORT_PLACEHOLDER",
        "--object-store-name": cluster.store_socket(temp),
        "--raylet-name": cluster.socket(temp),
        "--redis-address": None,
        "--metrics-agent-port": 0,
        "--runtime-env-agent-port": 0,
        "--logging-rotate-bytes": 512 << 20,
        "--logging-rotate-backup-count": 5,
        "--gcs-address": gcs,
        "--session-name": cluster.session,
        "--temp-dir": temp,
        "--webui": "",
        "--cluster-id": cluster.id,
    }
    script = ray / "_private" / "workers" / "default_worker.py"
    worker = [
        sys.executable,
        str(BECOME_WORKER),
        str(script),
        *_options(common),
        "RAY_WORKER_DYNAMIC_OPTION_PLACEHOLDER",
    ]
    resources = {
        "CPU": known["SPOT_SLOTS"],
        f"machine:{known['SPOT_MACHINE_ID']}": PINS,
        f"node:{address}": 1,
        "object_store_memory": store_bytes,
    }
    own = {
        "--raylet_socket_name": cluster.socket(temp),
        "--store_socket_name": cluster.store_socket(temp),
        "--object_manager_port": 0,
        "--node_manager_port": 0,
        # Workers take any free port: several machines may share one host, and a fixed range would
        # clash.
        "--min_worker_port": 0,
        "--max_worker_port": 0,
        "--node_id": node_id,
        "--node-name": address,
        "--node_ip_address": address,
        "--maximum_startup_concurrency": 1,
        EARLY_WORKERS: 1,  # the agent's
        "--static_resource_list": ",".join(f"{name},{most}" for name, most in resources.items()),
        "--python_worker_command": list2cmdline(worker),
        "--java_worker_command": "",
        "--cpp_worker_command": "",
        "--native_library_path": ray / "cpp" / "lib",
        "--temp_dir": temp,
        "--session_dir": folder,
        "--log_dir": folder / "logs",
        "--resource_dir": folder / "runtime_resources",
        "--object_store_memory": store_bytes,
        "--plasma_directory": SHARED if fits else temp,
        "--fallback_directory": folder,
        "--ray-debugger-external": 0,
        "--gcs-address": gcs,
        "--session-name": cluster.session,
        "--cluster-id": cluster.id,
        "--labels": "",
        "--stdout_filepath": folder / "logs" / "raylet.out",
        "--stderr_filepath": folder / "logs" / "raylet.err",
    }
    return [
        str(ray / "core" / "src" / "ray" / "raylet" / "raylet"),
        *_options(own | WITHOUT_AGENTS),
    ]


def _temp(known: Mapping[str, str]) -> Path:
    return Path(known.get("SPOT_TEMP_DIR") or "/tmp/ray")  # noqa: S108 - as Ray has it


def _options(values: Mapping[str, object]) -> list[str]:
    return [f"{name}={value}" for name, value in values.items()]


def refusal(known: Mapping[str, str]) -> tuple[int, str]:
    """Return an exit status and a sentence if this machine cannot be a node, else 0."""
    for name in NEEDED:
        if not known.get(name):
            return USAGE, f"{name} is not set; the join door has to hand it out"
    cluster, temp = Cluster.read(known["SPOT_CLUSTER"]), _temp(known)
    if over := max(len(os.fsencode(cluster.store_socket(temp))) - SOCKET_BYTES_MAX, 0):
        said = f"SPOT_TEMP_DIR={temp} leaves Ray's sockets {over} bytes too little for their names"
        return USAGE, f"{said}: name a shorter folder"
    theirs, ours = cluster.versions, versions()
    if ours != theirs:
        said = f"this machine has {ours} and the manager {theirs}, and they cannot work together"
        return DIFFERS, f"{said}: build its image from the manager's version"
    if idle := known.get(IDLE_CARDS_VARIABLE):
        said = f"no driver serves the NVIDIA cards of this machine ({idle}), and they are paid for"
        return DIFFERS, f"{said}: put the driver into its image, or buy types without accelerators"
    return 0, ""


def main() -> int:
    status, why = refusal(os.environ)
    if why:
        print(f"boot: {why}", file=sys.stderr)  # noqa: T201
        return status
    words = command(os.environ, secrets.token_hex(28))
    return os.execve(words[0], words, {**os.environ, **ENVIRONMENT})  # noqa: S606 - no shell


if __name__ == "__main__":
    sys.exit(main())
