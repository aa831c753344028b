"""Recording a model: what is recorded, what is kept whole, and what is refused with its line."""

import itertools
import random
import weakref
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from playing import MODELS, loss_of, made
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from agent.calibration.calibrate import key_of
from agent.errors import CannotRecord, Misuse
from agent.pipeline.stages.cut import Sections, TooShort, balance, build
from agent.pipeline.tracing.analysis import cut_points, examine
from agent.pipeline.tracing.recording.trace import record
from agent.schedule import Schedule

X, Y = torch.randn(3, 6), torch.zeros(3, dtype=torch.int64)


class Branching(nn.Module):
    """Looks at its values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return self.linear(x) if x.sum() > 0 else x


class Detached(nn.Module):
    """Computes a part without gradients."""

    def forward(self, x):
        with torch.no_grad():
            scale = x.abs().mean()
        return x / scale


class Noisy(nn.Module):
    """Draws what does not depend on its input."""

    def forward(self, x):
        return x + torch.randn(6)


class Dice(nn.Module):
    def forward(self, x):
        return x * random.random()


def chain(*middle):
    return nn.Sequential(nn.Linear(6, 6), *middle, nn.Linear(6, 5))


class Packing(nn.Module):
    """Keeps half of each number for its backward."""

    def forward(self, x):
        with saved_tensors_hooks(torch.Tensor.half, torch.Tensor.float):
            return x.sin()


@contextmanager
def elsewise():
    """As `torch.backends.mkldnn.flags(enabled=False)`, which warns of another library."""
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(True)


class Elsewise(nn.Module):
    def forward(self, x):
        with elsewise():
            return x.sin()


@pytest.mark.parametrize("part", [Branching, Detached, Noisy, Packing, Elsewise])
def test_what_cannot_be_recorded_is_kept_whole(part):
    """A module that placeholders cannot run through is one piece; the graph goes on around it."""
    model = made(lambda: chain(part()))
    graph = record(model, loss_of, (X, Y))
    assert [n.target for n in graph.graph.nodes if n.op == "call_module"] == [
        "model.0",
        "model.1",
        "model.2",
    ]
    torch.manual_seed(3)
    expected = loss_of(model, X, Y)
    torch.manual_seed(3)
    found = graph(X, Y)[0]
    assert torch.equal(found, expected)
    first = model[0].weight
    assert torch.equal(*(torch.autograd.grad(loss, first)[0] for loss in (found, expected)))


def test_what_is_saved_for_a_backward_of_stages_is_all_of_it():
    """Hooks of torch's own give back what they took. Those of the script's would be lost around the model."""

    def saving(hooks):
        def loss(model, x, y):
            with hooks():
                return loss_of(model, x, y)

        return record(made(chain), loss, (X, Y))

    assert saving(save_on_cpu).graph.nodes
    with pytest.raises(CannotRecord, match=r"in loss_of: .*saved_tensors_hooks.*depth 1"):
        saving(lambda: saved_tensors_hooks(torch.Tensor.half, torch.Tensor.float))


class Hooked(nn.Module):
    """Its backward is half of what it would be."""

    def forward(self, x):
        x = x.sin()
        x.grad_fn.register_prehook(lambda given: tuple(each / 2 for each in given))
        return x


@pytest.mark.parametrize("fixed", [False, True])
def test_a_hook_of_a_backward_is_called_in_it(fixed):
    """Hung up where the code runs to be recorded, no stage would have it: a module that does so is kept whole."""
    model = made(lambda: chain(Hooked()))
    graph = record(model, loss_of, (X, Y), fixed=fixed)
    first = model[0].weight
    found, expected = (
        torch.autograd.grad(loss(X, Y), first)[0] for loss in (graph, partial(loss_of, model))
    )
    assert torch.equal(found, expected)

    def hooked(model, x, y):
        return loss_of(model, Hooked.forward(model, x @ model[0].weight), y)

    with pytest.raises(CannotRecord, match=r"in forward: .*asks for `grad_fn`.*depth 1"):
        record(model, hooked, (X, Y), fixed=fixed)


@pytest.mark.parametrize("flags", [elsewise, lambda: sdpa_kernel(SDPBackend.MATH)])
@pytest.mark.parametrize("fixed", [False, True])
def test_what_runs_by_other_libraries_is_not_cut(flags, fixed):
    """Stages have the flags that are set around the loop, and another library, or another kernel of attention, rounds otherwise,
    if only in its backward."""

    def loss(model, x, y):
        with flags():
            return loss_of(model, x, y)

    with pytest.raises(CannotRecord, match=r"in loss_of: .*flags of torch\.backends.*depth 1"):
        record(made(chain), loss, (X, Y), fixed=fixed)


def frozen_by_method(layer):
    return layer.requires_grad_


def frozen_one_by_one(layer):
    def switch(wanted):
        for param in layer.parameters():
            param.requires_grad = wanted

    return switch


class Switching(nn.Linear):
    """Its weights learn nothing from its forward."""

    def forward(self, x):
        self.requires_grad_(False)
        out = super().forward(x)
        self.requires_grad_(True)
        return out


@pytest.mark.parametrize("how", [frozen_by_method, frozen_one_by_one])
@pytest.mark.parametrize("fixed", [False, True])
def test_weights_that_a_loss_freezes_are_not_cut(how, fixed):
    """As of a discriminator while its generator learns: the graph has its use, but not that it is frozen, so it would learn."""
    model = made(lambda: chain(nn.Linear(6, 6)))
    switch = how(model[1])

    def loss(model, x, y):
        switch(False)
        found = loss_of(model, x, y)
        switch(True)
        return found

    with pytest.raises(CannotRecord, match=r"in .*: .*it freezes or unfreezes a weight.*depth 1"):
        record(model, loss, (X, Y), fixed=fixed)
    assert all(param.requires_grad for param in model.parameters())
    record(model, lambda *given: loss_of(switch(True) or given[0], *given[1:]), (X, Y), fixed=fixed)


@pytest.mark.parametrize("fixed", [False, True])
def test_a_module_that_freezes_its_weights_is_kept_whole(fixed):
    model = made(lambda: chain(Switching(6, 6)))
    graph = record(model, loss_of, (X, Y), fixed=fixed)
    graph(X, Y)[0].backward()
    assert model[1].weight.grad is None
    assert model[0].weight.grad is not None


class Lending(nn.Module):
    """Its layer computes with other weights than its own, which are the same at first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.change = nn.Parameter(torch.zeros(6, 6))

    def forward(self, x):
        return functional_call(self.layer, {"weight": self.layer.weight + self.change}, (x,))


def adapted(model, x, y):
    """The loss behind a step of its own, as when it learns to learn."""
    weights = dict(model.named_parameters())
    found = torch.autograd.grad(loss_of(model, x, y), weights.values(), create_graph=True)
    after = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), found, strict=True)}
    return F.cross_entropy(functional_call(model, after, (x,)), y)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize(
    ("part", "loss"), [(Lending, loss_of), (nn.ReLU, adapted), (Detached, adapted)]
)
def test_a_module_computes_with_the_weights_that_it_is_lent(part, loss, fixed):
    """As a node it would compute with its own, and nothing would show while both are the same."""
    model = made(lambda: chain(part()))
    graph = record(model, loss, (X, Y), fixed=fixed)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.1)
    assert torch.equal(graph(X, Y)[0], loss(model, X, Y))


class Straight(torch.autograd.Function):
    """Rounds, and lets the gradient pass as if it did not."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


ROUND = Straight.apply  # as scripts keep it


class Rounding(nn.Module):
    def forward(self, x):
        return ROUND(x)


def with_shape(model, x, y):
    return F.cross_entropy(model(ROUND(x) * 2 if x.shape[0] > 2 else x), y)


@pytest.mark.parametrize("loss_of", [loss_of, with_shape])
def test_a_backward_of_ones_own_is_not_lost(loss_of):
    """It is called as it is, in a module that is kept whole and where the code runs on tensors."""
    model = made(lambda: chain(Rounding()))
    graph = record(model, loss_of, (X, Y))
    graph(X, Y)[0].backward()
    found = [param.grad.clone() for param in model.parameters()]
    model.zero_grad()
    loss_of(model, X, Y).backward()
    assert all(torch.equal(a, b.grad) for a, b in zip(found, model.parameters(), strict=True))
    assert ROUND(X).equal(X.round())


def mixed(model, x, y):
    share = torch.distributions.Beta(0.4, 0.4).sample()
    return F.cross_entropy(model(share * x + (1 - share) * x.flip(0)), y)


def test_a_backward_of_torchs_own_is_called(monkeypatch):
    """Which a draw from a distribution has: the graph's code has to call it, not to make an object of its class."""
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", False)
    model = made(chain)
    graph = record(model, mixed, (X, Y))
    torch.manual_seed(3)
    found = graph(X, Y)[0]
    torch.manual_seed(3)
    assert torch.equal(found, mixed(model, X, Y))


class Guess(nn.Module):
    """Gives a distribution, which looks at what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.width = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return torch.distributions.Normal(self.mean(x), self.width(x).exp())


class Heads(nn.Module):
    """Named as nothing can be named in Python's code."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(6, 6)
        self.heads = nn.ModuleDict({"class": nn.Linear(6, 5), "in": nn.Linear(6, 5)})

    def forward(self, x):
        h = self.into(x)
        return self.heads["class"](h) + self.heads["in"](h.tanh())


def test_modules_may_have_names_that_are_words_of_python():
    model = made(Heads)
    graph = record(model, loss_of, (X, Y))
    assert torch.equal(graph(X, Y)[0], loss_of(model, X, Y))
    facts = examine(graph, (X, Y))
    for point in cut_points(facts):
        assert len(build(graph, facts, [point.after])) == 2


def test_a_distribution_is_taken_apart(monkeypatch):
    """What complains of values that are not allowed is not asked while it is recorded, and is again behind that."""
    # Once something was compiled in this process, torch itself does not ask any more.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)

    def unlikely(model, x, y):
        return -model[1](model[0](x)).log_prob(x).mean()

    model = made(lambda: nn.Sequential(nn.Linear(6, 6), Guess()))
    graph = record(model, unlikely, (X, Y))
    called = [node.target for node in graph.graph.nodes if node.op == "call_module"]
    assert called == ["model.0", "model.1.mean", "model.1.width"]
    assert torch.equal(graph(X, Y)[0], unlikely(model, X, Y))
    with pytest.raises(ValueError, match="constraint"):
        torch.distributions.Normal(torch.zeros(1), -torch.ones(1))


def test_pythons_own_dice_are_refused():
    """Streams that do not travel from stage to stage are found, and the module is named."""
    graph = record(made(lambda: chain(Dice())), loss_of, (X, Y))
    with pytest.raises(CannotRecord, match=r"^model\.1.*random stream.*depth 1$"):
        examine(graph, (X, Y))


def test_a_stream_that_is_begun_for_each_microbatch_is_refused():
    """In a recording there would be one for all of them, which goes on from one to the next."""

    def noisy(model, x, y):
        own = torch.Generator().manual_seed(3)
        return F.cross_entropy(model(x + torch.randn(x.shape, generator=own)), y)

    with pytest.raises(CannotRecord, match=r"test_record\.py:\d+ in noisy.*Generator.*depth 1"):
        record(made(chain), noisy, (X, Y))


def test_no_cut_through_what_is_written_to():
    """Between a value and a write to its memory there is no cut-point, nor between uses of a written buffer."""
    factory, draw = MODELS["repeated"]
    example = draw(torch.Generator().manual_seed(1), 3)
    graph = record(made(factory), loss_of, example)
    names = [node.name for node in graph.graph.nodes]
    points = cut_points(examine(graph, example))
    assert points
    assert all(point.after >= names.index("add_") for point in points)


class Largest(nn.Module):
    """Keeps the largest value so far."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("most", torch.tensor(100.0))

    def forward(self, x):
        with torch.no_grad():
            self.most.copy_(torch.maximum(self.most, x.max()))
        return x / self.most


def test_a_buffer_that_is_the_same_after_it_was_written_to_was_written_to():
    """The microbatch that is looked at may change nothing by its write, and the next one does."""
    graph = record(chain(Largest()), loss_of, (X, Y))
    assert examine(graph, (X, Y)).written == {"model.1.most"}


def test_what_a_module_does_only_at_times():
    """A script may set the dropout later, or have a norm learn: both are called as they are, and nothing is recorded anew."""
    model = chain(nn.Dropout(0.0), nn.BatchNorm1d(6).eval())
    graph = record(model, loss_of, (X, Y))
    facts = examine(graph, (X, Y))
    nodes = list(graph.graph.nodes)
    assert [nodes[index].target for index in facts.draws] == ["model.1"]
    assert facts.written == {name for name, _ in graph.named_buffers()}


def bent(model, x):
    """How the model bends along its input."""
    x = x.requires_grad_(True)
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return torch.autograd.grad(slope.sum(), [x], create_graph=True)[0].square().mean()


def steep(model, x):
    """How its weights would change."""
    weights = [model[2].weight]
    found = torch.autograd.grad(model(x).sum(), weights, create_graph=True)
    return found[0].square().mean()


@pytest.mark.parametrize("derived", [bent, steep])
def test_no_cut_through_what_is_differentiated(derived):
    """What a forward asks derivatives of lies in one stage with all that they are of; before and behind it there are cuts."""
    middle = nn.Tanh(), nn.Linear(6, 6), nn.Tanh()

    def differentiated(model, x, y):
        return derived(model[1], model[0](x).detach()) + loss_of(model, x, y)

    model = made(lambda: nn.Sequential(nn.Linear(6, 6), chain(*middle)))
    graph = record(model, differentiated, (X, Y))
    calls = [node.target is torch.autograd.grad for node in graph.graph.nodes]
    facts = examine(graph, (X, Y))
    points = cut_points(facts)
    assert any(any(calls[: point.after + 1]) for point in points)
    for point in points:
        one, other = build(graph, facts, [point.after])
        sent = one.module(*[(X.clone(), Y)[index] for index in one.batch])
        sent = [each.detach().requires_grad_(each.requires_grad) for each in sent]
        (loss,) = other.module(*sent, *[(X.clone(), Y)[index] for index in other.batch])
        assert torch.equal(loss, graph(X.clone(), Y)[0])


def test_stages_own_their_parameters_only():
    """Together the stages hold every parameter; only a tied one is held twice."""
    factory, draw = MODELS["tied"]
    example = draw(torch.Generator().manual_seed(1), 3)
    model = made(factory)
    graph = record(model, loss_of, example)
    facts = examine(graph, example)
    pieces = build(graph, facts, Sections().choose(graph, facts, example, 3))
    held = [id(p) for piece in pieces for p in piece.module.parameters()]
    assert set(held) == {id(p) for p in model.parameters()}
    assert len(held) == len(set(held)) + 1


def test_what_is_fetched_and_not_used_belongs_to_no_cut():
    """An export fetches every parameter, also one that this loss does not depend on."""

    def with_shape(model, x, y):
        return F.cross_entropy(model(x * 2 if x.shape[0] > 2 else x), y)

    model = made(chain)
    model.register_parameter("unused", nn.Parameter(torch.ones(2)))
    graph = record(model, with_shape, (X, Y))
    facts = examine(graph, (X, Y))
    pieces = build(graph, facts, Sections().choose(graph, facts, (X, Y), 2))
    assert [piece.tied for piece in pieces] == [{}, {}]


def test_balance_finds_the_best_cuts():
    """The slowest stage is as fast as any choice of cuts allows; wide cuts are paid for."""
    assert balance([1, 1, 1, 1], [0, 0, 0], 2) == (1,)
    assert balance([4, 1, 1, 1, 1], [0] * 4, 2) == (0,)
    assert balance([1, 1, 1, 1, 1, 1], [0] * 5, 3) == (1, 3)
    assert balance([1, 1, 1, 1], [0, 5_000_000_000, 0], 2, 1e9) in ((0,), (2,))


def test_balance_spares_the_busiest_worker():
    """Stages of the same slowest time leave a worker with four blocks of six, or with three."""
    played = Schedule(
        name="interleaved",
        hosts=((0,), (1,), (0,), (1,)),
        microbatches=8,
        offsets=(0, 0, 0),
        codes=b"",
        update_every=8,
    )
    for noise in ([0, 0, 0, 0, 0, 0], [0.02, 0, 0, 0, 0.02, 0.02], [0, 0, 0.03, 0.01, 0, 0]):
        seconds = [1 + more for more in noise]
        cuts = balance(seconds, [0] * 5, 4, schedule=played)
        sizes = [b - a for a, b in itertools.pairwise((-1, *cuts, 5))]
        assert (sizes[0] + sizes[2], sizes[1] + sizes[3]) == (3, 3)
        assert max(sizes) == 2


def test_a_model_too_short_for_the_depth_is_told():
    """Asking for more stages than the model has room for says how many there can be."""
    with pytest.raises(TooShort, match="at most 2"):
        balance([1.0, 1.0], [0], 3)


def test_a_cut_where_none_is_possible_is_refused():
    """A position that is no cut-point is not cut at."""
    factory, draw = MODELS["resnet"]
    example = draw(torch.Generator().manual_seed(1), 3)
    graph = record(made(factory), loss_of, example)
    with pytest.raises(Misuse, match="cannot be cut"):
        build(graph, examine(graph, example), [10_000])


class Counting(nn.Module):
    """Looks at its values, and counts how many of those that any of its kind has seen are still there."""

    def __init__(self, seen, counts) -> None:
        super().__init__()
        self.seen, self.counts = seen, counts

    def forward(self, x):
        self.seen.append(weakref.ref(x))
        self.counts.append(sum(ref() is not None for ref in self.seen))
        return x * 2 if x.sum() > 0 else x * 3


def test_what_a_microbatch_computes_is_not_all_kept():
    """Looking at a graph takes the memory of a forward: what no node and no gradient needs any more goes."""
    seen, counts = [], []
    model = nn.Sequential(*[Counting(seen, counts) for _ in range(8)], nn.Linear(6, 5))
    graph = record(model, loss_of, [X, Y])
    seen.clear()
    counts.clear()
    examine(graph, [X, Y])
    assert len(counts) == 8
    assert max(counts) <= 3


def test_a_module_with_a_hook_of_its_backward_is_kept_whole():
    """Taken apart, nothing would call the hook: gradients are those of the model with its hook."""
    model = made(lambda: chain(nn.Sequential(nn.Linear(6, 6), nn.Tanh())))
    model[1].register_full_backward_hook(lambda _, found, __: tuple(0.5 * each for each in found))
    graph = record(model, loss_of, (X, Y))
    loss_of(model, X, Y).backward()
    expected = [param.grad for param in model.parameters()]
    model.zero_grad()
    graph(X, Y)[0].backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(expected, model.parameters(), strict=True))


class Doubled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


def key(model, code):
    graph = record(model, lambda net, x: net(x).mean(), [torch.ones(2, 6, 6)])
    return key_of(graph, {2: [torch.ones(2, 6, 6)]}, "a machine", code)


def test_what_was_measured_is_of_this_code():
    """What the graph shows by its name only is told by the files of the job; where it shows all, an edit changes
    nothing."""
    whole = nn.Sequential(nn.Linear(6, 6), Branching())
    assert key(whole, "one") != key(whole, "another")
    apart = nn.Sequential(Doubled(6, 6))
    assert key(apart, "one") == key(apart, "another")


def test_what_was_measured_is_of_these_settings():
    """Two layers of the same shape that do another amount of work."""
    one, other = (nn.Conv1d(6, 6, 1, stride=stride) for stride in (1, 2))
    assert key(one, "") != key(other, "")


@pytest.mark.parametrize("fixed", [False, True])
def test_a_number_of_numpys_is_recorded_as_the_one_that_it_is(fixed):
    """A temperature that `np.maximum` has made; its text is no number in code."""
    model, scale = nn.Sequential(nn.Linear(6, 6), nn.Tanh()), np.float64(0.5)

    def loss_of(model, x):
        return (model(x) / scale).mul(scale).square().mean()

    graph = record(model, loss_of, (X,), fixed=fixed)
    torch.testing.assert_close(graph(X)[0], loss_of(model, X), rtol=0.0, atol=0.0)
