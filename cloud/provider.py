"""The one interface to every cloud, with five calls.

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
        """Return the instance types on sale, and the pools that sell them."""
        ...

    async def quotes(self) -> Sequence[Quote]:
        """Return the present spot price of every pool."""
        ...

    async def launch(self, request: LaunchRequest) -> Machine:
        """Start one machine; idempotent by token. Raises from `cloud.errors`."""
        ...

    async def machines(self) -> Sequence[Machine]:
        """Return every machine with our deployment's tag, for a while also ended ones."""
        ...

    async def terminate(self, machine_ids: Sequence[str]) -> None:
        """End these machines; an ended one is no error, and a foreign one raises NotOurs."""
        ...
