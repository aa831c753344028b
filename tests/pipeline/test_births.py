"""A model built in parts has the initial values of the model built whole."""

import pytest
import torch
from playing import MODELS, SEED, made
from torch import nn

from agent.pipeline.births import CannotPlayBack, Unborn


class Peculiar(nn.Module):
    """Initial values in every way that people set them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4, padding_idx=2)
        self.linear = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)))
        self.scale = nn.Parameter(torch.linspace(0, 1, 4) * 2)
        nn.init.orthogonal_(self.linear.weight)
        self.apply(self._again)

    def _again(self, module):
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.bias, std=0.02)


class Looking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        if self.weight.sum().item() > 0:
            self.weight.data.neg_()


FACTORIES = {name: factory for name, (factory, _) in MODELS.items()} | {"peculiar": Peculiar}


@pytest.mark.parametrize("name", FACTORIES)
def test_every_part_is_born_as_in_the_whole(name):
    """Whichever parameters a worker owns, they get the bits that a single device would have given them."""
    whole = made(FACTORIES[name]).state_dict(keep_vars=True)
    after = torch.get_rng_state()
    names = sorted(whole)
    for owned in (names[::2], names[1::2]):
        unborn = Unborn(FACTORIES[name])
        torch.manual_seed(SEED)
        unborn.bear(owned)
        found = unborn.model.state_dict(keep_vars=True)
        for key in owned:
            assert torch.equal(found[key], whole[key]), key
            assert type(found[key]) is type(whole[key])
        assert torch.equal(torch.get_rng_state(), after)
        shared = {id(whole[key]) for key in owned}
        for key in set(names) - set(owned):
            assert found[key].is_meta == (id(whole[key]) not in shared)


def test_tied_parameters_stay_tied():
    """One parameter under two names is still one after it was born."""
    unborn = Unborn(Peculiar)
    unborn.bear(["embed.weight"])
    assert unborn.model.head.weight is unborn.model.embed.weight


def test_a_constructor_that_looks_is_told():
    """A constructor that reads its own values cannot be played back, and the error says so."""
    with pytest.raises(CannotPlayBack, match="looks at values"):
        Unborn(Looking)
