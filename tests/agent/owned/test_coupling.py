"""What looks at all gradients at once: right where a worker has them all, and refused by name where it has a part."""

from pathlib import Path

import pytest
from crews import Crew, ends_alike, played_alone, until

from agent.messages import WorkerFailed

pytestmark = pytest.mark.processes

TOY = Path(__file__).parents[1].joinpath("wide.py")
LAMB = """
class Lamb(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, normed=False):
        super().__init__(params, {"lr": lr, "normed": normed, "training": False})

    def train(self):
        for group in self.param_groups:
            group["training"] = True
        return self

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            assert group["training"]
            params = [param for param in group["params"] if param.grad is not None]
            norms = torch.stack([param.grad.norm() for param in params])
            whole = norms.norm() if group["normed"] else torch.tensor(1.0)
            for param in params:
                state = self.state[param]
                mean = state.setdefault("mean", torch.zeros_like(param))
                mean.lerp_(param.grad / whole, 0.1)
                param.sub_(mean * (param.norm() / mean.norm()) * group["lr"])


"""
CLIP = """\
        total = sum(p.grad.norm() ** 2 for p in model.parameters() if p.grad is not None) ** 0.5
        for p in model.parameters():
            if p.grad is not None:
                p.grad.mul_(1 / (1 + total))"""
EACH = """\
        for p in model.parameters():
            if p.grad is not None:
                p.grad.clamp_(-0.01, 0.01)"""

NOISE = """\
        for p in model.parameters():
            if p.grad is not None:
                p.grad.add_(torch.randn_like(p.grad), alpha=1e-3)"""


def script(optimizer: str = "", clip: str = "") -> str:
    """The toy with another optimizer, or another way to clip."""
    text = TOY.read_text().replace("def main(", LAMB.lstrip() + "def main(")
    for mark, row in ((" optimizer = ", f"    optimizer = {optimizer}"), ("clip_grad_norm_", clip)):
        before = next(each for each in text.splitlines() if mark in each)
        text = text.replace(before, row) if row.split("=")[-1].strip() else text
    return text


def played(crew: Crew, tmp_path: Path, text: str, *, owned: bool) -> None:
    (tmp_path / "train.py").write_text(text)
    alone = played_alone(tmp_path / "train.py", tmp_path / "alone" / "out.pt", "12")
    crew.depth, crew.owned = 2, owned
    crew.begin(2, text, "12", str(crew.folder / "out.pt"))
    ends_alike(crew, alone, 12)


@pytest.mark.parametrize(
    "text",
    [script("Lamb(model.parameters()).train()"), script(clip=EACH)],
    ids=["each norm", "each clamp"],
)
def test_what_looks_at_one_gradient_after_the_other(crew: Crew, tmp_path: Path, text: str) -> None:
    """A layer is whole where it is kept."""
    played(crew, tmp_path, text, owned=True)


AVERAGE = "    average = torch.optim.swa_utils.AveragedModel(model)\n"
AVERAGED = (
    script()
    .replace("    session = ", f"{AVERAGE}    session = ")
    .replace("optimizer, microbatches", "optimizer, average, microbatches")
    .replace(
        "        if session.leader",
        "        average.update_parameters(model)\n        if session.leader",
    )
    .replace("model.state_dict()", "average.state_dict()")
)
WHOLE = {
    "Lamb makes something else of a parameter": script(
        "Lamb(model.parameters(), normed=True).train()"
    ),
    "`p.grad` is read here": script(clip=CLIP),
    "`torch.randn_like(p.grad)` is done here": script(clip=NOISE),
    "AveragedModel takes in all weights": AVERAGED,
}


@pytest.mark.parametrize("why", WHOLE)
def test_a_norm_of_all_gradients_is_right_where_all_are(
    crew: Crew, tmp_path: Path, why: str
) -> None:
    """Workers of a chain that keep the whole state have all gradients behind the loop."""
    played(crew, tmp_path, WHOLE[why], owned=False)


@pytest.mark.parametrize("why", WHOLE)
def test_a_norm_of_all_gradients_is_refused_where_a_part_is(crew: Crew, why: str) -> None:
    """Before a step is trained with the norm of a part, and by its name or line."""
    crew.depth, crew.owned = 2, True
    crew.begin(2, WHOLE[why], "12", str(crew.folder / "out.pt"))
    failed = until("the failure", lambda: crew.of(WorkerFailed))[0]
    assert failed.kind == "refused"
    assert why in failed.detail
    assert crew.step == 0
    if "read" in why:
        rows = WHOLE[why].splitlines()
        line = 1 + next(i for i, row in enumerate(rows) if "p.grad.norm()" in row)
        assert f"train.py:{line}: " in failed.detail


def test_a_gradient_that_is_not_here_is_said_to_be_none(crew: Crew, tmp_path: Path) -> None:
    """Right where workers have the whole state, and by hand."""
    crew.depth, crew.owned = 2, True
    crew.begin(
        2,
        script(clip=EACH.replace("if p.grad is not None", "if True")),
        "12",
        str(tmp_path / "out.pt"),
    )
    failed = until("the failure", lambda: crew.of(WorkerFailed))[0]
    assert failed.kind == "refused"
    assert "ask for it, `if p.grad is not None`" in failed.detail


TWICE = """\
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        nn.utils.clip_grad_norm_(model[1:].parameters(), 0.05)"""
BEFORE = """\
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)"""
APART = """\
        nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        nn.utils.clip_grad_norm_(model[:3].parameters(), 0.05)
        nn.utils.clip_grad_norm_(model[3].parameters(), 0.02)
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)"""
OTHERS = """\
        nn.utils.clip_grad_value_(model[0].parameters(), 1e-3)
        nn.utils.clip_grad_norm_(model[1:].parameters(), 0.05)"""


@pytest.mark.parametrize("clip", [TWICE, BEFORE], ids=["twice", "behind another"])
def test_the_norm_of_gradients_that_were_changed_is_refused_where_a_part_is(
    crew: Crew, clip: str
) -> None:
    """Nobody has told the norms of what they have become."""
    crew.depth, crew.owned = 2, True
    crew.begin(2, script(clip=clip), "12", str(crew.folder / "out.pt"))
    failed = until("the failure", lambda: crew.of(WorkerFailed))[0]
    assert failed.kind == "refused"
    assert "something has changed them since" in failed.detail


@pytest.mark.parametrize("clip", [APART, OTHERS], ids=["behind", "others before"])
def test_gradients_may_be_clipped_in_parts_and_otherwise_behind(
    crew: Crew, tmp_path: Path, clip: str
) -> None:
    """A look at the norm of all, norms of several parts, and what changes each gradient behind them are right; so is what
    changed gradients of which no norm is asked, wherever they are."""
    played(crew, tmp_path, script(clip=clip), owned=True)


FOLLOWS = """
class Follows:
    def __init__(self, model):
        self.weights = [each.clone() for each in model.state_dict().values()]

    @torch.no_grad()
    def take_in(self, weights):
        for mine, weight in zip(self.weights, weights):
            mine.lerp_(weight.detach(), 0.5)

    def state_dict(self):
        return {"weights": self.weights}

    def load_state_dict(self, state):
        for mine, weight in zip(self.weights, state["weights"]):
            mine.copy_(weight)


"""


def following(made: str, taking_in: str, given: str = "average", saved: str = "average") -> str:
    """The toy with something that follows its weights."""
    return (
        script()
        .replace("def main(", FOLLOWS.lstrip() + "def main(")
        .replace("    session = ", f"    average = {made}\n    session = ")
        .replace("optimizer, microbatches", f"optimizer, {given}, microbatches")
        .replace("        if session.leader", f"        {taking_in}\n        if session.leader")
        .replace("model.state_dict(), out", f"{saved}.state_dict(), out")
    )


EACH_ONE = "with torch.no_grad(): [a.lerp_(p, 0.5) for a, p in zip(average.parameters(), model.parameters())]"
COPIED = "__import__('copy').deepcopy(model)"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            following("Follows(model)", "average.take_in(model.parameters())"),
            "Follows2/weights/",
        ),
        # Where the teacher's layers are none of its student's are all away, and where they are not it cannot be written to.
        (following(f"nn.ModuleDict({{'teacher': {COPIED}}})", EACH_ONE), ""),
    ],
    ids=["own", "teacher"],
)
def test_what_follows_weights_that_are_not_here_is_refused(crew: Crew, text: str, why: str) -> None:
    """It was trained to its end with an average of not-a-number."""
    crew.depth, crew.owned = 2, True
    crew.begin(2, text, "12", str(crew.folder / "out.pt"))
    failed = until("the failure", lambda: crew.of(WorkerFailed))[0]
    assert failed.kind == "refused"
    assert why in failed.detail
    assert "may average model.state_dict() instead" in failed.detail
    assert crew.step == 1


def test_what_follows_a_whole_model_is_right(crew: Crew, tmp_path: Path) -> None:
    text = following("Follows(model)", "average.take_in(model.state_dict().values())")
    played(crew, tmp_path, text, owned=True)
