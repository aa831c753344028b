"""Who measures what of a model that several workers measure together, and what they found. No torch here.

There are two kinds of tasks. In a *round* every section goes forward and back, one behind the other: rounds are samples,
whoever they come from. The other kind is what is measured of one section *alone*.

Nobody waits for anybody: the owner does itself what others have taken and not brought back, and of a section that
comes twice the first counts.
"""

import threading
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

ROUND = -1  # as a task; the others are indices of sections
OWNER = ""  # the worker that finishes


class Times(NamedTuple):
    """One round with one size: seconds of every section."""

    forward: list[float]
    backward: list[float]
    input_gradient: list[float]
    weight_gradient: list[float]
    taking: list[float]
    untraced: list[float]


class Round(msgspec.Struct, frozen=True, tag=True):
    times: tuple[Times, ...]  # by size


class Alone(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What was measured of one section alone; `rounds` too, where there is no room for a whole model."""

    section: int
    fresh_s: tuple[float, ...]  # by size
    stash_bytes: float
    most_bytes: float
    taking_in_s: float
    rounds: tuple[Round, ...] = ()


def deal(sections: Sequence[int], rounds: int, rank: int) -> int | None:
    """What the worker that came as number `rank` does next, of what nobody has taken yet.

    All rounds take about as long as all sections alone. Only every second worker begins with rounds: the first of each
    worker is for nothing.
    """
    if rounds and (rank % 2 == 0 or not sections):
        return ROUND
    return sections[0] if sections else None


def joined(parts: Sequence[Round]) -> Round:
    """One round of sections that were measured one by one."""
    return Round(
        tuple(
            Times(*([each[0] for each in listed] for listed in zip(*of_size, strict=True)))
            for of_size in zip(*(part.times for part in parts), strict=True)
        )
    )


class Board:
    """What is to be done, and what has been. Several threads may use it."""

    def __init__(self, sections: int, rounds: int) -> None:
        self._lock = threading.Lock()
        self._count, self._wanted = sections, rounds
        self._sections, self._rounds = list(range(sections)), rounds  # what nobody has taken
        self._came = [OWNER]
        self._found: list[Round] = []
        self._alone: dict[int, Alone] = {}

    def take(self, worker: str) -> int | None:
        """A task that nobody has."""
        with self._lock:
            if worker not in self._came:
                self._came.append(worker)
            task = deal(self._sections, self._rounds, self._came.index(worker))
            if task == ROUND:
                self._rounds -= 1
            elif task is not None:
                self._sections.remove(task)
            return task

    def lacking(self) -> int | None:
        """A task that was taken, and of which nothing is heard: what was taken last is the farthest from its end."""
        with self._lock:
            left = [section for section in range(self._count) if section not in self._alone]
            if left:
                return left[-1]
            return ROUND if len(self._found) < self._wanted else None

    def has(self, task: int) -> bool:
        """Whether nothing is gained by doing it."""
        with self._lock:
            return len(self._found) >= self._wanted if task == ROUND else task in self._alone

    def put(self, found: Round | Alone) -> None:
        with self._lock:
            if isinstance(found, Round):
                self._found.append(found)
            else:
                self._alone.setdefault(found.section, found)

    def hurry(self) -> None:
        """No more rounds than a single one."""
        with self._lock:
            self._rounds, self._wanted = 0, min(self._wanted, 1)

    def alone(self) -> list[Alone]:
        """By section."""
        with self._lock:
            return [self._alone[section] for section in range(self._count)]

    def rounds(self) -> list[list[Times]]:
        """By size."""
        alone = self.alone()
        with self._lock:
            in_parts = (joined(each) for each in zip(*(a.rounds for a in alone), strict=False))
            found = self._found or list(in_parts)
            return [list(of_size) for of_size in zip(*(r.times for r in found), strict=True)]
