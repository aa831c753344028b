"""What a worker says of a microbatch and of its state."""

import torch

from agent.proof.batch import batch_of
from agent.proof.samples import Samples
from agent.protocol import Computed
from agent.store.layers import collect


class Best:
    """Something of the script's own that is saved."""

    def __init__(self) -> None:
        self.best = 1.0

    def state_dict(self) -> dict[str, float]:
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.best = state["best"]


def made() -> tuple[torch.nn.Module, torch.optim.Optimizer, Best]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)
    )
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(5, 3)).square().mean().backward()
    optimizer.step()
    return model, optimizer, Best()


def told(model: torch.nn.Module, optimizer: object, best: Best) -> dict[str, int]:
    samples = Samples(dict(model.named_parameters()), "m")
    state = collect({"model": model, "Adam1": optimizer, "Best2": best})  # type: ignore[dict-item]
    return {one.name: one.bits for one in samples.reached(3, 3, state).layers}


def changed(act: object) -> set[str]:
    model, optimizer, best = made()
    before = told(model, optimizer, best)
    with torch.no_grad():
        act(model, optimizer, best)  # type: ignore[operator]
    after = told(model, optimizer, best)
    return {name for name in before | after if before.get(name) != after.get(name)}


def test_what_differs_is_named_by_its_layer_or_its_object() -> None:
    """Weights, buffers, what optimizers keep and are set to, and what belongs to no layer."""
    assert changed(lambda model, *_: model[0].bias.add_(1e-6)) == {"0"}
    assert changed(lambda model, *_: model[1].running_mean.add_(1e-6)) == {"1"}
    assert changed(lambda model, *_: model[1].num_batches_tracked.add_(1)) == {"1"}
    moments = lambda model, optimizer, _: optimizer.state[model[2].weight]["exp_avg"].add_(1e-6)  # noqa: E731
    assert changed(moments) == {"2"}
    slower = lambda _, optimizer, __: optimizer.param_groups[0].update(lr=0.5)  # noqa: E731
    assert changed(slower) == {"0", "1", "2"}
    assert changed(lambda *each: setattr(each[2], "best", 0.5)) == {"Best2"}


def test_what_became_of_a_microbatch() -> None:
    """Its gradients by layers, of those layers that are here."""
    model, *_ = made()
    samples = Samples(dict(model.named_parameters()), "m")
    gradients = {name: param.grad for name, param in model.named_parameters()}
    batch = batch_of(torch.ones(2))
    all_of_it = samples.computed((7, 3, 2), batch, 0.5, samples.layers(3, gradients))
    assert isinstance(all_of_it, Computed)
    assert (all_of_it.version, all_of_it.microbatch, all_of_it.machine) == (7, 2, "m")
    assert [one.name for one in all_of_it.gradients] == ["0", "1", "2"]
    stage = {name: grad for name, grad in gradients.items() if name.startswith("2")}
    part = samples.computed((7, 3, 2), batch, 0.5, samples.layers(3, stage))
    assert part.gradients == all_of_it.gradients[2:]


def test_what_a_forward_has_written_to_buffers_is_told() -> None:
    """Layer by layer; a buffer that was not written to is another answer than one that was."""
    model, *_ = made()
    buffers = {name: each.detach() for name, each in model.named_buffers()}
    samples = Samples(dict(model.named_parameters()), "m", buffers)
    found = [
        samples.computed((7, 3, 2), batch_of(0), 0.5, {}, samples.written(3, left)).written
        for left in (buffers, {**buffers, "1.running_mean": None}, {})
    ]
    assert [[one.name for one in each] for each in found] == [["1"], ["1"], []]
    assert found[0] != found[1]
