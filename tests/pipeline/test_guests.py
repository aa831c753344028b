"""A teacher beside the student: called as it is, where the student's values meet what it says, with the bits of one process."""

import dataclasses

import playing
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from playing import TiedLanguage, alone, made, same_weights, together
from test_witness import Library
from torch import nn

from agent.errors import CannotRecord
from agent.pipeline.stages.cut import Sections, build
from agent.pipeline.tracing.analysis import examine
from agent.pipeline.tracing.recording.frozen_modules import Guest, postpone
from agent.pipeline.tracing.recording.trace import FIXED, record

WORDS = 11


@dataclasses.dataclass
class Said:
    """What teachers of libraries return: no tuple, and there is more in it than anybody can follow."""

    logits: torch.Tensor
    cache: object


class Teacher(nn.Module):
    """Its weights could be trained, and half of it is dropped if nobody says eval()."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.drop = nn.Embedding(WORDS, 8), nn.Dropout(0.5)
        self.head = nn.Linear(8, WORDS)

    def forward(self, words):
        return Said(logits=self.head(self.drop(self.embed(words))), cache=object())


class Counting(Teacher):
    """Writes down how often it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("asked", torch.zeros(()))

    def forward(self, words):
        self.asked.add_(1)
        return super().forward(words)


def student_of_a_library():
    model = Library()
    model.embed = nn.Embedding(WORDS, 16)
    model.head = nn.Linear(16, WORDS)
    return model


def told(model, words):
    return model(words=words).logits if isinstance(model, Library) else model(words)


def compared(said, logits):
    wanted = (said.logits / 2).softmax(-1)
    return F.kl_div((logits / 2).log_softmax(-1), wanted, reduction="batchmean")


def with_a_teacher(teacher):
    def loss_of(model, x, y):
        with torch.no_grad():
            said = teacher(x)
        logits = told(model, x)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten()) + compared(said, logits)

    return loss_of


def with_what_it_says_at_once(teacher):
    def loss_of(model, x, y):
        with torch.no_grad():
            wanted = teacher(x).logits.softmax(-1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = told(model, x).float()
            wrong = F.mse_loss(logits.softmax(-1), wanted)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten()) + wrong

    return loss_of


def with_one_that_stays(teacher):
    teacher.requires_grad_(False)

    def loss_of(model, x, y):
        said = teacher(x)
        logits = told(model, x)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten()) + compared(said, logits)

    return loss_of


STUDENTS = {"placeholders": lambda: TiedLanguage(4), "a microbatch": student_of_a_library}
LOSSES = (with_a_teacher, with_what_it_says_at_once, with_one_that_stays)


def recorded_late(model, loss_of, example):
    graph = record(model, loss_of, example)
    postpone(graph)
    return graph


@pytest.fixture
def teacher(monkeypatch):
    monkeypatch.setattr(playing, "record", recorded_late)
    return made(Teacher).eval()


@pytest.mark.parametrize("student", STUDENTS)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_teacher_beside_a_student(monkeypatch, teacher, student, loss):
    """Both ways of recording, and with what it says used at once or later: the bits are those of one process. The last stage
    asks it, and what it says crosses no cut."""
    monkeypatch.setattr(playing, "loss_of", loss(teacher))
    factory = STUDENTS[student]
    losses, expected, own = alone(factory, playing.words, 4, 2)
    found, states, _ = together(
        factory, playing.words, "1f1b", 3, (3, 1), steps=2, opener=own.seed_for
    )
    assert found == losses
    buffers = dict(made(factory).named_buffers())
    assert same_weights(states, {**expected, **buffers}) == []

    graph, facts, example = playing.graph_of(factory, playing.words)
    assert bool(graph.meta.get(FIXED)) == (student == "a microbatch")
    pieces = build(graph, facts, Sections().choose(graph, facts, example, 3))
    where = [any(isinstance(each, Guest) for each in piece.module.children()) for piece in pieces]
    assert where == [False, False, True]


@pytest.mark.parametrize("student", STUDENTS)
def test_a_teacher_that_writes_to_its_buffers_is_not_cut(student):
    """Each worker would have another one."""
    model, example = made(STUDENTS[student]), playing.words(torch.Generator(), 3)
    graph = record(model, with_a_teacher(made(Counting).eval()), example)
    with pytest.raises(CannotRecord, match="its forward writes to its buffers"):
        examine(graph, example)


@pytest.mark.parametrize("student", STUDENTS)
def test_one_that_learns_is_no_guest(student):
    """Gradients would go where no stage has them."""
    model, teacher = made(STUDENTS[student]), made(Teacher)

    def loss_of(model, x, y):
        return F.mse_loss(told(model, x), teacher(x).logits)

    with pytest.raises(CannotRecord, match="cannot be"):
        record(model, loss_of, playing.words(torch.Generator(), 3))


class Around(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = (model,)
        self.head = nn.Linear(WORDS, WORDS)
        self.shared = model.head

    def forward(self, words):
        return self.head(self.shared(self.inner[0].embed(words)))


def test_one_that_shares_weights_with_the_student_is_no_guest():
    """What it says depends on weights that other stages have, and is followed."""
    model = made(TiedLanguage).eval()
    around = Around(model)

    def loss_of(model, x, y):
        with torch.no_grad():
            said = around(x)
        return F.mse_loss(model(x), said)

    example = playing.words(torch.Generator(), 3)
    graph = record(model, loss_of, example)
    asked = [each.called[0] for each in graph.children() if isinstance(each, Guest)]
    assert asked == [around.head]
    assert torch.equal(graph(*example)[0], loss_of(model, *example))


def test_what_is_written_to_is_asked_before(teacher):
    """A teacher that looks at something is not put off past the line that changes it."""

    def loss_of(model, x, y):
        shown = x.clone()
        with torch.no_grad():
            said = teacher(shown)
        shown.zero_()
        return compared(said, model(x + shown))

    model, example = made(TiedLanguage), playing.words(torch.Generator(), 3)
    model.eval()
    graph = recorded_late(model, loss_of, example)
    assert torch.equal(graph(*example)[0], loss_of(model, *example))


class Shifting(nn.Module):
    """An augmentation with a probability; it is given to nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("by", torch.ones(()))

    def forward(self, pictures):
        return pictures + self.by if torch.rand(1).item() > 0.5 else pictures


@pytest.mark.parametrize("begun", range(4))
def test_what_it_leaves_alone_while_it_is_recorded_it_may_change_later(begun):
    model, shifting = made(lambda: nn.Linear(4, 1)), Shifting()

    def loss_of(model, x):
        return (model(shifting(x[: x.shape[0]])) - model(shifting(x))).square().mean()

    examples = torch.randn(6, 3, 4)
    torch.manual_seed(begun)
    graph = record(model, loss_of, (examples[0],), fixed=True)
    for seed, each in enumerate(examples):
        torch.manual_seed(seed)
        found = graph(each)[0]
        torch.manual_seed(seed)
        assert torch.equal(found, loss_of(model, each))
