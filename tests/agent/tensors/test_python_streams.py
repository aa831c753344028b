"""What tells that code has drawn from the random streams of Python or NumPy."""

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from agent.data import random_streams
from agent.tensors.device import PythonStreams, seed_python


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    usual = np.random.get_bit_generator()
    with random_streams.kept():
        yield
        np.random.set_bit_generator(usual)


DRAWS: dict[str, Callable[[], object]] = {
    "a number of Python's": random.random,
    "a normal number of Python's": lambda: random.gauss(0, 1),
    "a number of NumPy's": np.random.random,
    "a normal number of NumPy's": np.random.normal,
    "an order": lambda: np.random.permutation(3),
    "a seed": lambda: seed_python(8),
}


@pytest.mark.parametrize("drawn_before", range(3))
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_any_draw_is_told(draw: Callable[[], object], drawn_before: int) -> None:
    """Normal numbers are drawn in pairs, and the second of one is told as well."""
    seed_python(7)
    for _ in range(drawn_before):
        random.gauss(0, 1)
        np.random.normal()
    streams = PythonStreams()
    np.random.default_rng(1).normal()
    assert not streams.moved
    draw()
    assert streams.moved


def test_draws_from_another_kind_of_stream_are_told() -> None:
    """A person may put any generator in the place of the usual one."""
    np.random.set_bit_generator(np.random.PCG64(7))
    for _ in range(3):
        streams = PythonStreams()
        assert not streams.moved
        np.random.normal()
        assert streams.moved


def test_after_a_seed_numpy_is_not_asked_for_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer takes 0.2 ms, and every microbatch is seeded and looked at twice in each stage."""
    seed_python(7)
    monkeypatch.delattr(np.random, "get_state")
    assert not PythonStreams().moved
