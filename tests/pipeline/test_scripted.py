"""What a graph does depends on its microbatch, and one tensor has several names: stages have the bits of one process."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from scripted import Script, alone, check_every_cut, places, played
from torch import nn

from agent.errors import CannotRecord

WIDTH, CLASSES = 6, 5


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, CLASSES)


def rows(generator: torch.Generator, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(3, WIDTH, generator=generator)
    return x, torch.randint(0, CLASSES, (3,), generator=generator)


def given(more: Callable[[int], Any]) -> Callable[[torch.Generator, int], Any]:
    return lambda generator, number: (*rows(generator, number), more(number))


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y, *more = batch
    return F.cross_entropy(model(x, *more), y)


# --- random numbers ---------------------------------------------------------------------------------------


class Between(Three):
    """`noise` twice, and a dropout behind."""

    def noise(self, x, given):
        return F.dropout(x, given)

    def forward(self, x, given):
        x = self.noise(torch.tanh(self.a(x)), given)
        x = self.noise(torch.tanh(self.b(x)), given)
        return self.out(F.dropout(self.c(x), 0.3))


class Masked(Between):
    def noise(self, x, given):
        return x + torch.zeros_like(x).masked_scatter(given, torch.randn_like(x[given]))


class Counted(Between):
    def noise(self, x, given):
        return torch.cat([x[:given] + torch.randn(given, WIDTH), x[given:]])


class Arriving(Between):
    def noise(self, x, given):
        return x + torch.poisson(given)


DRAWING = {
    "a rate": (Between, lambda number: 0.0 if number == 0 else 0.5),
    "a mask": (Masked, lambda number: torch.full((3, WIDTH), number > 0)),
    "a count": (Counted, lambda number: number),
    "a mean": (Arriving, lambda number: torch.full((3, WIDTH), float(number))),
}


@pytest.mark.parametrize("case", DRAWING)
def test_what_a_microbatch_draws_may_be_told_by_it(case: str) -> None:
    """The microbatch that is looked at draws nothing."""
    model, more = DRAWING[case]
    check_every_cut(Script(model, given(more), loss))


# --- one tensor, several names ----------------------------------------------------------------------------


class Named(Three):
    """A value with another name, and uses of both in turn."""

    def __init__(self, again: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.again = again

    def forward(self, x):
        h = torch.tanh(self.a(x))
        k = self.again(h)
        found = torch.sigmoid(self.c(h * 0.3)) + k * 0.7 + torch.sin(h) * 1.3 + k.exp() * h
        return self.out(found + self.b(h))


AGAIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as it is": torch.Tensor.contiguous,
    "of its type": torch.Tensor.float,
    "of several": lambda h: torch.broadcast_tensors(h)[0],
}


@pytest.mark.parametrize("case", AGAIN)
def test_one_value_with_two_names_has_one_gradient(case: str) -> None:
    check_every_cut(Script(lambda: Named(AGAIN[case]), rows, loss))


class Autocast(Named):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


def test_one_value_with_two_names_under_an_autocast() -> None:
    check_every_cut(Script(lambda: Autocast(torch.Tensor.contiguous), rows, loss))


class Weight(Three):
    """A weight goes through a layer that gives it back."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.same = nn.Parameter(torch.randn(3, WIDTH)), nn.Identity()

    def forward(self, x):
        w = self.same(self.weight)
        h = torch.tanh(self.b(self.a(x) * w)) * self.weight
        return self.out(torch.tanh(self.c(h) * w) + self.weight * w)


def test_a_weight_that_is_a_value_as_well_has_one_gradient() -> None:
    check_every_cut(Script(Weight, rows, loss))


# --- one memory, several tensors --------------------------------------------------------------------------


class Rows(Three):
    """A buffer is written to under one name, and read under another."""

    def __init__(self, *, apart: bool) -> None:
        super().__init__()
        self.register_buffer("both", torch.zeros(2, WIDTH))
        self.register_buffer("first", (self.both.data if apart else self.both)[0])

    def forward(self, x):
        x = self.b(torch.tanh(self.a(x)))
        with torch.no_grad():
            self.first.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        x = torch.tanh(self.c(x - self.both[0]))
        return self.out(x - self.both.sum(0))


@pytest.mark.parametrize("apart", [False, True])
def test_a_buffer_in_the_memory_of_another(apart: bool) -> None:
    check_every_cut(Script(lambda: Rows(apart=apart), rows, loss))


# --- what is refused in the step --------------------------------------------------------------------------


def refused_somewhere(script: Script, why: str) -> None:
    """At each place the bits are those of one process, or it is said why not."""
    losses, _, streams = alone(script)
    refused = 0
    for _, cut in places(script):
        try:
            found, _ = played(script, cut, streams)
        except CannotRecord as error:
            assert why in str(error)
            refused += 1
        else:
            assert found == losses
    assert refused


class Halved(Three):
    """What is written to is a copy of several rows, and no copy of one."""

    def forward(self, x):
        h = self.a(x).detach()
        t = h.t().contiguous()
        e = self.b(x)
        t.mul_(0.5)
        return self.out(self.c(torch.sin(h)) + e + t.t())


def ever_fewer(generator: torch.Generator, number: int) -> tuple[torch.Tensor, ...]:
    return tuple(each[: 3 - number] for each in rows(generator, number))


def test_memory_that_is_shared_in_one_microbatch_only_is_not_written_to() -> None:
    refused_somewhere(Script(Halved, ever_fewer, loss), "writes into what another stage has")


class Erasing(nn.Module):
    """Rows are erased by NumPy's stream, where the microbatch has any to erase."""

    def forward(self, x, given):
        if not given.any():
            return x
        return x * torch.from_numpy(np.random.random(WIDTH) < 0.5)


class Erased(Three):
    def __init__(self) -> None:
        super().__init__()
        self.erase = Erasing()

    def forward(self, x, given):
        return self.out(self.c(self.erase(torch.tanh(self.b(torch.tanh(self.a(x)))), given)))


def test_a_stream_that_does_not_travel_is_found_where_the_first_microbatch_did_not_draw() -> None:
    script = Script(Erased, given(lambda number: torch.full((3,), number > 0)), loss)
    refused_somewhere(script, "draws from Python's or numpy's random stream")


# --- what a forward sets ----------------------------------------------------------------------------------


class Normed(Three):
    """A part of it, as small as may be, sets the momentum of the norm that it calls."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Momentum()

    def forward(self, x):
        return self.out(self.part(self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))))


class Momentum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        self.norm.momentum = 0.7
        return torch.tanh(self.norm(x))


def test_what_a_module_sets_of_another_is_set_in_a_stage() -> None:
    """Both are called as one."""
    assert "model_part" in check_every_cut(Script(Normed, rows, loss))


def setting(model: nn.Module, batch: Any) -> torch.Tensor:
    model.part.norm.momentum = 0.2
    return loss(model, batch)


class Set(Normed):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.BatchNorm1d(WIDTH))
        self.part.norm = self.part[0]


def test_what_a_loss_sets_of_a_module_is_refused_by_name() -> None:
    with pytest.raises(CannotRecord, match=r"it sets 'momentum' of 'part.0'"):
        places(Script(Set, rows, setting))
