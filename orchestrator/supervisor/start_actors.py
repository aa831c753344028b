"""The short-lived driver that creates a house's two detached actors: keeper and manager.

    python -m orchestrator.supervisor.start_actors --house DIR --ray HOST:PORT --life ID   (run by the house)

The actors outlive the driver, and Ray starts them again when they die. This is a separate module
because Ray sends classes of a program's main module by value, and ours must be found by name.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from agent.keeper.storage.offsite import Storage
from orchestrator.config import load
from orchestrator.live.actors import ManagerActor
from orchestrator.live.order import NAMESPACE, Order
from orchestrator.paths import Places

HEAD = {"node:__internal_head__": 0.001}


def enlist(order: Order, storage: Storage | None) -> None:
    """Create the detached keeper and manager; the Ray token is in the environment."""
    import ray

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
    detached: dict[str, Any] = {
        "lifetime": "detached",
        "get_if_exists": True,
        "max_restarts": -1,
        "max_task_retries": -1,
        "num_cpus": 0,
        "resources": HEAD,
    }
    keeper = (
        ray.remote(KeeperActor)
        .options(name="keeper", **detached)
        .remote(
            **keeper_options(
                order.redis_url, places.checkpoints, host, places.secret("mesh"), storage
            )
        )
    )
    ray.get(keeper.ping.remote())
    manager = (
        ray.remote(ManagerActor)
        .options(name="manager", **detached)
        .remote(msgspec.json.encode(order))
    )
    ray.get(manager.ping.remote())
    ray.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m orchestrator.supervisor.start_actors", description=__doc__
    )
    parser.add_argument("--house", required=True, help="the state directory")
    parser.add_argument("--ray", required=True)
    parser.add_argument("--life", required=True, help="which life of the house this is")
    parser.add_argument("--config")
    options = parser.parse_args()
    # The address of Redis may hold a password, so it is no argument: all users can list those.
    config = load(Path(options.config) if options.config else None, os.environ)
    embedded = f"unix://{Places(Path(options.house)).redis_socket}"
    order = Order(
        state_dir=options.house,
        redis_url=config.manager.redis_url or embedded,
        ray_address=options.ray,
        config_path=str(Path(options.config).absolute()) if options.config else None,
        house=options.life,
    )
    # Ray's actors look for modules in their driver's directory first, so it must not be a folder
    # with a person's own modules.
    os.chdir(options.house)
    url = config.storage.checkpoint_url
    enlist(order, Storage(url=url, every_s=config.storage.copy_every_s) if url else None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
