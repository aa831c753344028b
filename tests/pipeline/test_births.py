"""A model built in parts has the initial values of the model built whole."""

import pytest
import torch
from playing import MODELS, SEED, loss_of, made
from torch import nn

from agent.errors import Misuse
from agent.pipeline.deferred.initial_values import Unborn
from agent.pipeline.deferred.tape import CannotPlayBack
from agent.pipeline.stages.cut import build, measured
from agent.pipeline.tracing.analysis import cut_points, examine
from agent.pipeline.tracing.recording.trace import record
from agent.tensors.absent import any_away, is_away


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
        self.rates = [torch.arange(3.0) / 3, {"one": torch.ones(())}]
        self.halved = nn.Linear(4, 4).half()
        self.noisy = nn.Linear(4, 4)
        self.noisy.weight.data = torch.rand(4, 4) * self.noisy.weight.data
        self.heat = nn.Parameter(torch.randn(()))
        nn.init.orthogonal_(self.linear.weight)
        self.apply(self._again)

    def _again(self, module):
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.bias, std=0.02)


class Asking(nn.Module):
    """Initialises only where it has been told that there is memory, as libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        if torch.tensor([]).device != torch.device("meta"):
            nn.init.normal_(self.linear.weight)
        if self.linear.bias.device.type != "meta":
            nn.init.ones_(self.linear.bias)
        device = self.linear.weight.device
        self.noise = nn.Parameter(torch.randn(4, device=device))
        self.register_buffer("mask", torch.ones(4, device=device) * self.noise.detach().to(device))


class Looking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        if self.weight.sum().item() > 0:
            self.weight.data.neg_()


class OutOfTurn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, device="cpu"))


class Viewing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))
        self.first = self.weight.data[0]


FACTORIES = {name: factory for name, (factory, _) in MODELS.items()} | {
    "peculiar": Peculiar,
    "asking": Asking,
}


def unborn_of(name: str) -> Unborn[nn.Module]:
    torch.manual_seed(SEED)
    return Unborn(FACTORIES[name])


def state_of(unborn: Unborn[nn.Module]) -> dict[str, torch.Tensor]:
    unborn.used = lambda: None
    return unborn.model.state_dict(keep_vars=True)


@pytest.mark.parametrize("name", FACTORIES)
def test_every_part_is_born_as_in_the_whole(name):
    """Whichever parameters a worker owns, and in whichever order they are born, they get the bits of a single device,
    and the random stream is where it would be."""
    whole = made(FACTORIES[name]).state_dict(keep_vars=True)
    after = torch.get_rng_state()
    names = sorted(whole)
    for parts in ((names[::2],), (names[1::2],), (names[::-1][:2], names)):
        unborn = unborn_of(name)
        assert torch.equal(torch.get_rng_state(), after)
        found, had = state_of(unborn), set()
        for owned in parts:
            torch.manual_seed(99)
            elsewhere = torch.get_rng_state()
            unborn.bear([found[key] for key in owned if isinstance(found[key], nn.Parameter)])
            assert torch.equal(torch.get_rng_state(), elsewhere)
            had |= {id(whole[key]) for key in owned}
        for key, tensor in whole.items():
            small = tensor.numel() <= 1 or not isinstance(tensor, nn.Parameter)
            assert type(found[key]) is type(tensor)
            assert is_away(found[key]) == (not small and id(tensor) not in had), key
            assert is_away(found[key]) or torch.equal(found[key], tensor), key


def test_what_a_module_keeps_for_itself_is_born_at_once():
    """Buffers, and tensors in its attributes, have their values from the start."""
    whole, unborn = made(Peculiar), unborn_of("peculiar")
    assert torch.equal(unborn.model.mask, whole.mask)
    assert torch.equal(unborn.model.rates[0], whole.rates[0])
    assert torch.equal(unborn.model.rates[1]["one"], whole.rates[1]["one"])


def test_tied_parameters_stay_tied_and_the_same_objects():
    """One parameter under two names is still one after it was born, and an optimizer that has it still does."""
    unborn = unborn_of("peculiar")
    embed = unborn.model.embed.weight
    unborn.bear([embed])
    assert unborn.model.head.weight is unborn.model.embed.weight is embed
    assert not is_away(embed)


def test_the_mark_tells_values_apart():
    """The same script and seed have the same mark, another seed has another."""
    assert unborn_of("lstm").mark == unborn_of("lstm").mark
    torch.manual_seed(SEED + 1)
    assert Unborn(FACTORIES["lstm"]).mark != unborn_of("lstm").mark


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_is_away_is_examined_and_cut(name):
    """Nothing has to be here for it: what is found out is what is found out about the whole, a few sections are born
    and played for their times, and nothing is here afterwards."""
    factory, draw = MODELS[name]
    example = draw(torch.Generator().manual_seed(1), 3)
    whole, unborn = made(factory), unborn_of(name)
    unborn.used = lambda: None
    there = examine(record(whole, loss_of, example), example)
    graph = record(unborn.model, loss_of, example)
    facts = examine(graph, example)
    assert facts == there
    pieces = build(graph, facts, [point.after for point in cut_points(facts)][::3])
    assert all(seconds > 0 for seconds in measured(pieces, example))
    assert all(is_away(param) for param in unborn.params)
    assert any_away(unborn.model)


def test_before_there_is_a_session_it_is_not_run_or_saved():
    """Whoever runs or saves it then reads in one line that there are no values yet."""
    unborn = unborn_of("lstm")
    with pytest.raises(Misuse, match="before Session"):
        unborn.model.state_dict()


@pytest.mark.parametrize(
    ("factory", "why"),
    [
        (Looking, "looks at values"),
        (OutOfTurn, "out of turn"),
        (Viewing, "keeps a view"),
        (lambda: nn.LazyLinear(3), "has lazy modules"),
    ],
)
def test_a_constructor_that_cannot_be_played_back_is_told(factory, why):
    """What reads its own values, draws elsewhere, or keeps a view is refused, and the error says so."""
    with pytest.raises(CannotPlayBack, match=why):
        Unborn(factory)
