"""Start Ray's head with only what a house uses.

    python -m orchestrator.supervisor.ray_head ARGUMENTS   (those of `ray start`)

No option of Ray switches off the server for Ray clients, which we do not use, or the dashboard's
process if no dashboard is wanted. Both import most of Ray, and the head accepts no connection
before the second is up.
"""

import sys
from typing import Any


def main() -> None:
    from ray._private import services
    from ray.scripts import scripts

    start = services.start_api_server

    def start_if_wanted(include_dashboard: bool | None, *words: Any, **more: Any) -> Any:
        return start(include_dashboard, *words, **more) if include_dashboard else ("", None)

    services.start_api_server = start_if_wanted
    scripts.get_ray_client_dependency_error = lambda: ImportError("nobody is a client of Ray here")
    scripts.start.main(["--head", "--no-monitor", *sys.argv[1:]])


if __name__ == "__main__":
    main()
