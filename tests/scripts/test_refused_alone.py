"""What a script is told that is run alone, as most are at first."""

import pytest

SCRIPT = """
import torch
from orchestrator import Session

class Model(torch.nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.code = torch.nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x):
        found = super().forward(x)
        {writes}
        return (found - self.code).square().mean()

torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = Session(model, optimizer, microbatches={microbatches})
for step in session.steps(3):
    session.backward(lambda x: model(x), torch.randn(16, 4))
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize(
    ("writes", "said"),
    [
        ("self.code.data.mul_(0.9)", "step 0: loss_of writes to the parameter 'code'"),
        ("self.code.mul_(1.0)", "step 0: loss_of writes to the parameter 'code'"),
        (
            "self.code = torch.nn.Parameter(self.code * 0.9, False)",
            "step 0: the parameter 'code' is not the same object as when",
        ),
    ],
    ids=["data", "in vain", "anew"],
)
def test_a_codebook_that_the_forward_writes_to_is_named(
    writes, said, microbatches, player, tmp_path
):
    """Not only that two calls of one microbatch differ, which it causes."""
    with pytest.raises(AssertionError, match=said):
        player.play(SCRIPT.format(writes=writes, microbatches=microbatches), tmp_path / "alone")


def test_a_graph_that_was_made_outside_of_the_loss_is_told(player, tmp_path):
    """Torch alone would advise to retain it."""
    script = SCRIPT.format(writes="pass", microbatches=2)
    script = script.replace(
        "    session.backward(lambda x: model(x),",
        "    scale = model.bias.exp()\n    session.backward(lambda x: (model(x) * scale).mean(),",
    )
    with pytest.raises(
        AssertionError, match=r"Misuse: step 0: .* compute it in loss_of, or detach"
    ):
        player.play(script, tmp_path / "alone")


def test_a_loss_that_is_not_finite_is_told_with_what_to_do(player, tmp_path):
    """A script's own check, which would leave the step out, comes after this one."""
    script = SCRIPT.format(writes="found = found / (step != 1)", microbatches=2)
    with pytest.raises(AssertionError, match=r"step 1: the loss is .* submit --nan skip"):
        player.play(script, tmp_path / "alone")


def test_the_script_of_these_tests_is_right(player, tmp_path):
    player.play(SCRIPT.format(writes="pass", microbatches=4), tmp_path / "alone")


@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_an_embedding_that_shortens_its_rows_is_told_what_does_the_same(max_norm, player, tmp_path):
    """Whether a row is too long already or not; the way out is what the forward would have done."""
    script = f"""
import torch
from orchestrator import Session
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(10, 4, max_norm={max_norm}), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
session = Session(model, optimizer, microbatches=2)
for step in session.steps(3):
    session.backward(lambda x: model(x).square().mean(), torch.arange(8) % 5)
    optimizer.step()
    optimizer.zero_grad()
"""
    says = f"step 0: the forward of '0' shortens rows of its weight to max_norm={max_norm}.*renorm_"
    with pytest.raises(AssertionError, match=says):
        player.play(script, tmp_path / "alone")


def test_a_forward_before_backward_that_moves_averages_is_named(player, tmp_path):
    """As scripts compute outputs in train mode, for a number that they show."""
    script = """
import torch
from orchestrator import Session
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = Session(model, optimizer, microbatches=2)
for step in session.steps(3):
    x = torch.randn(16, 4)
    outputs = model(x)
    session.backward(lambda x: model(x).square().mean(), x)
    optimizer.step()
"""
    says = r"step 0: the buffer '1.\w+' was changed before .*call the model in loss_of only"
    with pytest.raises(AssertionError, match=says):
        player.play(script, tmp_path / "alone")


def test_parameters_in_the_place_of_the_norm_are_told_where_they_belong(player, tmp_path):
    """In the order of torch's own function, which a port has there."""
    script = SCRIPT.format(writes="pass", microbatches=2).replace(
        "    optimizer.step()", "    session.clip_grad_norm_(model.parameters(), 1.0)"
    )
    says = r"the norm is a generator: give the number first, .*parameters=model.parameters\(\)"
    with pytest.raises(AssertionError, match=says):
        player.play(script, tmp_path / "alone")
