"""A microbatch may be an object of the script's own."""

import torch

from agent.proof.batch import batch_of


class Episode:
    def __init__(self, states: torch.Tensor, label: str) -> None:
        self.states, self.label = states, label


def test_an_object_is_known_by_its_attributes_and_not_by_where_they_lie() -> None:
    one, other = (Episode(torch.arange(6.0).chunk(2)[1], "a") for _ in range(2))
    assert batch_of(one).bits == batch_of(one).bits == batch_of(other).bits
    assert batch_of(one).bits != batch_of(Episode(one.states + 1, "a")).bits
    assert batch_of(one).bits != batch_of(Episode(one.states, "b")).bits


def test_an_object_may_lead_back_to_itself() -> None:
    one, other = Episode(torch.ones(2), "a"), Episode(torch.ones(2), "a")
    one.itself, other.itself = one, other
    assert batch_of([one, one]).bits == batch_of([other, other]).bits
