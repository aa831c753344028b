"""What a step sets for good in an object, a dict or a name of all is refused at once, if later steps train by it."""

from collections.abc import Callable

import pytest

from agent.errors import Misuse

SCRIPT = """
import copy, types
import torch
from agent import Session
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.scale = torch.nn.Linear(4, 1), 1.0
    def forward(self, x):
        return self.layer(x) * self.scale
class Course:
    beta = 1.0
    def __init__(self):
        self.phase, self.level, self.epoch, self.order, self.target = "easy", 0, -1, None, copy.deepcopy(model)
        self.asks, self.shown = False, 0.0
    def update(self, step, loss=0.0):
        if step == 2 or loss > 1e9:
            self.phase = "hard"
    def harder(self):
        self.level = 2
    def sync(self):
        self.target = copy.deepcopy(model)
    def begin(self, epoch):
        if epoch != self.epoch:
            self.epoch, self.order = epoch, [epoch, epoch]
    def rows(self, step):
        return [torch.full((2, 4), step + 1.0 + self.level)] * 2
    def loss(self, x):
        return model(x).square().mean() if self.phase == "easy" else model(x).abs().mean()
class Kept(Course):
    def state_dict(self):
        return {{"phase": self.phase}}
    def load_state_dict(self, state):
        vars(self).update(state)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
course, kept, cfg, weight = Course(), Kept(), {{"w": 1.0, "on": True, "clip": 1.0}}, 1.0
group = optimizer.param_groups[0]
def heavier():
    global weight
    weight = 3.0
def loss_of(x):
    return cfg["w"] * model(x).square().mean()
session = Session(model, optimizer, kept, microbatches=2)
for step in session.steps(9):
    {before}
    for x in session.share(course.rows(step)):
        session.backward({loss})
    {behind}
    optimizer.step()
    if session.leader: print(step, course.shown, cfg)
"""
SQUARE = "model(x).square().mean()"
REFUSED = {
    "an item": ("", f"cfg['w'] * {SQUARE}", "if step == 4: cfg['w'] = 3.0", "cfg['w']"),
    "items by update": (
        "",
        f"cfg['w'] * {SQUARE}",
        "if step == 4: cfg.update(clip=1.0, w=3.0)",
        "cfg['w']",
    ),
    "items by a dict": (
        "",
        f"cfg['w'] * {SQUARE}",
        "if step == 4: cfg.update({'w': 3.0})",
        "cfg['w']",
    ),
    "an attribute by its name": (
        "",
        f"course.beta * {SQUARE}",
        "if step == 4: setattr(course, 'beta', 3.0)",
        "course.beta",
    ),
    "an attribute": (
        "if step == 4: course.beta = 3.0",
        f"course.beta * {SQUARE}",
        "",
        "course.beta",
    ),
    "of a class": ("", f"Course.beta * {SQUARE}", "if step == 4: Course.beta = 3.0", "Course.beta"),
    "again and again": (
        "if step % 4 == 0: course.beta = 1 / (1 + step)",
        f"course.beta * {SQUARE}",
        "",
        "course.beta",
    ),
    "from a step on, but too late for it": (
        "",
        f"cfg['w'] * {SQUARE}",
        "if step >= 4: cfg['w'] = 3.0",
        "cfg['w']",
    ),
    "by what was found out": (
        "",
        f"cfg['w'] * {SQUARE}",
        "if session.loss < 1e-9: cfg['w'] = 3.0",
        "cfg['w']",
    ),
    "the last loss": ("", f"cfg['w'] * {SQUARE}", "cfg['w'] = session.loss", "cfg['w']"),
    "what a function reads": ("", "loss_of(x)", "if step == 4: cfg['w'] = 3.0", "cfg['w']"),
    "what a method sets and another reads": (
        "course.update(step)",
        "course.loss(x)",
        "",
        "course.phase",
    ),
    "what a method finds out": (
        "",
        "course.loss(x)",
        "course.update(0, session.loss)",
        "course.phase",
    ),
    "what the microbatches are made by": (
        "",
        SQUARE,
        "if step == 4: course.harder()",
        "course.level",
    ),
    "a name of all": ("", f"weight * {SQUARE}", "if step == 4: heavier()", "weight"),
    "what a model goes by": ("", SQUARE, "if step == 4: model.scale = 2.0", "model.scale"),
    "what gradients are clipped to": (
        "",
        SQUARE,
        "torch.nn.utils.clip_grad_norm_(model.parameters(), cfg['clip'])\n    if step == 4: cfg['clip'] = 0.1",
        "cfg['clip']",
    ),
    "what an object does for each epoch, asked in some steps only": (
        "if step % 3 == 0: course.begin(step // 3)",
        f"{SQUARE} * course.order[0]",
        "",
        "course.order",
    ),
    "a target that is made anew now and then": (
        "",
        "(model(x) - course.target(x).detach()).square().mean()",
        "if step % 4 == 3: course.sync()",
        "course.target",
    ),
}
ALLOWED = {
    "what every step sets": (
        "cfg['w'] = 1.0 if step < 4 else 3.0; course.update(3 - 1)",
        "loss_of(x)",
        "",
    ),
    "what is set in either case": (
        "if step < 4: cfg['w'] = 1.0\n    else: cfg['w'] = 3.0",
        "loss_of(x)",
        "",
    ),
    "items that every step updates": ("cfg.update(w=1.0 if step < 4 else 3.0)", "loss_of(x)", ""),
    "from a step on": ("if step >= 4: cfg['w'] = 3.0", "loss_of(x)", ""),
    "from a step on, as it grows": (
        "if step > 3: course.beta = (step - 3) / 9",
        f"course.beta * {SQUARE}",
        "",
    ),
    "what is only shown": (
        "",
        SQUARE,
        "if step == 4: course.shown = session.loss\n    line = f'{course.shown}'\n    print(line)",
    ),
    "what says whether to show": (
        "",
        SQUARE,
        "if step == 4: cfg['on'] = False\n    if cfg['on']: print(step)",
    ),
    "what is there for a moment": (
        "if step % 4 == 0: model.scale = 2.0; model(torch.ones(1, 4)); model.scale = 1.0",
        SQUARE,
        "",
    ),
    "what is put back": (
        "if step % 4 == 0: before = cfg['w']; cfg['w'] = 2.0; print(cfg); cfg['w'] = before",
        "loss_of(x)",
        "",
    ),
    "what a step is over with": (
        "",
        "loss_of(x)",
        "if step % 4 == 0: cfg['w'] = 2.0; print(cfg)\n    cfg['w'] = 1.0",
    ),
    "what an epoch begins with": (
        "course.begin(step // 3)",
        f"{SQUARE} * course.order[0]",
        "",
    ),
    "what the session has": ("", "kept.loss(x)", "if step == 4: kept.phase = 'hard'"),
    "a setting of the optimizer": ("", SQUARE, "if step == 4: group['lr'] = 0.001"),
    "what no setting asks for": ("if not cfg['on']: cfg['w'] = 3.0", "loss_of(x)", ""),
}


def filled(before: str, loss: str, behind: str) -> str:
    return SCRIPT.format(before=before or "pass", loss=loss, behind=behind or "pass")


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_step_sets_for_good_is_refused(by_hand: Callable[[str], None], case: str) -> None:
    """In the first step, by the words of the loop, and with what to do."""
    *parts, words = REFUSED[case]
    with pytest.raises(Misuse, match="goes on from step to step") as error:
        by_hand(filled(*parts))
    said = str(error.value)
    assert said.startswith("train.py:")
    assert f": `{words}` goes on" in said
    assert "set it anew in every step" in said


@pytest.mark.parametrize("case", ALLOWED)
def test_what_later_steps_set_themselves_or_only_show_is_not(
    by_hand: Callable[[str], None], case: str
) -> None:
    by_hand(filled(*ALLOWED[case]))
