"""Start Ray's head with only what a house uses, and the two actors on it: keeper and manager.

    python -P -m orchestrator.supervisor.ray_head FILE   (a `HeadOrder`; run by the house)

It imports Ray while the house starts what the head needs, and then waits for FILE. The process stays as long as the head's own processes. `ray start` would start more: a server for
Ray clients, the dashboard's process even if no dashboard is wanted, and agents for metrics and for
environments of packages. The actors are detached: Ray starts them again when they die.
"""

import os
import select
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from agent.boot.node import (
    BECOME_WORKER,
    CLUSTER_VARIABLE,
    EARLY_WORKERS,
    WITHOUT_AGENTS,
    Cluster,
    versions,
)
from cloud import private
from orchestrator.live.actors import ManagerActor
from orchestrator.live.order import NAMESPACE, Order
from orchestrator.paths import Places

if TYPE_CHECKING:
    from ray._private.node import Node

HEAD = {"node:__internal_head__": 0.001}
ACTORS = 2  # keeper and manager
RAYLET = "raylet"
LOOK_S = 0.01


class HeadOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Where the head listens, and what it starts. The file is private: Redis may have a password."""

    host: str
    port: int
    folder: str
    object_store_bytes: int
    boot: str  # the file of what the join door hands out, written when the head is up
    told: dict[str, str]  # that, besides what the cluster is
    actors: Order | None = None
    copies: tuple[str, float] | None = None  # the place for checkpoints elsewhere, and its period


def start(order: HeadOrder) -> "Node":
    """Start the head's processes; they end with this one."""
    from ray._private import node, services
    from ray._private.parameter import RayParams
    from ray._private.resource_isolation_config import ResourceIsolationConfig

    services.start_api_server = _no_dashboard
    changed = {**WITHOUT_AGENTS, EARLY_WORKERS: ACTORS}
    services.start_ray_process = _with(changed, services.start_ray_process)
    params = RayParams(
        node_ip_address=order.host,
        node_name=order.host,
        gcs_server_port=order.port,
        num_cpus=0,
        min_worker_port=0,
        max_worker_port=0,
        temp_dir=order.folder,
        setup_worker_path=str(BECOME_WORKER),
        object_store_memory=order.object_store_bytes,
        include_dashboard=False,
        include_log_monitor=False,
        no_monitor=True,
        resource_isolation_config=ResourceIsolationConfig(),
    )
    return node.Node(params, head=True)


def _no_dashboard(*_: Any, **__: Any) -> Any:
    return "", None


def _with(changed: Mapping[str, object], start_process: Any) -> Any:
    """Return what starts Ray's processes, the raylet with these of its words changed."""

    def started(words: list[str], kind: str, *more: Any, **options: Any) -> Any:
        if kind == RAYLET:
            kept = [word for word in words if word.partition("=")[0] not in changed]
            words = [*kept, *(f"{name}={value}" for name, value in changed.items())]
        return start_process(words, kind, *more, **options)

    return started


def admit(node: "Node", order: HeadOrder) -> None:
    """Write what a machine needs to be a node of this cluster."""
    cluster = Cluster(node.cluster_id.hex(), node.session_name, versions())
    told = {**order.told, CLUSTER_VARIABLE: str(cluster)}
    lines = "".join(f"{name}={value}\n" for name, value in told.items())
    private.write(Path(order.boot), lines.encode())


def enlist(order: Order, copies: tuple[str, float] | None) -> None:
    """Create the detached keeper and manager, and return when they answer."""
    import ray

    from agent.keeper.storage.offsite import Storage
    from agent.machine.actor import KeeperActor, keeper_options

    host = order.ray_address.rpartition(":")[0]
    ray.init(
        address=order.ray_address,
        _node_ip_address=host,
        namespace=NAMESPACE,
        log_to_driver=False,
        logging_level="ERROR",
    )
    places = Places(Path(order.state_dir))
    storage = Storage(url=copies[0], every_s=copies[1]) if copies else None
    detached: dict[str, Any] = {
        "lifetime": "detached",
        "get_if_exists": True,
        "max_restarts": -1,
        "max_task_retries": -1,
        "num_cpus": 0,
        "resources": HEAD,
    }
    manager = (  # the first to be started, because it has more to load
        ray.remote(ManagerActor)
        .options(name="manager", **detached)
        .remote(msgspec.json.encode(order))
    )
    keeper = (
        ray.remote(KeeperActor)
        .options(name="keeper", **detached)
        .remote(
            **keeper_options(
                order.redis_url, places.checkpoints, host, places.secret("mesh"), storage
            )
        )
    )
    ray.get([manager.ping.remote(), keeper.ping.remote()])
    ray.shutdown()


def end_with_the_first(node: "Node") -> None:
    """End this process when one of the head's own processes does, also while actors are made.

    Without its store of names the head answers no call, so a call that waits for it never returns.
    """
    ended = select.poll()
    for infos in node.all_processes.values():
        for info in infos:
            ended.register(os.pidfd_open(info.process.pid), select.POLLIN)
    ended.poll()
    node.kill_all_processes(check_alive=False, allow_graceful=False)
    os._exit(1)


def main() -> None:
    import ray._private.node  # noqa: F401 - all that `start` needs

    file = Path(sys.argv[1])
    while not file.exists():
        time.sleep(LOOK_S)
    order = msgspec.json.decode(file.read_bytes(), type=HeadOrder)
    node = start(order)
    watch = threading.Thread(target=end_with_the_first, args=(node,), name="watch", daemon=True)
    watch.start()
    admit(node, order)
    if order.actors is not None:
        # Ray's actors look for modules in their driver's directory first, so it must not be a
        # folder with a person's own modules.
        os.chdir(order.actors.state_dir)
        enlist(order.actors, order.copies)
    file.unlink()  # by this the house sees that all is ready
    watch.join()


if __name__ == "__main__":
    main()
