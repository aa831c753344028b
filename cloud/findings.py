"""What an examination finds: one line for each thing that has to be right before anything is bought."""

import asyncio
from collections.abc import Awaitable, Iterable, Sequence

import msgspec

from cloud.errors import CloudError, Throttled, Unknown
from cloud.model import InstanceType, Room

Found = Sequence["Finding"]


class Finding(msgspec.Struct, frozen=True):
    """One line: what was looked at, what was found and why it matters, and what to do about it."""

    name: str
    ok: bool
    found: str
    remedy: str = ""


def good(name: str, found: str) -> Finding:
    return Finding(name, True, found)


def bad(name: str, found: str, remedy: str) -> Finding:
    return Finding(name, False, found, remedy)


def failed(name: str, error: CloudError, remedy: str) -> Finding:
    """Say what kept a look from being taken; without an answer, nothing is known to be wrong."""
    if isinstance(error, Unknown | Throttled):
        remedy = f"try again; if it stays so: {remedy}"
    return bad(name, str(error).removesuffix("; the list will tell"), remedy)


def room_left(name: str, room: Room, types: Iterable[InstanceType], remedy: str) -> Finding:
    """Say whether a quota leaves room for at least the smallest machine that it counts."""
    least = min((x.vcpus for x in types if room.family in ("", x.family)), default=0)
    said = f"{room.vcpus_used} of {room.vcpus_max} vCPUs are used"
    if room.vcpus_max - room.vcpus_used >= max(least, 1):
        return good(name, said)
    short = f", and the smallest machine has {least}" if room.vcpus_used < room.vcpus_max else ""
    return bad(name, f"{said}{short}, so nothing can be bought there", remedy)


async def looked(name: str, look: Awaitable[Found], remedy: str, at_most_s: float) -> Found:
    """Return what a look finds; whatever keeps it from being taken is what it found."""
    try:
        return await asyncio.wait_for(look, at_most_s)
    except CloudError as error:
        return [failed(name, error, remedy)]
    except TimeoutError:
        return [bad(name, f"no answer within {at_most_s:.0f} s", "is the network up? try again")]
    except (LookupError, TypeError, ValueError) as error:
        said = f"an answer that cannot be read ({type(error).__name__})"
        return [bad(name, said, "try again; if it stays so, report it")]
