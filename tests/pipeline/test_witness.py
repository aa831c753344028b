"""Models written as libraries write them: recorded while they run, cut between their blocks, with the bits of one process."""

import dataclasses
import functools
import operator

import playing
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from playing import alone, graph_of, made, same_weights, together
from torch import nn
from torch.utils.checkpoint import checkpoint

from agent.errors import CannotRecord
from agent.pipeline import autocast_nodes
from agent.pipeline.stages.cut import Sections, build
from agent.pipeline.tracing.analysis import cut_points, examine
from agent.pipeline.tracing.recording.trace import FIXED, LOOKS, record

WIDTH, WORDS, BLOCKS = 16, 23, 6


@dataclasses.dataclass
class Output:
    """What such models return: no tuple, and the loss is in it."""

    logits: torch.Tensor
    cache: "Cache"
    loss: torch.Tensor | None = None


class Cache:
    """Keys and values of every layer, in an object of its own."""

    def __init__(self) -> None:
        self.layers: list[torch.Tensor] = []

    def update(self, key: torch.Tensor) -> torch.Tensor:
        self.layers.append(torch.cat([key]))
        return self.layers[-1]


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rates", torch.rand(WIDTH), persistent=False)

    @torch.no_grad()
    def forward(self, places):
        with torch.autocast("cpu", enabled=False):
            return torch.cos(places[:, None].float() * self.rates)


class Attending(nn.Module):
    """Sizes are asked for, a cache is filled, and what is computed depends on whether there is a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.into = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, h, turn, mask, cache):
        batch, length, _ = h.shape
        q, k, v = (self.into(self.norm(h)) * torch.cat([turn] * 3, -1)).chunk(3, -1)
        k = cache.update(k) if cache is not None else k
        q, k, v = (each.view(batch, length, 2, -1).transpose(1, 2) for each in (q, k, v))
        causal = {"is_causal": True} if mask is None else {"attn_mask": mask}
        found = F.scaled_dot_product_attention(q, k, v, **causal).transpose(1, 2)
        return h + self.drop(self.out(found.reshape(batch, length, WIDTH)))


class Experts(nn.Module):
    """Each word goes where its own values say."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, h):
        flat = h.reshape(-1, WIDTH)
        weight, chosen = self.gate(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == index)
            if rows.shape[0]:
                out.index_add_(0, rows, expert(flat[rows]) * weight[rows, None])
        return h + out.view(h.shape)


class Library(nn.Module):
    def __init__(self, *, again: bool = False, experts: bool = False) -> None:
        super().__init__()
        self.again = again
        self.embed, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(9, WIDTH)
        self.rotary = Rotary()
        self.blocks = nn.ModuleList([Attending() for _ in range(BLOCKS)])
        self.experts = nn.ModuleList([Experts() for _ in range(BLOCKS if experts else 0)])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def causal_mask(self, mask):
        if mask is None or bool(mask.all()):
            return None
        length = mask.shape[1]
        ahead = torch.full((length, length), float("-inf"), device=mask.device).triu(1)
        allowed = ahead.expand(mask.shape[0], 1, length, length).clone()
        allowed[:, :, :, 1:] += (mask[:, None, None, 1:] == 0) * torch.finfo(torch.float32).min
        return allowed

    def forward(self, words=None, mask=None, labels=None):
        if words is None or words.dim() != 2:
            raise ValueError("rows of words")
        cache = None if self.again else Cache()
        places = torch.arange(words.shape[1], device=words.device)
        h = self.embed(words) + self.places(places)
        turn = self.rotary(places).to(h.dtype)
        seen = self.causal_mask(mask)
        for index, block in enumerate(self.blocks):
            if self.again:
                h = checkpoint(block, h, turn, seen, cache, use_reentrant=False)
            else:
                h = block(h, turn, seen, cache)
            if self.experts:
                h = self.experts[index](h)
        out = Output(logits=self.head(h), cache=cache)
        if labels is not None:
            out.loss = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return out


def text(padded: bool | None):
    """None: now and then."""

    def draw(generator, size):
        words = torch.randint(0, WORDS, (size, 7), generator=generator)
        mask = torch.ones_like(words)
        mask[0, 5:] = 1 - (int(words[0, 0]) % 2 if padded is None else padded)
        return words, mask

    return draw


def loss_of(model, words, mask):
    return model(words=words, mask=mask, labels=words).loss


def half_loss_of(model, words, mask):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return loss_of(model, words, mask)


SHAPES = {
    "plain": (Library, text(False), loss_of),
    "padded": (Library, text(True), loss_of),
    "now and then padded": (Library, text(None), loss_of),
    "checkpointed": (lambda: Library(again=True), text(True), loss_of),
    "experts": (lambda: Library(experts=True), text(True), loss_of),
    "bfloat16": (lambda: Library().to(torch.bfloat16), text(False), loss_of),
    "autocast": (Library, text(True), half_loss_of),
}


SHALLOW = ("padded", "experts", "autocast")  # the others are cut in four, and computed again


@pytest.fixture(params=SHAPES)
def shape(request, monkeypatch):
    factory, draw, loss = SHAPES[request.param]
    monkeypatch.setattr(playing, "loss_of", loss)
    return factory, draw


def test_a_model_of_a_library_is_one_process(shape, request):
    """Objects for outputs and caches, questions about sizes and masks, experts, and parts without gradients: the
    bits are those of one process."""
    recompute = request.node.callspec.params["shape"] not in SHALLOW
    depth = 4 if recompute else 2
    losses, expected, own = alone(*shape, 4, 2)
    found, states, _ = together(
        *shape, "1f1b", depth, (3, 1), steps=2, recompute=(recompute,) * depth, opener=own.seed_for
    )
    assert found == losses
    assert same_weights(states, {**expected, **dict(made(shape[0]).named_buffers())}) == []


def test_a_model_of_a_library_is_cut_between_its_blocks(shape):
    """It is no lump: four stages have blocks each, and no stage most of the parameters."""
    graph, facts, example = graph_of(*shape)
    assert graph.meta[FIXED]
    pieces = build(graph, facts, Sections().choose(graph, facts, example, 4))
    total = sum(param.numel() for param in graph.parameters())
    sizes = [sum(param.numel() for param in piece.module.parameters()) for piece in pieces]
    assert max(sizes) < 0.6 * total
    assert len(cut_points(facts)) > BLOCKS


def test_what_is_asked_of_a_microbatch_is_kept():
    """A graph that was recorded with a mask is not taken for a microbatch without one."""
    graph = record(made(Library), loss_of, text(True)(torch.Generator(), 3))
    looks = graph.meta[LOOKS]
    assert looks.differs(text(True)(torch.Generator().manual_seed(5), 3)) == ""
    assert "test_witness.py" in looks.differs(text(False)(torch.Generator(), 3))


def test_sizes_that_come_of_values_are_asked_too():
    """How many words there are is another number for another microbatch."""

    def counting(model, words, mask):
        return loss_of(model, words, None) * words[mask == 1].shape[0]

    graph = record(made(Library), counting, text(True)(torch.Generator(), 3))
    assert graph.meta[LOOKS].differs(text(True)(torch.Generator().manual_seed(5), 3)) == ""
    assert graph.meta[LOOKS].differs(text(False)(torch.Generator(), 3))


def test_sizes_that_come_of_values_are_asked_for_only_if_somebody_wants_to_know():
    """A loss over the words that are not masked takes as many as there are. Rows that are taken one by one are counted."""

    def loss(model, words, mask, rows=None):
        logits = model(words=words, mask=mask).logits.flatten(0, 1)
        seen = mask.flatten() == 1
        found = F.cross_entropy(logits[seen], words.flatten()[seen])
        return found * sum(row.max() for row in words.flatten()[seen]) if rows else found

    draw, model = text(True), made(Library).eval()
    example, other = draw(torch.Generator(), 3), draw(torch.Generator(), 3)
    other[1][2, 4:] = 0
    graph = record(model, loss, example, fixed=True)
    assert graph.meta[LOOKS].differs(other) == ""
    assert torch.equal(graph(*other)[0], loss(model, *other))
    rows = record(model, functools.partial(loss, rows=True), example, fixed=True)
    assert "test_witness.py" in rows.meta[LOOKS].differs(other)


OPERATORS = {
    "x ** 2": lambda x: x**2,
    "2 ** x": lambda x: 2**x,
    "x ** x": lambda x: x.abs() ** x,
    "x **= 2": lambda x: operator.ipow(x * 1.5, 2),
    "x % 2": lambda x: x % 2 + 5 % (x.abs() + 1),
    "x // 2": lambda x: x + (x // 0.5) + 7 // (x.abs() + 1),
    "x / 2": lambda x: x / 2 + 3 / (x.abs() + 1),
    "x - 2": lambda x: (x - 2) * (2 - x),
    "x @ x": lambda x: x @ x.mT,
    "-x": lambda x: -abs(+x),
    "x < 2": lambda x: x * (x < 0.2) * ~(x < 0.1) + x * ((x > 0) ^ (x < 1)),
    "x[0]": lambda x: x[0] + x[..., None, 0],
    "x[range(n), i]": lambda x: x[range(len(x)), torch.arange(len(x)) % 3],
    "x.norm()": lambda x: x.norm() + x.split(1)[0].sum() + x.unflatten(0, (1, -1))[0],
}


@pytest.mark.parametrize("case", OPERATORS)
def test_operators_are_recorded(case):
    """Some of them call themselves what another method is called."""
    model = nn.Sequential(nn.Linear(4, 4))

    def loss(model, x):
        return OPERATORS[case](model(x)).square().mean()

    example, other = torch.randn(4, 4), torch.randn(4, 4)
    graph = record(model, loss, (example,), fixed=True)
    assert torch.equal(graph(other)[0], loss(model, other))
    assert len(graph.graph.nodes) > 5


def test_no_cut_where_gradients_are_not_wanted():
    """Behind a cut they would be wanted again."""
    example = text(True)(torch.Generator(), 3)
    graph = record(made(Library), loss_of, example)
    facts = examine(graph, example)
    nodes = [node.target for node in graph.graph.nodes]
    off, on = (index for index, target in enumerate(nodes) if target is autocast_nodes.grad)
    assert on > off + 1
    assert not {point.after for point in cut_points(facts)} & set(range(off, on))


def test_what_is_made_in_inference_mode_is_recorded_alike():
    """It counts no writes, so its values are added up to see them; that is no part of the graph."""
    model = made(lambda: nn.Linear(4, 4))

    def loss(model, x):
        with torch.inference_mode():
            scale = model(x).abs().mean()
        return (model(x) * scale.clone()).square().mean()

    example, other = torch.randn(4, 4), torch.randn(4, 4)
    graph = record(model, loss, (example,), fixed=True)
    assert "_tensor_constant" not in graph.code
    assert torch.equal(graph(other)[0], loss(model, other))


class Unfollowed(nn.Module):
    """Computes where nobody sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.mapped = torch.func.vmap(lambda row: row.square())

    def forward(self, h):
        return h + self.mapped(h) * self.scale


def test_what_cannot_be_followed_is_kept_whole():
    """Its module is one node; nothing that it computed of the example is in the graph."""
    model = made(
        lambda: nn.Sequential(nn.Embedding(WORDS, WIDTH), Unfollowed(), nn.Linear(WIDTH, 2))
    )

    def loss(model, words, mask):
        return model(words[: words.shape[0]]).square().mean()

    example, other = (text(True)(torch.Generator().manual_seed(seed), 3) for seed in (1, 2))
    graph = record(model, loss, example, fixed=True)
    assert "model.1" in [node.target for node in graph.graph.nodes if node.op == "call_module"]
    examine(graph, example)
    assert torch.equal(graph(*other)[0], loss(model, *other))


class Sometimes(nn.Module):
    """Gives back what it got, or something else, as an augmentation with a probability does."""

    def forward(self, h, beside):
        return (h, beside) if torch.rand(1).item() > 0.5 else (-h, 3 * beside)


class Chosen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.out = Sometimes(), Sometimes(), nn.Linear(WIDTH, 1)

    def forward(self, h):
        (one, beside), (two, _) = self.one(h, h.square()), self.two(h, h)
        return self.out(one) - self.out(two).square() + self.out(beside + h)


def assert_computes(graph, model, loss, examples) -> None:
    """The graph has the loss of each example, drawn from the same stream."""
    for seed, each in enumerate(examples):
        torch.manual_seed(seed)
        found = graph(each)[0]
        torch.manual_seed(seed)
        assert torch.equal(found, loss(model, each))


@pytest.mark.parametrize("begun", range(4))
def test_what_a_module_gives_back_as_it_got_it_may_be_something_else_for_another_microbatch(begun):
    """Whichever way it went while it was recorded, and whatever uses what it got after it."""
    model = made(Chosen)

    def loss(model, h):
        return model(h[: h.shape[0]]).square().mean()

    examples = torch.randn(8, 4, WIDTH)
    torch.manual_seed(begun)
    graph = record(model, loss, (examples[0],), fixed=True)
    examine(graph, (examples[0],))
    assert_computes(graph, model, loss, examples)


class Kept(nn.Module):
    """Says beside its result what it has drawn."""

    def forward(self, h):
        rate = max(torch.rand(1).item(), 0.5)
        return h * (torch.rand_like(h) < rate), {"rate": rate}


class Rescaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop, self.out = Kept(), nn.Linear(WIDTH, WIDTH)

    def forward(self, h):
        kept, said = self.drop(h)
        return self.out(kept / said["rate"])


def test_a_number_that_a_module_returns_is_no_constant():
    """What uses it is kept whole with the module that returns it."""
    model = made(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Rescaled(), nn.Linear(WIDTH, 1)))

    def loss(model, h):
        return model(h[: h.shape[0]]).square().mean()

    examples = torch.randn(5, 4, WIDTH)
    graph = record(model, loss, (examples[0],), fixed=True)
    assert "model.1" in [node.target for node in graph.graph.nodes if node.op == "call_module"]
    assert_computes(graph, model, loss, examples)


class Seldom(nn.Module):
    """Returns None in place of a tensor where nothing is large."""

    def forward(self, h):
        return h * 2, (h.abs().mean() if h.max().item() > 1 else None)


class Penalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.look, self.out = Seldom(), nn.Linear(WIDTH, WIDTH)

    def forward(self, h):
        h, penalty = self.look(h)
        return self.out(h) if penalty is None else self.out(h) + penalty


def test_a_module_that_returns_none_for_some_microbatches_is_refused_for_others():
    model = made(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Penalized(), nn.Linear(WIDTH, 1)))

    def loss(model, h):
        return model(h[: h.shape[0]]).square().mean()

    small, large = torch.zeros(4, WIDTH), 100 * torch.randn(4, WIDTH)
    for example, like, other in ((small, small / 2, large), (large, 2 * large, small)):
        graph = record(model, loss, (example,), fixed=True)
        assert torch.equal(graph(like)[0], loss(model, like))
        with pytest.raises(CannotRecord, match="returned None or text"):
            graph(other)
