"""Tasks and results of a measurement that several workers share. It does not import torch.

There are two kinds of tasks. In a *round* every section goes forward and back, one after the other;
rounds are samples, from any worker. The other kind measures one section *alone*.

No worker waits for another. The owner itself does what others have taken and not brought back,
and of a section that comes twice the first result counts.
"""

import threading
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

ROUND = -1  # this task is a round; other tasks are indices of sections
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
    """The measurement of one section alone; with `rounds` if the whole model has no room."""

    section: int
    fresh_s: tuple[float, ...]  # by size
    stash_bytes: float
    most_bytes: float
    taking_in_s: float
    rounds: tuple[Round, ...] = ()


def deal(sections: Sequence[int], rounds: int, rank: int) -> int | None:
    """Choose the next task not yet taken, for the worker that came as number `rank`.

    All rounds take about as long as all sections alone. Only every second worker begins with
    rounds, because each worker's first round is a warm-up.
    """
    if rounds and (rank % 2 == 0 or not sections):
        return ROUND
    return sections[0] if sections else None


def joined(parts: Sequence[Round]) -> Round:
    """Join sections that were measured one by one into one round."""
    return Round(
        tuple(
            Times(*([each[0] for each in listed] for listed in zip(*of_size, strict=True)))
            for of_size in zip(*(part.times for part in parts), strict=True)
        )
    )


class Board:
    """Tasks to do and results so far. Several threads may use it."""

    def __init__(self, sections: int, rounds: int) -> None:
        self._lock = threading.Lock()
        self._count, self._wanted = sections, rounds
        self._sections, self._rounds = list(range(sections)), rounds  # not yet taken
        self._came = [OWNER]
        self._found: list[Round] = []
        self._alone: dict[int, Alone] = {}

    def take(self, worker: str) -> int | None:
        """Take a task that no worker has."""
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
        """Return a taken task without a result: the last taken, which is farthest from its end."""
        with self._lock:
            left = [section for section in range(self._count) if section not in self._alone]
            if left:
                return left[-1]
            return ROUND if len(self._found) < self._wanted else None

    def has(self, task: int) -> bool:
        """Return whether the task need not be done any more."""
        with self._lock:
            return len(self._found) >= self._wanted if task == ROUND else task in self._alone

    def put(self, found: Round | Alone) -> None:
        with self._lock:
            if isinstance(found, Round):
                self._found.append(found)
            else:
                self._alone.setdefault(found.section, found)

    def hurry(self) -> None:
        """Want no more than a single round."""
        with self._lock:
            self._rounds, self._wanted = 0, min(self._wanted, 1)

    def alone(self) -> list[Alone]:
        """Return what was measured of each section alone."""
        with self._lock:
            return [self._alone[section] for section in range(self._count)]

    def rounds(self) -> list[list[Times]]:
        """Return the rounds of each size."""
        alone = self.alone()
        with self._lock:
            in_parts = (joined(each) for each in zip(*(a.rounds for a in alone), strict=False))
            found = self._found or list(in_parts)
            return [list(of_size) for of_size in zip(*(r.times for r in found), strict=True)]
