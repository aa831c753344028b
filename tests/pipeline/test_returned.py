"""What a loss function may return, what it may not, and who scales the loss."""

import random
from typing import Any

import numpy as np
import playing
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from playing import alone, rows, same_weights, together
from torch import nn

from agent.errors import Misuse
from agent.pipeline.tracing.loss import record_loss
from agent.pipeline.tracing.recording.loss_value import called
from agent.pipeline.tracing.recording.trace import FIXED

WEIGHT = nn.Parameter(torch.tensor([2.0, 3.0]))
LOSS = WEIGHT.sum()

GOOD = {
    "a loss": (LOSS, {}),
    "a loss of one row": (LOSS.reshape(1, 1), {}),
    "numbers": ((LOSS, {"b": 1, "a": 0.5, "c": True}), {"a": 0.5, "b": 1.0, "c": 1.0}),
    "numbers of numpy": ((LOSS, {"a": np.float32(0.5), "b": np.int64(3)}), {"a": 0.5, "b": 3.0}),
    "tensors": (
        (LOSS, {"a": LOSS, "b": torch.tensor([2]), "c": torch.tensor(0.5).bfloat16()}),
        {"a": 5.0, "b": 2.0, "c": 0.5},
    ),
    "what is no number": ((LOSS, {"a": float("inf")}), {"a": float("inf")}),
    "nothing beside it": ((LOSS, {}), {}),
    "a dict with its loss": ({"loss": LOSS, "b": 1, "a": 0.5}, {"a": 0.5, "b": 1.0}),
}


@pytest.mark.parametrize("case", GOOD)
def test_what_may_be_returned(case: str) -> None:
    """The numbers come sorted by name."""
    given, metrics = GOOD[case]
    numbers = called(lambda batch: batch, given).numbers()
    assert numbers.names == tuple(metrics)
    assert numbers.values == (5.0, *metrics.values())


BAD = {
    "nothing": (None, "returned nothing; let it end with `return loss`"),
    "a number": (0.5, "returned a float as loss; return the tensor"),
    "a detached loss": (LOSS.detach(), "returned a loss without a gradient"),
    "a loss for each row": (WEIGHT * 2, r"returned a loss of shape \(2,\); reduce it"),
    "two losses": ((LOSS, LOSS), r"returned \(Tensor, Tensor\); return the loss"),
    "three things": ((LOSS, {}, 1), r"returned \(Tensor, dict, int\); return the loss"),
    "a dict": ({"a": LOSS}, "returned a dict as loss"),
    "a word": ((LOSS, {"a": "b"}), "returned 'a' as a str; let a metric be"),
    "a complex number": ((LOSS, {"a": 1j}), "returned 'a' as a complex"),
    "rows": ((LOSS, {"a": torch.ones(2)}), r"returned 'a' of shape \(2,\)"),
    "a number as a name": ((LOSS, {1: 1.0}), "a metric called 1; let its name be a string"),
    "two lines": ((LOSS, {"a\nb": 1.0}), "let its name be a string of one line"),
    "the loss once more": ((LOSS, {"loss": LOSS}), "a metric called 'loss'"),
    "too many": ((LOSS, {str(i): 0 for i in range(32)}), "returned 32 metrics; return at most 31"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_may_not_be_returned(case: str) -> None:
    """It is said in one line, where it is called and where it is recorded."""
    given, text = BAD[case]
    with pytest.raises(
        Misuse, match=r"^session\.backward\(loss_of, \.\.\.\): loss_of .*" + text
    ) as error:
        called(lambda batch: batch, given)
    assert "\n" not in str(error.value)
    model = nn.Linear(2, 2)

    def loss_of(batch: Any) -> Any:
        model(batch[0])
        return given

    with pytest.raises(Misuse, match=text):
        record_loss(model, loss_of, [(torch.ones(1, 2),)])


def test_a_loss_that_no_gradient_reaches() -> None:
    with pytest.raises(Misuse, match=r"computed under torch\.no_grad\(\)"), torch.no_grad():
        called(lambda batch: WEIGHT.sum(), None)


# --- the scale of a loss --------------------------------------------------------------------------------


def penalised(model: nn.Module, scaler: Any, x: torch.Tensor) -> torch.Tensor:
    """Scales what it differentiates, as torch's documentation has it, and returns the plain loss."""
    x = x.detach().requires_grad_()
    loss = model(x).square().mean()
    (slope,) = torch.autograd.grad(scaler.scale(loss), x, create_graph=True)
    return loss + (slope / 8.0).square().mean()


LOSSES = {
    "plain": lambda model, scaler, x: model(x).square().mean(),
    "scaled": lambda model, scaler, x: scaler.scale(model(x).square().mean()),
    "scaled, and then reduced": lambda model, scaler, x: scaler.scale(model(x).square()).mean(),
    "parts": lambda model, scaler, x: sum(scaler.scale([model(x).square().mean() / 2] * 2)),
    "a penalty": penalised,
    "told by sizes": lambda model, scaler, x: scaler.scale(model(x).square().mean() * len(x) / 3),
}


@pytest.mark.parametrize("case", LOSSES)
def test_a_loss_is_scaled_once(case: str) -> None:
    """By the function, or by who calls it: where it is trained, and where it is recorded."""
    torch.manual_seed(0)
    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    scaler, other = (torch.amp.GradScaler("cpu", init_scale=scale) for scale in (8.0, 1.0))
    loss_of = lambda batch: LOSSES[case](model, scaler, batch[0])  # noqa: E731
    found = called(loss_of, (x,), scaler)
    assert "scale" not in vars(scaler)
    plain = LOSSES[case](model, scaler if case == "a penalty" else other, x)
    assert torch.equal(found.loss, plain * 8.0)
    assert found.numbers(8.0).loss == plain.item()
    graph = record_loss(model, loss_of, [(x,)], scaler).graph
    assert bool(graph.meta.get(FIXED)) == (case in ("a penalty", "told by sizes"))
    assert torch.equal(graph(x)[0], found.loss)
    if case != "a penalty":
        scaler._scale.fill_(16.0)
        assert torch.equal(graph(x)[0], plain * 16.0)


def test_a_scaler_that_is_switched_off_scales_nothing() -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    assert called(lambda batch: WEIGHT.sum(), None, scaler).loss == 5.0
    assert called(lambda batch: scaler.scale(WEIGHT.sum()), None, scaler).loss == 5.0


# --- in layouts -----------------------------------------------------------------------------------------


def with_numbers(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
    logits = model(x)
    right = (logits.argmax(-1) == y).float().mean()
    early = x[0, 0] if type(x) is not torch.Tensor else x[0, 0].item()
    return F.cross_entropy(logits, y), {"right": right, "early": early, "drawn": torch.rand(())}


def sized(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
    loss, metrics = with_numbers(model, x, y)
    return loss * (x.shape[0] / 3), metrics


@pytest.mark.parametrize("loss", [with_numbers, sized])
@pytest.mark.parametrize("deterministic", [True, False])
def test_numbers_are_those_of_one_process(
    monkeypatch: pytest.MonkeyPatch, loss: Any, deterministic: bool
) -> None:
    """Their means over all microbatches, whoever computed these."""
    monkeypatch.setattr(playing, "loss_of", loss)
    layers = lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 5))  # noqa: E731
    expected = list[dict[str, float]]()
    losses, weights, streams = alone(layers, rows, 4, 2, told=expected)
    assert [sorted(each) for each in expected] == [["drawn", "early", "right"]] * 2
    told = list[dict[str, float]]()
    found, states, _ = together(
        layers,
        rows,
        "1f1b",
        2,
        (3, 1),
        steps=2,
        opener=streams.seed_for,
        deterministic=deterministic,
        told=told,
    )
    if deterministic:
        assert found == losses
        assert told == expected
        assert same_weights(states, weights) == []
    else:
        assert [pytest.approx(each) for each in expected] == told


def test_other_names_in_another_microbatch() -> None:
    """Nobody would know what the mean of these is."""
    dice = random.Random(3)
    layers = lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 5))  # noqa: E731

    def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
        return F.cross_entropy(model(x), y), {f"n{dice.random()}": 1.0}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(playing, "loss_of", loss_of)
        with pytest.raises(Misuse, match="return the same names for every microbatch"):
            alone(layers, rows, 2, 1)
