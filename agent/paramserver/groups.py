"""Who may help whom: one helper on the same machine, the others on different machines.

Workers of one machine form a column, and the workers at the same height a row. A worker is helped
by the worker above it in its column, and by the workers to its left in its row. The order of the
machines decides who are neighbours, so it mixes types, zones and loads.
"""

import hashlib
from collections.abc import Mapping

SIZE = 4


def ring(machines: list[list[str]], size: int = SIZE) -> dict[str, list[str]]:
    """Return the helpers of every worker; `machines` lists the workers of each, in order."""
    helpers: dict[str, list[str]] = {}
    for column, workers in enumerate(machines):
        for height, worker in enumerate(workers):
            found = [workers[height - 1]] if len(workers) > 1 and size else []
            for step in range(1, len(machines)):
                other = machines[(column - step) % len(machines)]
                if len(found) < size and other:
                    found.append(other[height % len(other)])
            helpers[worker] = found
    return helpers


def inverse(helpers: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Return the helpees of every worker: whom it may help."""
    found: dict[str, list[str]] = {worker: [] for worker in helpers}
    for worker, those in helpers.items():
        for helper in those:
            found[helper].append(worker)
    return found


def mixed(machines: Mapping[str, str], salt: int = 0) -> list[str]:
    """Order machines so that alike machines are rarely neighbours; `machines` maps to the kind.

    Kinds take turns in proportion to their number; a digest orders the machines of one kind.
    """
    kinds: dict[str, list[str]] = {}
    for machine in sorted(machines, key=lambda name: _digest(f"{salt} {name}")):
        kinds.setdefault(machines[machine], []).append(machine)
    places = [
        ((at + 0.5) / len(those), kind, machine)
        for kind, those in kinds.items()
        for at, machine in enumerate(those)
    ]
    return [machine for _, _, machine in sorted(places)]


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
