"""Scripts that use all gradients or weights at once: right where a worker has them all, and refused where it has a part."""

from pathlib import Path

import pytest
from crews import Crew, ends_alike, played_alone, until

from agent.messages import WorkerFailed

pytestmark = pytest.mark.processes

TOY = Path(__file__).parents[1].joinpath("wide.py").read_text()
STEPS = "12"
CLIP = "        session.clip_grad_norm_(1.0)\n"
ADAM = "torch.optim.AdamW(model.parameters(), lr=1e-3)"
LAMB = """
class Lamb(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, normed=False):
        super().__init__(params, {"lr": lr, "normed": normed})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            norms = torch.stack([param.grad.norm() for param in params])
            whole = norms.norm() if group["normed"] else torch.tensor(1.0)
            for param in params:
                mean = self.state[param].setdefault("mean", torch.zeros_like(param))
                mean.lerp_(param.grad / whole, 0.1)
                param.sub_(mean * (param.norm() / mean.norm()) * group["lr"])


"""
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
NOISE = """\
        for p in model.parameters():
            if p.grad is not None:
                p.grad.add_(torch.randn_like(p.grad), alpha=1e-3)
"""
BY_HAND = """\
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.data.mul_(1 - 1e-3 * torch.rand(()))
"""
FOLLOWING_INPUT = """
class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)

    def forward(self, x):
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        return x - self.mean


"""
IN_PARTS = """\
        session.clip_grad_norm_(float("inf"))
        session.clip_grad_norm_(0.05, parameters=model[:3].parameters())
        session.clip_grad_norm_(0.02, parameters=model[3].parameters())
"""


def changed(*pairs: tuple[str, str]) -> str:
    text = TOY
    for before, after in pairs:
        assert before in text
        text = text.replace(before, after)
    return text


def optimized(by: str) -> str:
    return changed(("def main(", LAMB.lstrip() + "def main("), (ADAM, by))


def following(made: str, taking_in: str) -> str:
    """The toy with something that follows its weights, and is what it saves."""
    return changed(
        ("def main(", FOLLOWS.lstrip() + "def main("),
        ("    session = ", f"    average = {made}\n    session = "),
        ("optimizer, microbatches", "optimizer, average, microbatches"),
        ("        if session.leader", f"        {taking_in}\n        if session.leader"),
        ("model.state_dict(), out", "average.state_dict(), out"),
    )


RIGHT = {
    "a norm of each": optimized("Lamb(model.parameters())"),
    "clipped in parts": changed((CLIP, IN_PARTS)),
    "a buffer of one stage that is not saved": changed(
        ("def main(", FOLLOWING_INPUT.lstrip() + "def main("), ("nn.Tanh())", "Mean(), nn.Tanh())")
    ),
    "an average of a whole model": following(
        "Follows(model)", "average.take_in(model.state_dict().values())"
    ),
}
LAMB_OF_ALL = optimized("Lamb(model.parameters(), normed=True)")
# What else changes gradients or weights, or follows them, is refused alike: see test_gradients and test_averages.
REFUSED = {
    "Lamb makes something else of a parameter": LAMB_OF_ALL,
    "AveragedModel takes in all weights": following(
        "torch.optim.swa_utils.AveragedModel(model)", "average.update_parameters(model)"
    ),
    "was changed after session.backward(...)": changed((CLIP, BY_HAND)),
}
WHOLE = {"an optimizer": LAMB_OF_ALL, "noise": changed((CLIP, NOISE))}


def played(crew: Crew, tmp_path: Path, text: str, *, owned: bool) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    alone = played_alone(script, tmp_path / "alone" / "out.pt", STEPS)
    crew.depth, crew.owned = 2, owned
    crew.begin(2, text, STEPS, str(crew.folder / "out.pt"))
    ends_alike(crew, alone, int(STEPS))


@pytest.mark.parametrize("what", RIGHT)
def test_what_is_of_one_layer_or_of_all_is_right(crew: Crew, tmp_path: Path, what: str) -> None:
    played(crew, tmp_path, RIGHT[what], owned=True)


@pytest.mark.parametrize("what", WHOLE)
def test_everything_is_right_where_all_layers_are(crew: Crew, tmp_path: Path, what: str) -> None:
    """Workers of a chain that keep the whole state have all gradients after `backward`."""
    played(crew, tmp_path, WHOLE[what], owned=False)


@pytest.mark.parametrize("why", REFUSED)
def test_what_would_be_of_a_part_is_refused(crew: Crew, why: str) -> None:
    """With its name, and before a step that was trained with it is the state that others go on from."""
    crew.depth, crew.owned = 2, True
    crew.begin(2, REFUSED[why], STEPS, str(crew.folder / "out.pt"))
    failed = until("the failure", lambda: crew.of(WorkerFailed))[0]
    assert failed.kind == "refused"
    assert why in failed.detail
    assert crew.step <= 1
