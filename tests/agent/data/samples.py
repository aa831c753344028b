"""Data sets for these tests, and somebody who stands in for the session."""

import random
from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from agent.data.data import Data


class Owner:
    """All of a session that its data sees: every step of the epoch is done here."""

    seed = 7

    def __init__(self, epoch: int = 0) -> None:
        self.epoch = epoch

    def steps_of_epoch(self, length: int) -> Iterator[int]:
        yield from range(self.epoch * length, (self.epoch + 1) * length)


class Drawn(Dataset):
    """Each sample is its index, and what three streams gave for it."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, float, float]:
        return index, torch.rand(2), np.random.random(), random.random()


class Read(IterableDataset):
    """Samples shuffled within a buffer, as large data sets do it; their number is not said."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        held = list(range(min(5, self.samples)))
        for index in range(len(held), self.samples):
            place = random.randrange(len(held))
            yield held[place], torch.rand(2)
            held[place] = index
        for index in held:
            yield index, torch.rand(2)


class Told(Read):
    def __len__(self) -> int:
        return self.samples


def bits(microbatch: list[torch.Tensor]) -> list[bytes]:
    return [part.numpy().tobytes() for part in microbatch]


def plain(data: Data, steps: int) -> list[list[list[bytes]]]:
    """Every microbatch of these steps, in order, fetched in this process."""
    return [[bits(data.at(step)[i]) for i in range(data.microbatches)] for step in range(steps)]
