"""Models to layers and back, into whatever part of the model is here."""

import copy
from collections import Counter

import pytest
import torch
from memory_sink import MemorySink
from models import Tied, check_same, make
from torch import nn

from agent.errors import StateError
from agent.store.archive import Archive, assemble, write_parts
from agent.store.encoding.format import file_of, share
from agent.store.export import nested
from agent.store.groups import Groups
from agent.store.layers import REST, block_of, collect, fill, memory_of
from agent.store.reading import read


def store(sink, *writers, version=1, holders=1):
    """Every writer's layers, each shared out among `holders`; the manifest."""
    parts, forms = [], []
    for objects in writers:
        for layer in collect(objects).finish():
            whole = b"".join(bytes(memory_of(item.contiguous())) for item in layer.tensors)
            forms.append(layer.form)
            for holder in range(holders):
                low, high = share(len(whole), holders, holder)
                files = [file_of(layer.form, version, low, high, [whole[low:high]])]
                parts.extend(write_parts(sink, files if low < high else []))
    manifest = assemble("job", version, 1, forms, parts)
    assert Archive(sink, "job").commit(manifest)
    return manifest


def load(sink, manifest, objects, threads=2, only=None):
    """Give every object the state that lies in a sink."""
    return fill(manifest.state, lambda wants: read(sink, manifest, wants, threads), objects, only)


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("blocks.0.attn.qkv.weight", "blocks.0"),
        ("encoder.layers.11.norm.bias", "encoder.layers.11"),
        ("wte.weight", "wte"),
        ("decoder.head.proj.weight", "decoder.head.proj"),
        ("scale", "scale"),
    ],
)
def test_parameters_are_grouped_by_block(name, layer):
    """A numbered block is one layer; what is in none goes with its own module."""
    assert block_of(name) == layer


def test_a_schedule_that_was_loaded_goes_to_an_epoch() -> None:
    """Its milestones are a Counter, which it asks for its elements then."""

    def schedule(at=0):
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        found = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4, 4], gamma=0.5)
        for _ in range(at):
            optimizer.step(), found.step()
        return {"model": model, "optimizer": optimizer, "schedule": found}

    one, other, sink = schedule(3), schedule(), MemorySink()
    load(sink, store(sink, one), other)
    assert type(other["schedule"].milestones) is Counter
    with pytest.warns(UserWarning, match="closed form"):
        other["schedule"].step(5)
    assert other["optimizer"].param_groups[0]["lr"] == 0.125


@pytest.mark.parametrize("kind", ["tied", "mixed"])
@pytest.mark.parametrize("holders", [1, 3])
def test_a_state_comes_back_bit_for_bit(kind, holders):
    """Model, optimizer and schedule after two steps, loaded into new ones, go on identically."""
    objects, step = make(kind)
    step(0), step(1)
    sink = MemorySink()
    manifest = store(sink, objects, holders=holders)
    others, other_step = make(kind, seed=5)
    load(sink, manifest, others)
    check_same(objects, others)
    step(2), other_step(2)
    check_same(objects, others)


def test_a_state_goes_into_memory_that_is_there_already():
    """An optimizer that has run keeps its tensors where they are; only their bytes change."""
    objects, step = make("tied")
    step(0)
    sink = MemorySink()
    manifest = store(sink, objects)
    step(1)
    state = objects["opt"].state
    before = {key: item["exp_avg"].data_ptr() for key, item in state.items()}
    load(sink, manifest, objects)
    assert {key: item["exp_avg"].data_ptr() for key, item in state.items()} == before
    fresh, fresh_step = make("tied")
    fresh_step(0)
    check_same(objects, fresh)


def test_a_state_from_before_the_first_step_has_no_optimizer_state():
    """Nothing is invented for an optimizer that had none, and what it has meanwhile goes."""
    objects, step = make("tied")
    sink = MemorySink()
    manifest = store(sink, objects)
    step(0)
    load(sink, manifest, objects)
    assert not objects["opt"].state


class Stage(nn.Module):
    """Some of a model's modules under the names that they have in the whole model."""

    def __init__(self, model, keep):
        super().__init__()
        for name, child in model.named_children():
            if isinstance(child, nn.ModuleList):
                chosen = {
                    n: copy.deepcopy(c) for n, c in child.named_children() if f"{name}.{n}" in keep
                }
                if chosen:
                    self.add_module(name, nn.ModuleDict(chosen))
            elif name in keep:
                self.add_module(name, copy.deepcopy(child))
        for name, item in model.named_parameters(recurse=False):
            if name in keep:
                self.register_parameter(name, nn.Parameter(item.detach().clone()))


def stages(model, *keeps):
    """Stages with optimizers of their own, filled with `model`'s weights and a made-up state."""
    made = []
    for keep in keeps:
        stage = Stage(model, keep)
        optimizer = torch.optim.AdamW(stage.parameters(), lr=0.5)
        for name, item in stage.named_parameters():
            item.grad = torch.full_like(item, len(name) / 7)
        optimizer.step()
        made.append({"model": stage, "opt": optimizer})
    return made


FIRST, SECOND = {"wte", "blocks.0"}, {"blocks.1", "blocks.2", "scale", "head"}
CUTS = [
    [FIRST | SECOND],
    [FIRST, SECOND],
    [{"wte"}, {"blocks.0", "blocks.1"}, {"blocks.2", "scale", "head"}],
]


@pytest.mark.parametrize("written", CUTS, ids=["P1", "P2", "P3"])
@pytest.mark.parametrize("read", CUTS, ids=["P1", "P2", "P3"])
def test_any_cut_of_a_model_reads_what_any_other_wrote(written, read):
    """Stages of one layout load their part of what the stages of another wrote, optimizer and all."""
    torch.manual_seed(1)
    sink = MemorySink()
    manifest = store(sink, *stages(Tied(), *written), holders=2)
    whole = nested(sink, manifest)
    torch.manual_seed(2)
    for objects in stages(Tied(), *read):
        load(sink, manifest, objects)
        for name, item in objects["model"].state_dict().items():
            assert torch.equal(item, whole["model"][name])
        for name, item in objects["model"].named_parameters():
            for key, value in objects["opt"].state[item].items():
                assert torch.equal(value, whole["opt"]["state"][name][key])


def test_a_tied_tensor_written_once_is_read_by_both_of_its_stages():
    """What one worker held as one tensor under two names becomes two, on two stages."""
    objects, step = make("tied")
    step(0)
    sink = MemorySink()
    manifest = store(sink, objects)
    for objects_here in stages(Tied(), FIRST, SECOND):
        load(sink, manifest, objects_here)
        name = "wte" if hasattr(objects_here["model"], "wte") else "head"
        weight = getattr(objects_here["model"], name).weight
        assert torch.equal(weight, objects["model"].wte.weight)
        state = objects["opt"].state[objects["model"].wte.weight]
        assert torch.equal(objects_here["opt"].state[weight]["exp_avg"], state["exp_avg"])


@pytest.mark.parametrize("as_tensor", [False, True])
def test_layers_that_come_later_are_set_as_the_others_were(as_tensor):
    """A layer with a group of its own joins a state that was collected before the learning rate changed: its
    tensors are those that came, and what is set for its group is what was set then."""
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2)))
    rate = torch.tensor(0.5) if as_tensor else 0.5
    groups = [{"params": list(part.parameters()), "lr": rate} for part in model]
    optimizer = torch.optim.AdamW(groups)
    objects = {"model": model, "optimizer": optimizer}
    before = store(MemorySink(), objects)
    kept = collect(objects).only(["0"])
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * 0.5
    joined = {live.form.name: live for live in kept.joined(collect(objects).only(["1"])).finish()}
    assert sorted(joined) == ["0", "1"]
    forms = {form.name: form for form in before.state}
    for name, live in joined.items():
        assert live.form.values == forms[name].values
        for entry, tensor in zip(live.form.tensors, live.tensors, strict=True):
            if entry.name.endswith("/lr"):
                assert float(tensor) == 0.5
    assert any(e.name.endswith("/lr") for e in joined["1"].form.tensors) == as_tensor


def test_what_does_not_fit_is_said_by_name():
    """Another shape, a missing tensor, a foreign parameter: one line that names it."""
    objects, step = make("tied")
    step(0)
    sink = MemorySink()
    manifest = store(sink, objects)
    wider = {"model": Tied(width=8)}
    with pytest.raises(StateError, match=r"model/wte.weight is torch.float32 \[17, 8\] here"):
        load(sink, manifest, wider)
    deeper = {"model": Tied(blocks=4)}
    with pytest.raises(StateError, match=r"no model/blocks.3.0.weight"):
        load(sink, manifest, deeper)
    stray = torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=1)
    with pytest.raises(StateError, match="belongs to none of the saved modules"):
        collect({"model": Tied(), "opt": stray}).finish()


@pytest.mark.parametrize(
    ("tensor", "way"),
    [
        (torch.zeros(2, dtype=torch.complex128), "torch.view_as_complex"),
        (torch.zeros(2, 2).to_sparse(), "keep it dense"),
        (torch.empty(2, dtype=torch.bits8), "one of .*float32"),
    ],
)
def test_a_tensor_that_cannot_be_written_is_said_with_the_way_out(tensor, way):
    """Whatever it is that makes it so."""
    model = nn.Linear(1, 1)
    model.register_buffer("odd", tensor)
    with pytest.raises(StateError, match=f"model/odd: .* cannot be saved: .*{way}"):
        collect({"model": model}).finish()


class Noted(nn.Linear):
    """As libraries do that build a model from its file."""

    def state_dict(self, *args, **named):
        return super().state_dict(*args, **named) | {"_noted": {"rows": 2}}


class Left(Noted):
    def state_dict(self, *args, **named):
        found = super().state_dict(*args, **named)
        found.pop("_noted")
        return found


def test_what_is_no_tensor_in_the_state_of_a_model_may_be_left_out():
    with pytest.raises(StateError, match=r"^_noted: .* found.pop\('_noted'\)"):
        collect({"model": Noted(2, 1)}).finish()
    assert collect({"model": Left(2, 1)}).finish()


def test_a_state_that_cannot_be_written_is_said_by_name():
    """A value that is neither tensor nor plain is refused with its place in the state."""

    class Odd:
        def state_dict(self):
            return {"where": [1, object()]}

        def load_state_dict(self, state):
            raise AssertionError(state)

    with pytest.raises(StateError, match="odd/where/1 is a object"):
        collect({"odd": Odd()}).finish()


class Counting(torch.optim.SGD):
    """An optimizer of somebody's own, which counts its steps in its state."""

    def step(self, closure=None):
        self.state["steps"] = self.state.get("steps", 0) + 1
        return super().step(closure)


def test_what_an_optimizer_keeps_for_no_parameter_comes_back():
    """Its own count of its steps, for one; where it has none, none is made up."""
    sink, model = MemorySink(), nn.Linear(2, 2)
    optimizer = Counting(model.parameters(), lr=0.1)
    optimizer.step()
    manifest = store(sink, {"model": model, "optimizer": optimizer})
    fresh = Counting(model.parameters(), lr=0.1)
    load(sink, manifest, {"model": model, "optimizer": fresh})
    assert fresh.state["steps"] == 1
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    bare = store(sink, {"model": model, "optimizer": plain}, version=2)
    load(sink, bare, {"model": model, "optimizer": plain})
    assert dict(plain.state) == {}


@pytest.mark.parametrize("only", [None, frozenset({"weight", "bias", REST})])
def test_what_an_optimizer_has_kept_since_a_state_goes_with_its_return(only):
    """A worker proves a step, and then gets the state before it: a setting made in that step would count twice."""
    sink, model = MemorySink(), nn.Linear(2, 2)
    optimizer = Counting([{"params": model.parameters(), "filter": len}], lr=0.1, momentum=0.9)
    models = {"model": model}
    objects = {**models, "optimizer": optimizer}
    objects["groups"] = Groups(objects, models)
    manifest = store(sink, objects)
    begun = set(optimizer.param_groups[0])
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.param_groups[0]["calls"] = 1
    load(sink, manifest, objects, only=only)
    assert set(optimizer.param_groups[0]) == begun
    assert dict(optimizer.state) == {}


def test_a_function_among_an_optimizers_settings_stays_the_script_s():
    """Optimizers that people write have filters there, which are the same on every worker."""
    sink, model = MemorySink(), nn.Linear(2, 2)
    written = torch.optim.SGD([{"params": model.parameters(), "filter": len}], lr=0.1)
    manifest = store(sink, {"model": model, "optimizer": written})
    fresh = torch.optim.SGD([{"params": model.parameters(), "filter": min}], lr=0.9)
    load(sink, manifest, {"model": model, "optimizer": fresh})
    assert (fresh.param_groups[0]["lr"], fresh.param_groups[0]["filter"]) == (0.1, min)


def test_a_state_comes_back_as_it_lay():
    """A basis of eigenvectors lies column by column. Copied into rows, a product with it would round otherwise."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters())
    objects = {"model": model, "opt": optimizer}
    base = torch.randn(6, 8)
    optimizer.state[model.weight] = {
        "Q": [torch.linalg.eigh(torch.eye(8) + 0.1)[1], base.T, base[:, ::2]],
        "moment": base.T.clone(),
        "expanded": base[:1].expand(5, 8),
    }
    sink = MemorySink()
    manifest = store(sink, objects)
    before = dict(optimizer.state[model.weight])
    for held in ({}, {"moment": torch.zeros(8, 6)}):
        optimizer.state[model.weight] = held
        load(sink, manifest, objects)
        after = optimizer.state[model.weight]
        pairs = [*zip(before["Q"], after["Q"], strict=True), (before["moment"], after["moment"])]
        assert all(torch.equal(a, b) for a, b in [*pairs, (before["expanded"], after["expanded"])])
        assert [b.stride() for _, b in pairs] == [(1, 8), (1, 8), (4, 1), (1, 8)]
