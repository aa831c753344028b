"""What a script counts from step to step is no part of the state: it is refused in the first steps, or does not go on."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest

from agent.errors import Misuse

SCRIPT = """
import collections, copy, random, time
import torch
from agent import Session
class Stopper:
    def __init__(self):
        self.best, self.bad, self.epoch, self.given, self.table = 9.9e9, 0, -1, False, {{"best": 2}}
    def least(self, found):
        self.best = min(self.best, found)
    def begin(self, epoch):
        if self.epoch != epoch:
            self.epoch = epoch
    def look(self, found):
        if found < self.best:
            self.best = found
        self.bad += 1
class Kept(Stopper):
    def state_dict(self):
        return dict(vars(self))
    def load_state_dict(self, state):
        vars(self).update(state)
class Trainer:
    def __init__(self):
        self.stopper, self.times = Stopper(), collections.deque(maxlen=2)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x, kept, order = torch.ones(2, 4), Kept(), [*range(9)]
table, momentum, memory, group = {{"best": 9.9e9, 0: 0, 1: 0, "s": 0.0}}, [0.0], {{}}, optimizer.param_groups[0]
session = Session(model, optimizer, kept, microbatches=1)
def share(step):
    for each in session.share([x]):
        session.backward(model(each).square().mean())
    optimizer.step()
def train(before, trainer):
    best, factor, count, losses, began_s, waited_s = 9.9e9, 1.0, 0, [], time.time(), 0.0
    for step in session.steps(4):
        {before}
        share(step)
        {behind}
    {after}
train(0, Trainer())
"""
REFUSED = {
    "a best loss": (
        "",
        "best = min(best, session.loss); group['lr'] = best",
        "train.py:39: `best` goes on",
    ),
    "a factor that shrinks": (
        "",
        "factor *= 0.9; group['lr'] = factor",
        "train.py:39: `factor` goes on",
    ),
    "a count": ("count += 1\n        if count > 9: break", "", "train.py:37: `count` goes on"),
    "a count that says what it is": (
        "count: int = count + 1; group['lr'] = 0.1 / count",
        "",
        "train.py:37: `count` goes on",
    ),
    "a count that is counted in passing": (
        "group['lr'] = 0.1 / (count := count + 1)",
        "",
        "train.py:37: `count` goes on",
    ),
    "a count that something is made of": (
        "count += 1; half = count / 2; group['lr'] = half",
        "",
        "train.py:37: `count` goes on",
    ),
    "a count that a function is given": (
        "count += 1; half = hash(count)",
        "",
        "train.py:37: `count` goes on",
    ),
    "a count that a function reads": (
        "count += 1",
        "",
        "train.py:37: `count` goes on",
        "look = lambda: count",
    ),
    "a count that is a result": ("count += 1", "", "train.py:37: `count` goes on", "print(count)"),
    "a rate of steps made by hand": (
        "",
        "factor *= 0.9\n        with torch.no_grad():\n            for p in model.parameters(): p -= factor * p.grad",
        "train.py:39: `factor` goes on",
    ),
    "what a tensor is made smaller by": (
        "weight = model.weight.detach()",
        "factor *= 0.9; weight *= factor",
        "train.py:39: `factor` goes on",
    ),
    "a count that a function is given while it is said": (
        "def halved(n): group['lr'] /= n; return n",
        "count += 1; print(halved(count))",
        "train.py:39: `count` goes on",
    ),
    "a count that is given to what only seems to say it": (
        "def log(n): group['lr'] = 0.1 / n",
        "count += 1; log(count)",
        "train.py:39: `count` goes on",
    ),
    "a count that says when something is done": (
        "def halved(): group['lr'] /= 2",
        "count += 1\n        if count > 2: best = halved()",
        "train.py:39: `count` goes on",
    ),
    "a count that says whether something is done": (
        "def halved(): group['lr'] /= 2",
        "count += 1; best = halved() if count > 2 else 0",
        "train.py:39: `count` goes on",
    ),
    "a count that another name is given in passing": (
        "",
        "count += 1; print(half := count / 2); group['lr'] = half",
        "train.py:39: `count` goes on",
    ),
    "a count that is asked for in passing": (
        "",
        "count += 1\n        if (half := count / 2) > 9: pass\n        group['lr'] = half",
        "train.py:39: `count` goes on",
    ),
    "a count that is given to what something else is called": (
        "def rate(n): group['lr'] = 0.1 / n\n        log = rate",
        "count += 1; log(count)",
        "train.py:40: `count` goes on",
    ),
    "a count that chooses a function": (
        "",
        "count += 1; [model.train, model.eval][count % 2](True)",
        "train.py:39: `count` goes on",
    ),
    "a count that a text reads": (
        "",
        "count += 1; group['lr'] = eval('0.1 / count')",
        "train.py:39: `count` goes on",
    ),
    "what is saved where it is the best": (
        "",
        "if session.loss < best: best = session.loss; torch.save(model, '/dev/null')",
        "train.py:39: `best` goes on",
    ),
    "the last of something": (
        "group['lr'] = before; before = session.loss",
        "",
        "train.py:37: `before` goes on",
    ),
    "what the first step of an epoch sets": (
        "if step % 2 == 0: order = [step, step]",
        "group['lr'] = order[step % 2]",
        "train.py:39: `order` goes on",
    ),
    "a best loss in a dict": (
        "",
        "if session.loss < table['best']: table['best'] = session.loss",
        "train.py:39: `table` goes on",
    ),
    "a momentum in a list": (
        "",
        "momentum[0] = 0.9 * momentum[0] + model.weight.grad",
        "train.py:39: `momentum` goes on",
    ),
    "a count of each": ("", "table[step % 2] += 1", "train.py:39: `table` goes on"),
    "what each epoch makes of what it was": (
        "epoch = step // 2\n        if epoch != count: count = epoch; factor = factor / 2",
        "group['lr'] = factor",
        "train.py:38: `factor` goes on",
    ),
    "an order that is shuffled": (
        "if step % 2 == 0: random.shuffle(order)",
        "",
        "train.py:37: `order` goes on",
    ),
    "a list of losses": ("", "losses.append(session.loss)", "step 1: `train.losses` goes on"),
    "a list of losses and times": (
        "",
        "losses.append(time.time() - began_s); losses.append(session.loss)",
        "step 1: `train.losses` goes on",
    ),
    "a list of losses by time": (
        "",
        "losses.append(session.loss / (time.time() - began_s))",
        "step 1: `train.losses` goes on",
    ),
    "a list of what was no time at first": (
        "took_s = session.loss",
        "losses.append(took_s); took_s = time.time() - began_s",
        "step 1: `train.losses` goes on",
    ),
    "a best loss in an object": (
        "",
        "trainer.stopper.look(session.loss); group['lr'] = trainer.stopper.best",
        "step 1: `train.trainer.stopper.best` goes on",
    ),
    "the least in an object": (
        "",
        "trainer.stopper.least(session.loss); group['lr'] = trainer.stopper.best",
        "step 1: `train.trainer.stopper.best` goes on",
    ),
}
AFTER = {
    "the best weights": ("if session.loss < 9: best = copy.deepcopy(model.state_dict())", True),
    "the best by what is given": ("if kept.best > step: best = step", True),
    "the best by a name": ("found = session.loss\n        if found < 9: best = step", True),
    "every step's": ("best = session.loss", False),
    "an early step's": ("if step == 1: best = copy.deepcopy(model.state_dict())", True),
    "the first epoch's": ("epoch = step // 2\n        if epoch < order[1]: best = epoch", True),
    "every other step's": ("if step % 2 == 0: best = step", False),
    "an early step's, and all others'": (
        "best = step\n        if step == 1: best = session.loss",
        False,
    ),
    "the last step's": ("if step == 3: best = session.loss", False),
    "an epoch's": ("epoch, at = divmod(step, 2)\n        if at == 1: best = epoch", False),
    "what says why it was left": ("if session.loss < 9:\n            best = 1; break", False),
    "what a setting asks for": ("if trainer.times: best = step", False),
}
SHOWN = {
    "a loss that is added up": (
        "",
        "factor += session.loss\n        if step % 2: print(f'{factor / 2:.3f}'); factor = 0.0",
        "factor",
    ),
    "a count, and what is made of it": (
        "count += 1; half = round(count / 2)",
        "print(half, flush=True)",
        "count",
    ),
    "the last of something": ("print(before); before = session.loss", "", "before"),
    "the best so far": (
        "",
        "best = min(best, session.loss)\n        if best < 9: print(best)",
        "best",
    ),
    "a count that says what it is": ("count: int = count + 1; print(count)", "", "count"),
    "what is said beside something that is done": (
        "def evaluated(): model.eval(); model.train(); return 1.0",
        "epoch = step // 2; count += 1\n        if epoch % 2 == 0: print(count, evaluated())",
        "count",
    ),
    "a rate in a second": (
        "",
        "count += 1\n        if count == 2: now_s = time.time(); print(count / now_s); count = 0",
        "count",
    ),
    "whether something was said": ("", "if before == 0: print(step); before = 1", "before"),
}
ALLOWED = {
    "a setting of the optimizer": ("group['lr'] *= 0.9", ""),
    "what an object that is given has": ("kept.table['best'] = min(kept.table['best'], 1)", ""),
    "what is computed once": (
        "if step % 2 not in memory: memory[step % 2] = step % 2",
        "print(memory[step % 2])",
    ),
    "times in a dict": ("", "table['s'] += time.time() - began_s"),
    "a list of times": ("", "losses.append(time.time() - began_s)"),
    "the last times": (
        "now_s = time.perf_counter()",
        "took_s = time.perf_counter() - now_s; trainer.times.append(took_s * 1000)",
    ),
    "a name that is called as a count is": ("bad = step", "print(bad)"),
    "what is given": ("", "kept.look(session.loss)"),
    "an order that is made anew": ("order = [1, 2]; random.shuffle(order)", ""),
    "what every step sets anew": ("count = 0; count += 1; losses = []; losses.append(count)", ""),
    "what is set in either case": (
        "if step % 2 == 0: order = [1]\n        else: order = [2]",
        "print(order)",
    ),
    "what is set in the same case": (
        "if step % 2 == 0: order = [1]",
        "if step % 2 == 0: print(order)",
    ),
    "what is set in the case that goes on": (
        "if step == 3: break\n        else: order = [2]",
        "print(order)",
    ),
    "what is set in other blocks": (
        "with torch.no_grad(): order = [1]",
        "print(order)\n        try: other = 1\n        except ValueError: other = 2\n        print(other)",
    ),
    "what is done for each epoch": (
        "epoch = step // 2\n        if epoch != best: best = epoch; order = [epoch]",
        "print(order)",
    ),
    "what an object does for each epoch": ("trainer.stopper.begin(step // 2)", ""),
    "time": ("", "waited_s += time.time() - began_s; began_s = time.time()"),
    "what a comprehension names": ("", "best = [count for count in range(step)]"),
    "what is counted within a step": ("", "for index in range(3): factor = index + 1.0"),
}


def filled(before: str, behind: str, after: str = "") -> str:
    return SCRIPT.format(before=before or "pass", behind=behind or "pass", after=after or "pass")


@pytest.mark.parametrize("case", REFUSED)
def test_what_goes_on_is_refused(by_hand: Callable[[str], None], case: str) -> None:
    """By its name, in the first step if the source shows it; also where it is another function that has the loop."""
    before, behind, name, *after = REFUSED[case]
    with pytest.raises(Misuse, match="goes on from step to step") as error:
        by_hand(filled(before, behind, *after))
    assert str(error.value).startswith(name)
    assert "state_dict and load_state_dict" in str(error.value)


@pytest.mark.parametrize("case", SHOWN)
def test_what_is_only_shown_may_go_on_and_is_told(
    by_hand: Callable[[str], None], capsys: pytest.CaptureFixture[str], case: str
) -> None:
    """Once, with the line: whoever reads it shall know of how many steps it is."""
    before, behind, name = SHOWN[case]
    by_hand(filled(before, behind))
    (line,) = [each for each in capsys.readouterr().err.splitlines() if "is only shown" in each]
    assert line.startswith("train.py:")
    assert f"`{name}` goes on from step to step" in line
    assert "state_dict and load_state_dict" in line


@pytest.mark.parametrize("case", ALLOWED)
def test_what_does_not_is_not(by_hand: Callable[[str], None], case: str) -> None:
    """Nor is what the session has, nor what a clock has told, which is others' on every machine."""
    by_hand(filled(*ALLOWED[case]))


@pytest.mark.parametrize("case", AFTER)
def test_what_some_step_leaves_for_the_code_behind_the_loop(
    by_hand: Callable[[str], None], case: str
) -> None:
    """Whoever joined behind that step has not got it, unless the number of the step says which one it is."""
    behind, is_refused = AFTER[case]
    how = pytest.raises(Misuse, match="`best` goes on from step") if is_refused else nullcontext()
    with how:
        by_hand(filled("", behind, "print(best)"))


def test_trying_out_which_steps_set_something_sets_nothing(by_hand: Callable[[str], None]) -> None:
    """What the script sets in its objects by the number of the step stays as the script has set it, in the first step too."""
    before = "trainer.at = step; group['lr'] = 1.0 + step; found = step; found = kept.look(1.0)"
    tried = "if step % 2 == 0: last = step"
    behind = "assert (trainer.at, group['lr'], kept.bad) == (step, 1.0 + step, step + 1)"
    by_hand(filled(f"{before}\n        {tried}", behind, "print(last)"))
