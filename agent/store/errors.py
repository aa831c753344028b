"""What can go wrong between a state and its store; all of it is a `CheckpointError`.

CheckpointError
├── Damaged          what was read is torn, truncated, flipped, missing or does not fit together
├── Unknown          what was read is sound, but this version of the software cannot read its format
├── Full             there is no room for what was to be written
├── Unavailable      the store did not answer within its bounded retries, or refused us
└── Outdated         a newer generation writes this job now, or the version is below the floor
"""

import logging
from collections.abc import Callable
from typing import TypeVar

from agent.errors import CheckpointError

Read = TypeVar("Read")
log = logging.getLogger(__name__)


class Damaged(CheckpointError):  # noqa: N818 - it names what happened
    """What was read is torn, truncated, flipped, missing or does not fit together."""


class Unknown(CheckpointError):  # noqa: N818
    """What was read is sound, but this version of the software cannot read its format."""


class Full(CheckpointError):  # noqa: N818
    """There is no room for what was to be written."""


class Unavailable(CheckpointError):  # noqa: N818
    """The store did not answer within its bounded retries, or refused us."""


class Outdated(CheckpointError):  # noqa: N818
    """A newer generation writes this job now, or the version is below the floor."""


def read_twice(read: Callable[[], Read]) -> Read:
    """Return what is read, or raise `Damaged` if it is damaged at two reads.

    One read may be spoilt on its way, and who believes it goes back to an older version.
    """
    try:
        return read()
    except Damaged as error:
        log.warning("%s; it is read again", error)
        return read()
