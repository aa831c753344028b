"""What a microbatch may be, and when two are the same."""

import subprocess
import sys
import threading
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from agent.proof.batch import batch_of
from agent.proof.digest import digests

Pair = namedtuple("Pair", "x y")


@dataclass
class Sample:
    x: torch.Tensor
    words: list[str]


class Odd:
    """Nobody can pickle it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


KINDS = [
    lambda n: torch.tensor([1.0, n]),
    lambda n: (torch.ones(2), torch.tensor(n)),
    lambda n: {"x": torch.ones(2), "y": n},
    lambda n: np.array([1.0, n]),
    lambda n: Pair(1, n),
    lambda n: Sample(torch.ones(2), [f"word {n}"]),
    lambda n: {"a", f"b{n}"},
    float,
    lambda n: complex(0, n),
    lambda n: [None, {"deep": [(torch.zeros(3), str(n))]}],
    lambda n: torch.full((1 << 19,), float(n)),
    lambda n: torch.full((600, 1000), float(n)).t(),
    lambda n: torch.sparse_coo_tensor(
        torch.tensor([[1]]), torch.tensor([float(n)]), (3,), check_invariants=True
    ),
    lambda n: np.array([f"word {n}"], dtype=object),
]


@pytest.mark.parametrize("make", KINDS)
def test_the_same_is_the_same_and_another_is_another(make: object) -> None:
    assert batch_of(make(1)).bits == batch_of(make(1)).bits  # type: ignore[operator]
    assert batch_of(make(1)).bits != batch_of(make(2)).bits  # type: ignore[operator]


def test_how_it_is_nested_counts() -> None:
    one, two = torch.ones(2), torch.zeros(2)
    nests = [(one, two), (two, one), [(one,), two], {"x": one, "y": two}, torch.cat([one, two])]
    assert len({batch_of(nest).bits for nest in nests}) == len(nests)


def test_what_cannot_be_pickled_counts_for_nothing() -> None:
    assert batch_of((Odd(), 1)).bits == batch_of((Odd(), 1)).bits
    assert batch_of((Odd(), 1)).bits != batch_of((Odd(), 2)).bits


def test_norms_are_for_those_who_round_otherwise() -> None:
    near, far = batch_of(torch.tensor([3.0, 4.0])), batch_of(torch.tensor([3.0, 4.000001]))
    assert near.bits != far.bits
    assert near.norms == pytest.approx(far.norms)


ELSEWHERE = """
import torch
from agent.proof.batch import batch_of
from agent.proof.digest import digests
print(batch_of([{'a', 'b', 'c'}, {'x': 1.5}]).bits)
print(digests({'': [torch.arange(1000.0), torch.ones(3, dtype=torch.int64)]})[0].bits)
"""


def test_another_process_comes_to_the_same() -> None:
    """Whatever it hashes words to."""
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE], capture_output=True, text=True, check=True
    )
    batch = batch_of([{"a", "b", "c"}, {"x": 1.5}])
    (layer,) = digests({"": [torch.arange(1000.0), torch.ones(3, dtype=torch.int64)]})
    assert [int(line) for line in done.stdout.split()] == [batch.bits, layer.bits]
