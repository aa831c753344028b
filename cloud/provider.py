"""The one seam to every cloud: five calls wide.

Every implementation passes the same suite, `tests/contract/test_providers.py`.
"""

from collections.abc import Sequence
from typing import Protocol

from cloud.model import InstanceType, LaunchRequest, Machine, Pool, Quote


class Provider(Protocol):
    """Machines of one cloud, as seen by one deployment of ours."""

    @property
    def name(self) -> str:
        """The `cloud` field of its pools."""
        ...

    async def catalogue(self) -> tuple[Sequence[InstanceType], Sequence[Pool]]:
        """What is sold, and where."""
        ...

    async def quotes(self) -> Sequence[Quote]:
        """The spot price of every pool now."""
        ...

    async def launch(self, request: LaunchRequest) -> Machine:
        """Start one machine; idempotent by token. Raises from `cloud.errors`."""
        ...

    async def machines(self) -> Sequence[Machine]:
        """Every machine that carries our deployment's tag, ended ones for a while too."""
        ...

    async def terminate(self, machine_ids: Sequence[str]) -> None:
        """End these machines; ending an ended one is fine; foreign ones raise NotOurs."""
        ...
