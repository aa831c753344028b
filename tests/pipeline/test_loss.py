"""A loss function is recorded: with placeholders, with tensors as they are, or refused with a line."""

import collections
import copy
import random
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from agent.errors import CannotRecord, Misuse
from agent.output.metrics import Log
from agent.pipeline import autocast_nodes
from agent.pipeline.stages.stage import Stage
from agent.pipeline.tracing import variants
from agent.pipeline.tracing.analysis import Facts, cut_points, examine
from agent.pipeline.tracing.closures.closure import closed_over
from agent.pipeline.tracing.graphs import Recording, mark_of
from agent.pipeline.tracing.loss import _as_before, record_loss, same_graph
from agent.pipeline.tracing.recorder import Recorder
from agent.pipeline.tracing.recording.trace import FIXED, METRICS
from agent.pipeline.tracing.variants import Pieces, Variant, Variants, form_of
from agent.tensors.absent import nothing

Batch = tuple[torch.Tensor, torch.Tensor]


def small(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3), *more)


def batches(step: int = 0, rows: int = 5) -> list[Batch]:
    generator = torch.Generator().manual_seed(step)
    return [(torch.randn(rows, 4, generator=generator), torch.arange(rows) % 3) for _ in range(2)]


def plain(model: nn.Module) -> Callable[[Any], torch.Tensor]:
    return lambda batch: F.cross_entropy(model(batch[0]), batch[1])


def recorded(model: nn.Module, loss_of: Callable[[Any], Any], given: Any = None) -> Recording:
    """The recording computes what the function computes."""
    given = batches() if given is None else given
    found = record_loss(model, loss_of, given)
    assert cut_points(found.facts)
    for batch in given:
        torch.manual_seed(3)
        expected = loss_of(batch)
        torch.manual_seed(3)
        leaves = found.flatten(batch)
        loss, *_ = leaves.variant.graph(*leaves)
        assert torch.equal(loss, expected[0] if isinstance(expected, tuple) else expected)
    return found


# --- what a microbatch may be ---------------------------------------------------------------------------


class Encoded(collections.UserDict):  # type: ignore[type-arg]
    """As libraries hand it out."""

    def __getattr__(self, name: str) -> Any:
        if name == "data":
            raise AttributeError(name)
        return self.data[name]


class Held:
    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.more, self.weight, self.name = x, {"y": y}, 1.0, "a"


def collecting(model: nn.Module, batch: Batch) -> torch.Tensor:
    losses = {row: F.cross_entropy(model(batch[0]), batch[1]) for row in range(2)}
    parts = [*losses.values(), torch.zeros(())]
    parts[0] = parts[0] + 0.0
    return sum(parts, torch.zeros(())) / 2


MADE_OF = {
    "a pair": (lambda x, y, _: (x, y), lambda m, b: F.cross_entropy(m(b[0]), b[1])),
    "a dict": (lambda x, y, _: {"x": x, "y": y}, lambda m, b: F.cross_entropy(m(b["x"]), b["y"])),
    "a dictionary of a library": (
        lambda x, y, _: Encoded(x=x, y=y),
        lambda m, b: F.cross_entropy(m(b["x"]), b.y),
    ),
    "an object": (
        lambda x, y, _: Held(x, y),
        lambda m, b: F.cross_entropy(m(b.x), b.more["y"]) * b.weight,
    ),
    "a number in it": (
        lambda x, y, each: (x, y, 0.5 + each),
        lambda m, b: F.cross_entropy(m(b[0]), b[1]) * b[2] + (1 - b[2]),
    ),
    "a number that decides": (
        lambda x, y, each: (each, x, y),
        lambda m, b: F.cross_entropy(m(b[1]), b[2]) * (2 if b[0] > 0 else 1),
    ),
    "nothing in it": (
        lambda x, y, _: {"x": x, "mask": None, "more": (y, None)},
        lambda m, b: F.cross_entropy(m(b["x"] if b["mask"] is None else 0), b["more"][0]),
    ),
    "parts": (lambda x, y, _: (x, y), collecting),
}


@pytest.mark.parametrize("case", MADE_OF)
def test_a_loss_is_recorded(case: str) -> None:
    """However its microbatch is made, the graph computes the loss that the function computes."""
    made_of, loss = MADE_OF[case]
    model = small()
    recorded(model, lambda b: loss(model, b), [made_of(*b, i) for i, b in enumerate(batches())])


def test_a_loss_that_differentiates_where_it_draws() -> None:
    """What is run to compare with needs what its forward saves, and draws the same when it is run for that once more."""
    model = small()

    def loss_of(batch: Batch) -> torch.Tensor:
        x = (batch[0] + torch.randn_like(batch[0])).requires_grad_()
        found = model(x)
        (slope,) = torch.autograd.grad(found.square().sum(), x, create_graph=True)
        return F.cross_entropy(found, batch[1]) + slope.square().mean()

    recorded(model, loss_of)


def test_what_an_object_holds_besides_is_the_same_in_each() -> None:
    """It is part of what was recorded."""
    model = small()
    found = recorded(
        model, lambda b: MADE_OF["an object"][1](model, b), [Held(*b) for b in batches()]
    )
    batch = Held(torch.zeros(5, 4), torch.zeros(5, dtype=torch.int64))
    found.flatten(batch)
    batch.weight = 2.0
    found.flatten(batch)
    batch.name = "b"
    with pytest.raises(
        CannotRecord, match=r"this microbatch is Held\(.*name='b'\), and .*name='a'"
    ):
        found.flatten(batch)


def test_what_is_not_there_in_some_microbatches_is_named() -> None:
    model = small()
    found = recorded(model, plain(model))
    with pytest.raises(
        CannotRecord, match=r"is \(Tensor, None\), and the one that was recorded \(Tensor, Tensor\)"
    ):
        found.flatten((torch.zeros(5, 4), None))


BAD = {
    "a value": (
        lambda b, loss: (b, lambda m: float(loss(m).detach()) * loss(m)),
        r"test_loss\.py:\d+ in <lambda>: this line cannot be recorded",
    ),
    "a number of numpy's": (
        lambda b, loss: ((*b, np.float64(1)), loss),
        "loss_of reads a float64 of its microbatch;",
    ),
    "not tensors": (lambda b, loss: ((*b, "a"), loss), "loss_of reads a str of its microbatch;"),
    "nothing else": (lambda b, loss: (["a", "b"], loss), "a microbatch is made of list of texts;"),
    "a draw that does not travel": (
        lambda b, loss: (b, lambda m: loss(m) * random.random()),
        "it draws",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_cut_is_said(case: str) -> None:
    """In one line, with what to do."""
    change, text = BAD[case]
    model = small()
    given, losses = [], []
    for batch in batches():
        made, loss = change(batch, lambda m, b=batch: F.cross_entropy(m(b[0]), b[1]))
        given.append(made)
        losses.append(loss)

    def loss_of(batch: Any) -> torch.Tensor:
        if case == "a value":
            loss = F.cross_entropy(model(batch[0]), batch[1])
            return loss * float(loss.detach())
        loss = F.cross_entropy(model(batch[0]), batch[1])
        if len(batch) == 3:
            loss = loss * {"a": 2.0}.get(batch[2], 1.0)
        return loss * random.random() if case.startswith("a draw") else loss

    with pytest.raises(CannotRecord, match=text.replace("<lambda>", "loss_of")) as error:
        record_loss(model, loss_of, given)
    assert str(error.value).count("\n") == 0


def rows_and_places() -> list[Batch]:
    """Microbatches of other rows, and of other places to write to."""
    pairs = zip(batches(0, 1), batches(1, 1), strict=True)
    return [
        (one[0], torch.tensor([at])) for at, one in enumerate(each for p in pairs for each in p)
    ]


def set_by_index(made: torch.Tensor, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    made[at % 3] = x.mean()
    return made


def set_through_a_view(made: torch.Tensor, _: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    made.view(1, 3)[0].index_fill_(0, at % 3, 5.0)
    return made


def scaled_in_place(made: torch.Tensor, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    made *= x[0, :3]
    return made


def masked(made: torch.Tensor, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return made.masked_fill_(x[0, :3] > 0, 2.0)


@pytest.mark.parametrize("write", [set_by_index, set_through_a_view, scaled_in_place, masked])
def test_what_is_written_into_a_tensor_of_the_losss_own_is_gone_in_the_next_microbatch(
    write: Callable[..., torch.Tensor],
) -> None:
    """It is a constant of the recording, as it is made without the microbatch: weights, targets, sums."""
    model = small()
    recorded(
        model,
        lambda batch: (model(batch[0]) * write(torch.ones(3), *batch)).mean(),
        rows_and_places(),
    )


def described(number: int, rows: int) -> dict[str, Any]:
    """A batch as data sets of libraries give it: with where each sample comes from."""
    x, y = batches(number, rows)[0]
    about = {"split": "train", "taken": np.datetime64("2026-01-01"), "box": [{"of": "a"}] * rows}
    return {"x": x, "y": y, "path": [f"{number}.png"] * rows, "from": f"shard {number}", **about}


def test_what_a_loss_does_not_read_may_be_anything() -> None:
    """Of any length, as there are as many names as rows."""
    model = small()
    recorded(
        model,
        lambda batch: F.cross_entropy(model(batch["x"]), batch["y"]),
        [described(0, 5), described(1, 4)],
    )


class Told(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = small()

    def forward(self, x: torch.Tensor, path: object) -> torch.Tensor:
        return self.parts(x)


def test_what_a_module_gets_and_does_not_read_may_be_anything() -> None:
    model = Told()
    recorded(
        model,
        lambda batch: F.cross_entropy(model(batch["x"], batch["path"]), batch["y"]),
        [described(0, 5), described(1, 4)],
    )


READ = {
    "compared": lambda batch: batch["split"] == "train",
    "looked up": lambda batch: {"train": 2.0}[batch["split"]],
    "counted": lambda batch: len(batch["path"]),
    "taken apart": lambda batch: float(batch["from"].split()[1]),
    "shown": lambda batch: len(f"{batch['from']}"),
    "asked for its type": lambda batch: 2.0 if isinstance(batch["path"], list) else 1.0,
}


@pytest.mark.parametrize("how", READ)
def test_a_loss_that_reads_what_is_no_tensor_is_not_cut(how: str) -> None:
    """The recording would have that of the first microbatch."""
    model = small()

    def loss_of(batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"]) * READ[how](batch)

    with pytest.raises(
        CannotRecord, match=r"loss_of reads a \w+ of|asks what its inputs are"
    ) as why:
        record_loss(model, loss_of, [described(0, 5), described(1, 5)])
    if how == "counted":
        assert "loss_of reads a list of texts of its microbatch" in str(why.value)


SPARSE = (
    "a part of the microbatch",
    "a tensor that loss_of reads",
    "the buffer '0.near'",
    "the result of to_sparse",
)


@pytest.mark.parametrize("what", SPARSE)
def test_what_is_sparse_is_named(what: str) -> None:
    """As a graph's neighbours are, whose memory no analysis can look at."""
    model, kept = small(), torch.eye(5).to_sparse()
    if "buffer" in what:
        model[0].register_buffer("near", torch.eye(5).to_sparse(), persistent=False)
    given = torch.eye(5).to_sparse() if "part" in what else torch.eye(5)

    def loss_of(batch: Any) -> torch.Tensor:
        x, y, near = batch
        if "reads" in what:
            near = kept
        elif "buffer" in what:
            near = model[0].near
        elif "result" in what:
            near = near.to_sparse()
        return F.cross_entropy(torch.sparse.mm(near, model(x)), y)

    with pytest.raises(CannotRecord, match=rf"^{what} is of torch\.sparse_\w+, .* depth 1$"):
        record_loss(model, loss_of, [(*batch, given) for batch in batches()])


def test_what_fails_is_told_as_it_is() -> None:
    """By the function itself, where it is trained: a recording says only that there is none."""
    model = small()

    def loss_of(batch: Batch) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1][:2])

    with pytest.raises(CannotRecord, match=r"fails on the first microbatch: .* batch_size"):
        record_loss(model, loss_of, batches())


# --- the numbers beside a loss --------------------------------------------------------------------------


def placeholders(model: nn.Module) -> Callable[[Batch], Any]:
    def loss_of(batch: Batch) -> Any:
        logits = model(batch[0])
        right = (logits.argmax(-1) == batch[1]).float()
        loss = F.cross_entropy(logits, batch[1])
        return loss, {"right": right.mean(), "loss once": loss.item(), "first": batch[0][0, 0]}

    return loss_of


def as_they_are(model: nn.Module) -> Callable[[Batch], Any]:
    """Its code asks how large its inputs are, and shows a number that nobody goes by."""

    def loss_of(batch: Batch) -> Any:
        x, y = batch
        rows = x.shape[0] if type(x) is torch.Tensor else 0
        logits = model(x).view(rows, 3)
        with torch.no_grad():
            right = (logits.argmax(-1) == y).sum().item()
        assert f"{right:5}".strip() == repr(right)
        first = x[0, 0].item()
        metrics = {"right": right / rows, "first": round(first - 1, 2), "rows": rows}
        return F.cross_entropy(logits, y), metrics

    return loss_of


@pytest.mark.parametrize("how", [placeholders, as_they_are])
def test_numbers_beside_the_loss(how: Callable[[nn.Module], Any]) -> None:
    """They come behind it, sorted by name, of each microbatch; nobody records another graph for that."""
    model = small()
    loss_of = how(model)
    found = recorded(model, loss_of)
    assert bool(found.fixed) == (how is as_they_are)
    for batch in (*batches(1), *batches(2)):
        leaves = found.flatten(batch)
        assert leaves.variant is found.variants.first
        loss, *numbers = leaves.variant.graph(*leaves)
        expected, metrics = loss_of(batch)
        assert torch.equal(loss, expected)
        names = leaves.variant.graph.meta[METRICS]
        assert names == tuple(sorted(metrics))
        assert [float(each) for each in numbers] == [float(metrics[name]) for name in names]


@pytest.mark.parametrize("how", [placeholders, as_they_are])
def test_numbers_beside_the_loss_cross_cuts(how: Callable[[nn.Module], Any]) -> None:
    """Wherever it is cut, the last stage says them."""
    model = small()
    loss_of = how(model)
    found = recorded(model, loss_of)
    batch = batches(1)[0]
    loss, metrics = loss_of(batch)
    leaves = found.flatten(batch)
    for point in cut_points(found.facts):
        arrived = None
        for piece in Pieces(found.variants.first, [point.after]).first:
            stage = Stage(piece, microbatches=1)
            arrived = stage.forward(0, arrived, leaves)
        told = stage.release(0)
        assert told.names == tuple(sorted(metrics))
        assert [*told.values] == [loss.item(), *(float(metrics[n]) for n in told.names)]


def test_a_number_that_the_loss_goes_by_is_looked_at() -> None:
    """Then a microbatch for which it is another one has another graph, as ever."""
    model = small()

    def loss_of(batch: Batch) -> Any:
        x, y = batch
        kind = type(x) is torch.Tensor
        many = y.max().item()
        loss = F.cross_entropy(model(x), y)
        return (loss * 2 if many > 1 and kind else loss), {"many": many}

    found = recorded(model, loss_of)
    few = torch.zeros(5, dtype=torch.int64)
    assert found.flatten((batches()[0][0], few)).variant is not found.variants.first


def test_a_loss_that_logs_a_number_is_not_recorded_and_no_misuse() -> None:
    """It trains with depth 1: a number that is logged is read."""
    model, log = small(), Log(None)

    def loss_of(batch: Batch) -> torch.Tensor:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        log.add(0, {"loss": loss.item()})
        return loss

    with pytest.raises(CannotRecord, match="looks at values"):
        recorded(model, loss_of)


def test_a_type_that_the_loss_asks_for_makes_another_graph() -> None:
    """Two microbatches of one shape are no longer taken for the same computation."""
    model = small()

    def loss_of(batch: Batch) -> torch.Tensor:
        x, y = batch
        scale = 2.0 if x.dtype == torch.float64 else 1.0
        return F.cross_entropy(model(x.float() * scale).view(len(y), -1), y)

    (x, y), second = batches()
    found = recorded(model, loss_of, [(x, y), second])
    assert found.fixed
    wide = found.flatten((x.double(), y))
    loss, *_ = wide.variant.graph(*wide)
    assert torch.equal(loss, loss_of((x.double(), y)))
    assert not torch.equal(loss, loss_of((x, y)))


def test_a_type_that_the_loss_asks_for_in_silence_is_found_out() -> None:
    """A placeholder answers `is` with no, and says nothing; its graph holds for all other types."""
    model = small()

    def loss_of(batch: Batch) -> torch.Tensor:
        x, y = batch
        scale = 2.0 if x.dtype is torch.float64 else 1.0
        return F.cross_entropy(model(x.float() * scale), y)

    (x, y), second = batches()
    found = recorded(model, loss_of, [(x, y), second])
    assert not found.fixed
    assert found.flatten((x.half(), y)).variant is found.variants.first
    with pytest.raises(CannotRecord, match="computes another loss than it does when it is called"):
        found.flatten((x.double(), y))


@pytest.mark.parametrize("fixed", [True, False])
def test_memory_that_is_shared_by_one_type_only_is_not_cut_through(fixed: bool) -> None:
    """`x.float()` of a float is the same tensor, so what is written to it shows in x."""
    model = small()

    def loss_of(batch: Batch) -> torch.Tensor:
        x, y = batch
        wide = x.float()
        loss = F.cross_entropy(model(wide), y)
        if not fixed or len(x):
            wide.mul_(2)
        return loss + model(x.float()).mean()

    rows = [(x, y) for x, y in batches()]
    frozen = [*model.parameters()]
    for param in frozen[:2]:  # so that no backward needs what is written over
        param.requires_grad_(False)
    found = recorded(model, loss_of, [(x.double(), y) for x, y in rows])
    assert found.fixed is fixed
    with pytest.raises(CannotRecord, match="writes into the microbatch, of which every stage has"):
        found.flatten(rows[0])


def test_other_names_make_another_graph() -> None:
    model = small()
    graphs = [
        record_loss(model, lambda b, n=name: (plain(model)(b), {n: 1.0}), batches()).graph
        for name in ("one", "other")
    ]
    assert mark_of(graphs[0]) != mark_of(graphs[1])


def test_what_a_hook_collected_of_an_earlier_microbatch_is_no_constant() -> None:
    """A teacher is one node, in which placeholders call no hook, and what is there equals on that microbatch."""
    model, seen = small(), dict[str, torch.Tensor]()
    teaching = small().requires_grad_(False)
    teaching[0].register_forward_hook(lambda _, __, out: seen.update(hidden=out))

    def loss_of(batch: Batch) -> torch.Tensor:
        with torch.no_grad():
            teaching(batch[0])
        return plain(model)(batch) + (model[0](batch[0]) - seen["hidden"]).pow(2).mean()

    given = batches()
    loss_of(given[0])
    with pytest.raises(CannotRecord, match="train with depth 1"):
        record_loss(model, loss_of, given)


def test_what_a_forward_has_left_in_a_module_makes_no_other_graph() -> None:
    """As attention keeps its weights to be looked at: a worker that joins has done no validation yet."""
    models = [small(), small()]
    models[0][0].seen = torch.zeros(3)
    weight = torch.ones(())
    found = [recorded(model, lambda b, m=model: as_they_are(m)(b)[0] * weight) for model in models]
    assert found[0].fixed
    assert found[0].mark == found[1].mark


def test_a_model_that_returns_both_at_once() -> None:
    """It looks at values, so it is one piece, and a placeholder cannot say what is in it."""

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small()

        def forward(self, batch: Batch) -> Any:
            loss = F.cross_entropy(self.inner(batch[0]), batch[1])
            return loss, {"positive": 1.0 if batch[0].sum() > 0 else 0.0}

    model = Whole()
    found = record_loss(model, model, batches())
    assert found.graph.meta[METRICS] == ("positive",)


# --- what a recording leaves ----------------------------------------------------------------------------


def test_a_distribution_of_weights_that_are_not_here() -> None:
    """The loss is called to compare with it, and a distribution would complain of what is no number."""
    model = small()
    for param in model.parameters():
        param.data = nothing(param.data)

    def loss_of(batch: Batch) -> torch.Tensor:
        found = torch.distributions.Normal(model(batch[0]), 1.0)
        return -found.log_prob(batch[0][:, :3]).mean()

    assert cut_points(record_loss(model, loss_of, batches()).facts)


def test_a_graph_that_fails_leaves_the_modes_as_they_were() -> None:
    """In the middle of a stretch without gradients: the script trains on in one piece, and needs them."""
    with pytest.raises(ZeroDivisionError), _as_before(nn.Linear(1, 1)):
        autocast_nodes.grad(enabled=False)
        raise ZeroDivisionError
    assert torch.is_grad_enabled()


def test_what_a_recording_does_is_not_seen(capsys: pytest.CaptureFixture[str]) -> None:
    """It prints nothing, and leaves buffers, gradients and random streams as they were."""
    model = small(nn.BatchNorm1d(3))
    before = copy.deepcopy(model.state_dict())

    def loss_of(batch: Batch) -> torch.Tensor:
        sys.stdout.write("called")
        return F.cross_entropy(F.dropout(model(batch[0])), batch[1])

    torch.manual_seed(5)
    streams = torch.get_rng_state(), random.getstate()
    record_loss(model, loss_of, batches())
    assert torch.equal(streams[0], torch.get_rng_state())
    assert streams[1] == random.getstate()
    assert capsys.readouterr().out == ""
    assert all(param.grad is None for param in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Schedule:
    """As those of libraries keep their table where their last microbatch was."""

    def __init__(self) -> None:
        self.betas, self.cache = torch.ones(5), {}  # type: ignore[var-annotated]

    def weighed(self, loss: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        self.betas = self.betas.to(device=x.device)
        self.last, self.cache["x"] = x, [x]
        return loss * self.betas.mean() * len(x)


LAST: Any = None


def test_a_recording_leaves_no_placeholders() -> None:
    """In objects, in what these hold, in globals, and in names of the function around. What asks placeholders something
    that these cannot answer is called with tensors."""
    model, here = small(), None
    trainer = types.SimpleNamespace(parts=[1], schedule=Schedule())

    def loss_of(batch: Batch) -> torch.Tensor:
        nonlocal here
        global LAST
        x, y = batch
        LAST, here = x, x
        return trainer.schedule.weighed(F.cross_entropy(model(x), y), x)  # type: ignore[no-any-return]

    found = record_loss(model, loss_of, batches())
    assert found.graph.meta.get(FIXED)
    left = (
        LAST,
        here,
        trainer.schedule.betas,
        trainer.schedule.last,
        trainer.schedule.cache["x"][0],
    )
    assert [type(each) for each in left] == [torch.Tensor] * 5


KEEPS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {}
CARRIES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {}


def named(table: dict[str, Any], name: str) -> Callable[[Any], Any]:
    return lambda function: table.setdefault(name, function)


@named(KEEPS, "a mask")
def mask(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.kept = torch.ones_like(x) if self.kept is None else self.kept
    return x * self.kept


@named(KEEPS, "what was seen last")
def seen_last(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.kept = x
    return x + self.kept


@named(CARRIES, "a hidden state")
def hidden(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = x if self.kept is None else x + self.kept
    self.kept = x.detach()
    return x


@named(CARRIES, "a list of states")
def states(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = x + sum(self.seen)
    self.seen[:] = [x.detach()]
    return x


class Keeper(nn.Module):
    def __init__(self, how: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.how, self.kept = (how,), None
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.how[0](self, x)


@pytest.mark.parametrize("case", KEEPS)
def test_a_recording_leaves_modules_as_they_were(case: str) -> None:
    """What a forward notes down in its module, while it is recorded, is no placeholder that the next one finds."""
    model = small(Keeper(KEEPS[case]))
    keeper = model[3]
    record_loss(model, plain(model), batches())
    assert (keeper.kept, keeper.seen) == (None, [])


@pytest.mark.parametrize("case", CARRIES)
def test_what_a_module_carries_over_is_refused(case: str) -> None:
    """The next microbatch may be another worker's: it is refused, whether it could be recorded or not."""
    model = small(Keeper(CARRIES[case]))
    with pytest.raises(Misuse, match="has another loss when it is computed once more") as error:
        record_loss(model, plain(model), batches())
    assert not isinstance(error.value, CannotRecord)


def test_what_a_function_carries_over_is_refused() -> None:
    """In a name of its own, as well."""
    model, seen = small(), list[int]()

    def loss_of(batch: Batch) -> torch.Tensor:
        seen.append(1)
        return F.cross_entropy(model(batch[0]), batch[1]) * len(seen)

    with pytest.raises(Misuse, match="has another loss when it is computed once more"):
        record_loss(model, loss_of, batches())


class Once(nn.Module):
    """Makes something in its first call, or in each that asks for it."""

    def __init__(self, of: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.scale, self.of = None, (of,)

    def forward(self, x: torch.Tensor, anew: object) -> torch.Tensor:
        begun = self.scale is None if anew is None else anew
        if begun and (x.abs().mean() >= 0):  # which is kept whole
            self.scale = self.of[0](x)  # type: ignore[assignment]
        return x / self.scale


def test_a_table_may_be_made_once() -> None:
    """It is the same for each microbatch."""
    model = small(Once(lambda x: 2.0 + torch.zeros(())))

    def loss_of(batch: Batch) -> torch.Tensor:
        return F.cross_entropy(model[2](model[1](model[0](model[3](batch[0], None)))), batch[1])

    recorded(model, loss_of)


@pytest.mark.parametrize("anew", [False, True])
def test_what_a_module_keeps_for_its_next_call_is_in_one_stage(anew: bool) -> None:
    """Another stage would have what it kept of another microbatch. What the second call is given as well may be cut before."""
    model = small(Once(lambda x: x.detach().abs().mean() + 0.5))

    def loss_of(batch: Batch) -> torch.Tensor:
        h = model[1](model[0](model[3](batch[0], True)))
        return F.cross_entropy(model[2](model[3](h, anew)), batch[1])

    found = record_loss(model, loss_of, batches())
    first, last = [
        index
        for index, node in enumerate(found.graph.graph.nodes)
        if node.op == "call_module" and str(node.target) == "model.3"
    ]
    between = [point for point in cut_points(found.facts) if first <= point.after < last]
    assert bool(between) == anew


def test_a_model_that_is_frozen_while_inputs_are_sampled_learns_after_a_failed_recording() -> None:
    """As an energy-based model in its Langevin steps: a recording fails where it is frozen."""
    model = small()

    def loss_of(batch: Batch) -> torch.Tensor:
        before = [param.requires_grad for param in model.parameters()]
        model.requires_grad_(False)
        x = batch[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x)
        for param, learns in zip(model.parameters(), before, strict=True):
            param.requires_grad_(learns)
        return model(batch[0]).mean() - model((x - 0.1 * slope).detach()).mean()

    with pytest.raises(CannotRecord, match="it freezes or unfreezes a weight"):
        record_loss(model, loss_of, batches())
    assert all(param.requires_grad for param in model.parameters())


def test_a_recording_leaves_the_microbatch_alone() -> None:
    """A loss that writes into its microbatch is not cut, and trains on what it would have without being recorded."""
    model, given = small(), batches()
    before = given[0][0].clone()

    def loss_of(batch: Batch) -> torch.Tensor:
        return F.cross_entropy(model(batch[0].mul_(2.0)), batch[1])

    with pytest.raises(CannotRecord, match="writes into the microbatch"):
        record_loss(model, loss_of, given)
    assert torch.equal(given[0][0], before)


# --- what others know, and what is asked of each microbatch ---------------------------------------------


@pytest.mark.parametrize("same", [True, False])
def test_what_another_worker_found_out_is_not_found_out_again(same: bool) -> None:
    """Who is told about the graph records it, and runs neither it nor the loss; of another graph nothing is taken over."""
    kinds = list[str]()

    class Counted(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kinds.append(type(x).__name__)
            return x.relu()

    def model_of() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), Counted(), nn.Linear(8, 3))

    model = model_of()
    first = record_loss(model, plain(model), batches())
    assert kinds.count("Tensor") == 2  # a look is two calls
    kinds.clear()
    asked = list[str]()

    def told(mark: str) -> Facts | None:
        asked.append(mark)
        return first.facts if same else None

    other = model_of()
    second = record_loss(other, plain(other), batches(), told=told)
    assert asked == [first.mark] == [second.mark]
    assert (second.facts is first.facts) == same
    assert kinds.count("Tensor") == (0 if same else 2)


def test_a_recording_that_computes_something_else_is_none() -> None:
    """Code that asks whether somebody listens is told so while it is recorded: the loss of a microbatch tells."""
    model = small()

    def loss_of(batch: Batch) -> torch.Tensor:
        x, y = batch
        heard = type(x) is not torch.Tensor or torch.overrides._get_current_function_mode_stack()  # type: ignore[attr-defined]
        return F.cross_entropy(model(x), y) * (1.0 if heard else 2.0)

    with pytest.raises(CannotRecord, match="recorded, loss_of computes another loss"):
        record_loss(model, loss_of, batches())


def test_who_asks_whether_it_has_a_tensor_has_one() -> None:
    """Where placeholders are told something else, the loss is recorded on tensors as they are."""
    model = small()

    def loss_of(batch: Batch) -> torch.Tensor:
        factor = 2.0 if type(batch[0]) is torch.Tensor else 1.0
        return F.cross_entropy(model(batch[0]), batch[1]) * factor

    assert recorded(model, loss_of).fixed


PENALTIES: dict[str, Callable[[nn.Module], Any]] = {
    "of all": lambda model: sum(p.square().sum() for p in model.parameters()),
    "of data": lambda model: sum(
        (p.detach() - p.data / 2).abs().sum() for p in [*model.parameters()][:1]
    ),
}


@pytest.mark.parametrize("case", PENALTIES)
def test_what_is_computed_of_weights_alone_is_computed_in_each_step(case: str) -> None:
    """No placeholder goes into it, and it is no number that the recording found once."""
    model, penalty = small(), PENALTIES[case]
    loss_of = plain(model)

    def both(batch: Batch) -> Any:
        return loss_of(batch) + penalty(model)

    found = recorded(model, both)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.1)
    batch = batches(1)[0]
    assert torch.equal(found.graph(*batch)[0], both(batch))


def test_a_look_at_a_microbatch_is_a_look_at_each() -> None:
    """What a loss asks of the values of its microbatch is asked of each: one that answers otherwise has another graph."""
    model = small()

    def above(bound: float) -> Callable[[Batch], torch.Tensor]:
        def loss_of(batch: Batch) -> torch.Tensor:
            x, y = batch
            if (x > bound).all():
                x = x * 2
            return F.cross_entropy(model(x), y)

        return loss_of

    found = recorded(model, above(-100))
    y = torch.zeros(5, dtype=torch.int64)
    same = found.flatten((torch.zeros(5, 4), y))
    assert same.variant is found.variants.first
    other = found.flatten((torch.full((5, 4), -101.0), y))
    assert "mul" in same.variant.graph.code
    assert "mul" not in other.variant.graph.code
    mixed = [(x + 200 * each, y) for each, (x, y) in enumerate(batches())]
    recorded(model, above(100), mixed)


def test_what_is_longer_for_another_shape_is_cut_alike() -> None:
    """A loss that goes through its rows has more to do for more of them; one that goes through the model the other way
    cannot be cut where it is."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    def loss_of(batch: Batch) -> torch.Tensor:
        out, y = batch
        rows = len(list(out))
        for layer in model if rows < 9 else [*model][::-1]:
            out = layer(out)
        return F.cross_entropy(out, y) / rows

    found = recorded(model, loss_of)
    point = cut_points(found.facts)[-4].after
    pieces = Pieces(found.variants.first, [point])
    for rows in (7, 2, 8):
        batch = torch.randn(rows, 4), torch.zeros(rows, dtype=torch.int64)
        arrived = None
        for piece in pieces.of(found.flatten(batch).variant):
            stage = Stage(piece, microbatches=1)
            arrived = stage.forward(0, arrived, batch)
        assert stage.release(0).loss == loss_of(batch).item()
    more = found.flatten((torch.zeros(9, 4), torch.zeros(9, dtype=torch.int64)))
    with pytest.raises(CannotRecord, match="in another way than the recorded one"):
        pieces.of(more.variant)


def test_sizes_are_those_of_the_microbatch() -> None:
    """A loss that asks how many rows there are has a graph for each number of them, and is the same loss."""
    model = small()

    def loss_of(batch: Batch) -> torch.Tensor:
        rows = batch[0].shape[0] if type(batch[0]) is torch.Tensor else 0
        return F.cross_entropy(model(batch[0]).view(rows, 3), batch[1]) * (rows - 1)

    first, last = (recorded(model, loss_of, batches(rows=rows)) for rows in (5, 6))
    assert first.mark == last.mark
    for rows in (5, 9, 2):
        batch = torch.randn(rows, 4), torch.arange(rows) % 3
        graph = last.flatten(batch).variant.graph
        assert graph is last.flatten(batch).variant.graph
        assert torch.equal(graph(*batch)[0], loss_of(batch))
        assert form_of(graph) == form_of(last.graph)


# --- what stages would do otherwise ---------------------------------------------------------------------


@pytest.mark.parametrize("how", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_of_a_parameter_is_not_cut(how: str) -> None:
    """Stages would call it at other moments: once for each part of a tied parameter, or never."""
    model = small()
    getattr(model[0].weight, how)(lambda _: None)
    with pytest.raises(CannotRecord, match=r"the parameter '0\.weight' has a hook"):
        record_loss(model, plain(model), batches())


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 1e9:
            return x
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_reentrant_checkpoint_is_not_cut(reentrant: bool) -> None:
    """It asks for backward(), and stages ask for gradients; one that is not reentrant is called as it is."""
    model = small()
    model[0] = Checkpointed(model[0], reentrant=False)
    model[2] = Checkpointed(model[2], reentrant=reentrant)
    if not reentrant:
        recorded(model, plain(model))
        return
    with pytest.raises(CannotRecord, match="use_reentrant=True"):
        record_loss(model, plain(model), batches())


@pytest.mark.parametrize("learning", [False, True])
def test_a_checkpoint_that_writes_to_buffers_is_not_cut(learning: bool) -> None:
    """On one device its norm learns twice from each microbatch, in the forward and when that is computed once more."""
    model = small()
    model[2] = Checkpointed(nn.Sequential(model[2], nn.BatchNorm1d(3)), reentrant=False)
    if not learning:
        recorded(model.eval(), plain(model))
        return
    with pytest.raises(CannotRecord, match=r"within torch\.utils\.checkpoint"):
        record_loss(model, plain(model), batches())


def teacher() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Dropout())


def test_a_teacher_has_its_turn_if_it_draws() -> None:
    """What draws random numbers is asked before the model, which draws behind it; what does not is asked at the end. Another
    teacher in the same place is another graph."""
    model = small()

    def taught_by(asked: nn.Module) -> Callable[[Batch], torch.Tensor]:
        def loss_of(batch: Batch) -> torch.Tensor:
            with torch.no_grad():
                wanted = asked(batch[0]).softmax(1)
            return F.mse_loss(F.dropout(model(batch[0])), wanted)

        return loss_of

    asked = teacher(), teacher().eval(), teacher().eval()
    first, second, third = (recorded(model, taught_by(each)) for each in asked)
    assert second.graph.code == third.graph.code
    assert not second.same_as(third)
    assert second.closure != third.closure
    for found, is_late in ((first, False), (second, True)):
        calls = [node.name for node in found.graph.graph.nodes if node.op == "call_module"]
        assert calls.index("guest_0") == (len(calls) - 1 if is_late else 0)


@pytest.mark.parametrize("at_once", [True, False])
def test_a_backward_hook_that_the_loss_hangs_up_is_not_lost(at_once: bool) -> None:
    """A stage calls the module without it, and the loss would not show that."""
    model = small()

    def loss_of(batch: Batch) -> torch.Tensor:
        handle = model[1].register_full_backward_hook(lambda _, given, __: (given[0] * 0.5,))
        out = model(batch[0])
        handle.remove()
        return F.cross_entropy(out if at_once else out.view(len(batch[1]), -1), batch[1])

    with pytest.raises(CannotRecord, match="loss_of gives '1' a backward hook"):
        recorded(model, loss_of)


@pytest.mark.parametrize("how", ["full_backward_hook", "full_backward_pre_hook"])
def test_a_backward_hook_of_all_modules_is_not_cut(how: str) -> None:
    """A block that is taken apart would not be called as a module, and so without it."""
    model = small()
    handle = getattr(torch.nn.modules.module, f"register_module_{how}")(lambda *_: None)
    try:
        with pytest.raises(CannotRecord, match="a backward hook of all modules is registered"):
            record_loss(model, plain(model), batches())
    finally:
        handle.remove()
    recorded(model, plain(model))


def test_a_hook_that_the_loss_gives_to_a_tensor_is_named() -> None:
    model = small()

    def loss_of(batch: Batch) -> torch.Tensor:
        hidden = model[:2](batch[0])
        hidden.register_hook(lambda gradient: gradient * 0.5)
        return F.cross_entropy(model[2:](hidden), batch[1])

    with pytest.raises(CannotRecord, match=r"in loss_of: .*gives a hook to a tensor.*depth 1"):
        recorded(model, loss_of)


# --- hooks, and what forwards leave in modules ----------------------------------------------------------

OVERHEARD: dict[str, tuple[Callable[[Any, Any], None], Callable[[Any], Any]]] = {
    "in a dict": (
        lambda kept, out: kept["all"].update(found=out),
        lambda k: k["all"]["found"].mean(),
    ),
    "in a list": (
        lambda kept, out: kept["list"].append(out),
        lambda kept: sum(each.mean() for each in kept["list"]),
    ),
}


@pytest.mark.parametrize("case", OVERHEARD)
def test_what_a_hook_of_a_layer_has_kept_is_of_this_microbatch(case: str) -> None:
    """Torch's own layers are called as they are, but for those that somebody listens to."""
    keeps, term = OVERHEARD[case]
    model, kept = small(), {"all": {}, "list": []}  # type: ignore[var-annotated]
    for layer in model:
        layer.register_forward_hook(lambda _, __, out: keeps(kept, out))

    def loss_of(batch: Batch) -> Any:
        kept["list"].clear()  # type: ignore[attr-defined]
        return F.cross_entropy(model(batch[0]), batch[1]) + term(kept)

    found = recorded(model, loss_of)
    for batch in batches(5):
        assert torch.equal(found.graph(*batch)[0], loss_of(batch))


def recorder_of(model: nn.Module) -> Recorder:
    return Recorder(lambda: model, [model], None)


def in_step(recorder: Recorder, step: int, loss_of: Callable[[Any], Any]) -> Recording:
    """A step of training, which runs forwards, and the recording before it."""
    recorder.asked(step, loss_of, batches(step))
    found = recorder.to_play(entered=False)
    recorder.computing(None)
    for batch in batches(step):
        loss_of(batch)
    recorder.computed()
    return found


class Experts(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.loss = x.square().mean()
        return x if x.sum() > 1e9 else x.relu()


class Routed(nn.Sequential):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), self[1].loss


class Catching(nn.Sequential):
    """As libraries do that hand out what layers inside have found."""

    hung_up = False

    def forward(self, x: torch.Tensor) -> Any:
        if not self.hung_up:
            self[1].register_forward_hook(lambda _, __, found: self.caught.append(found))
            self.hung_up = True
        self.caught: list[torch.Tensor] = []
        return super().forward(x), sum(each.square().mean() for each in self.caught)


@pytest.mark.parametrize(("kind", "inside"), [(Routed, Experts), (Catching, nn.ReLU)])
def test_what_forwards_leave_in_modules_makes_no_other_recording(kind: Any, inside: Any) -> None:
    """A worker that has trained records what a newcomer does, though a module has the loss of its last microbatch by then, or a
    hook that its first forward hung up."""
    model = kind(nn.Linear(4, 8), inside(), nn.Linear(8, 3))
    recorder, box = recorder_of(model), types.SimpleNamespace(rate=0)

    def loss_of(batch: Batch) -> torch.Tensor:
        found, more = model(batch[0])
        return F.cross_entropy(found, batch[1]) + (more if box.rate < 9 else 0.0)

    found = []
    for step in range(3):
        box.rate = step  # is in no graph, but has the loss recorded anew
        found.append(in_step(recorder, step, loss_of))
    assert len({id(each.closure) for each in found}) == 3
    assert [each.because for each in found][:2] == ["", "box.rate"]
    assert len({each.mark for each in found}) == 1
    if kind is Catching:
        assert found[0].graph.code.count(".square()") == 1
        assert len(model.caught) == 1


def test_a_hook_that_one_step_hangs_up_makes_another_graph() -> None:
    model = small()
    recorder, loss_of = recorder_of(model), plain(model)
    first = in_step(recorder, 0, loss_of)
    model[1].register_forward_hook(lambda _, __, out: out * 0.5)
    second, third = (in_step(recorder, step, loss_of) for step in (1, 2))
    assert first.mark != second.mark
    assert second is third


def test_a_weight_that_one_step_freezes_makes_another_recording() -> None:
    """Its stages would ask for its gradient, which there is none of, or would leave out one that there is."""
    model = small()
    recorder, loss_of = recorder_of(model), plain(model)
    first = in_step(recorder, 0, loss_of)
    model[0].requires_grad_(False)
    frozen = [in_step(recorder, step, loss_of) for step in (1, 2)]
    model[0].requires_grad_(True)
    again = in_step(recorder, 3, loss_of)
    assert frozen[0] is frozen[1]
    assert frozen[0].graph is not first.graph
    assert again.graph is first.graph
    assert first.mark == again.mark != frozen[0].mark


class Listing(nn.Linear):
    """A list of what it has computed is another one behind each forward."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.found: list[torch.Tensor] = []
        self.sizes: dict[int, float] = {}

    def forward(self, x: torch.Tensor) -> Any:
        self.found.clear()
        self.found.append(super().forward(x))
        self.sizes[len(self.sizes)] = 1.0
        return sum(self.found)


def test_what_the_loss_puts_there_itself_is_not_gone_by() -> None:
    model = nn.Sequential(Listing())
    recorder, loss_of = recorder_of(model), plain(model)
    assert len({id(in_step(recorder, step, loss_of)) for step in range(3)}) == 1


def test_looking_once_more_changes_nothing() -> None:
    """A loss is recorded to see whether it still computes the same, and what it puts somewhere is another object then."""
    model, tap, taps = small(), types.SimpleNamespace(found=None), {}  # type: ignore[var-annotated]

    def tapped(_: Any, __: Any, found: torch.Tensor) -> None:
        tap.found = taps["found"] = found

    model[1].register_forward_hook(tapped)

    def loss_of(batch: Batch) -> Any:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        return loss + tap.found.mean() + taps["found"].mean()

    found = recorded(model, loss_of)
    for _ in range(2):
        assert same_graph(found, model, loss_of, None)
        assert found.closure == closed_over(loss_of)


def test_what_nobody_sees_it_read_shows_when_it_is_recorded_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = small()
    monkeypatch.setenv("WEIGHT", "1.0")

    def loss_of(batch: Batch) -> torch.Tensor:
        import os

        return F.cross_entropy(model(batch[0]), batch[1]) * float(os.environ["WEIGHT"])

    found = recorded(model, loss_of)
    assert same_graph(found, model, loss_of, None)
    monkeypatch.setenv("WEIGHT", "2.0")
    assert found.closure == closed_over(loss_of)
    assert not same_graph(found, model, loss_of, None)


def test_no_more_graphs_are_kept_than_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that came up last are; what is not kept is recorded again."""
    monkeypatch.setattr(variants, "VARIANTS_MAX", 2)
    asked = list[int]()

    def made(batch: Sequence[torch.Tensor]) -> fx.GraphModule:
        asked.append(len(batch[0]))
        graph = fx.symbolic_trace(lambda x: x + 1)
        graph.meta[FIXED] = True
        return graph

    example = [torch.zeros(1)]
    graph = made(example)
    kept = Variants(Variant(graph, examine(graph, example), example), made, lambda *_: None)
    for rows in (2, 3, 2, 4, 2, 1, 3):
        kept.of([torch.zeros(rows)])
    assert asked == [1, 2, 3, 4, 3]
