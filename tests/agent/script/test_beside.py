"""What a script keeps beside its session is found when it has moved on, and refused by its name."""

from collections.abc import Callable

import pytest

from agent.errors import Misuse

SCRIPT = """
import copy
import torch
from agent import Session
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=4)
def endless():
    while True:
        for one in data:
            yield one
def handed_on():
    while True:
        yield from data
class Trainer:
    pass
class Average:
    def __init__(self):
        self.shadow = {{k: v.clone() for k, v in model.state_dict().items()}}
    def state_dict(self):
        return {{"shadow": self.shadow}}
    def load_state_dict(self, state):
        self.shadow = state["shadow"]
class Lazy(dict):
    def keys(self):
        return ["weight"]
    def values(self):
        raise ImportError("loaded when it is asked for")
    items = values
trainer = Trainer()
def batches(step):
    return [torch.full((2, 4), step + 1.0)] * 2
{before}
session = Session(model, optimizer, {given}microbatches=2)
for step in session.steps(5):
    for x in session.share(batches(step)):
        session.backward(model(x).square().mean() / 100)
    optimizer.step()
    {behind}
"""
AVERAGE = "average = torch.optim.swa_utils.AveragedModel(model)"
BATCHES = "batches = lambda step: [next({}) for _ in range(2)]"
BLEND = "for k, v in model.state_dict().items(): {}[k].mul_(0.9).add_(v, alpha=0.1)"
COPY = "{k: v.clone() for k, v in model.state_dict().items()}"
PLATEAU = "plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)"
WARM = "warm = torch.optim.lr_scheduler.LinearLR(optimizer); both = torch.optim.lr_scheduler.ChainedScheduler([warm])"
LION = """
class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1):
        params = list(params)
        super().__init__(params, {"lr": lr})
        self.t, self.means = 0, {p: torch.zeros_like(p) for p in params}
    @torch.no_grad()
    def step(self):
        self.WHAT
        for group in self.param_groups:
            group["t"] = group.get("t", 0) + 1
            for p in group["params"]:
                self.state[p].setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                p.sub_(self.state[p]["mean"].sign(), alpha=group["lr"])
optimizer = Lion(model.parameters())
"""
MEANS = "[mean.lerp_(p.grad, 0.1) for p, mean in self.means.items()]"
COOLING = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.tau, self.told = torch.nn.Linear(4, 1), 1.0, 0
    def forward(self, x):
        return self.layer(x) / self.tau
    def cool(self):
        self.tau *= 0.9
    def count(self):
        self.told += 1
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
RATE = "optimizer.param_groups[0]['lr'] = 0.1 / rate()"
RUNNING = """
import numpy as np
class Running:
    total = torch.zeros(2)
    def __init__(self):
        self.mean, self.of, self.rows = torch.zeros(4), np.zeros(4), {"mean": torch.zeros(4)}
        self.flat = [p.detach().clone() for p in model.parameters()]
    def replace(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
    def replace_an_array(self, x):
        delta = x.mean(0).numpy() - self.of
        self.of, self.seen = self.of + 0.1 * delta, len(x)
    def replace_a_list(self, x):
        self.flat = [mean - 0.1 * (mean - p.detach()) for mean, p in zip(self.flat, model.parameters())]
    def replace_items(self, x):
        for i, p in enumerate(model.parameters()):
            self.flat[i] = 0.9 * self.flat[i] + 0.1 * p.detach()
    def replace_by_a_key(self, x):
        self.rows["mean"] = self.rows["mean"] * 0.9 + x.mean(0)
    @classmethod
    def replace_of_all(cls, x):
        cls.total = cls.total * 0.9 + x.mean()
    def begin_anew(self, x):
        self.row = x.mean(0)
        self.row = self.row / self.row.norm()
    def give_back(self, x):
        self.mean = self.mean.to("cpu")
    def tell_times(self, x):
        now_s = time.perf_counter()
        spent_s = now_s - self.began_s
        self.spent_s = 0.9 * self.spent_s + 0.1 * spent_s
        self.began_s = now_s
running = Running()
"""
AVERAGED = """
AVERAGE = [p.detach().clone() for p in model.parameters()]
def follow():
    for i, p in enumerate(model.parameters()):
        AVERAGE[i] = 0.9 * AVERAGE[i] + 0.1 * p.detach()
"""
MADE = """
def made():
    WHAT
    return rate
rate = made()
"""
REFUSED = {
    "a random stream of one's own": (
        "import numpy as np\nrng = np.random.default_rng(0)",
        "optimizer.param_groups[0]['lr'] = rng.random()",
        "`rng`",
        "from its number",
    ),
    "a random stream that is seeded once": (
        "noise = torch.Generator()\nnoise.manual_seed(0)",
        "torch.rand(1, generator=noise)",
        "`noise`",
        "from its number",
    ),
    "a random stream that a function seeds once": (
        "import random\nrng = random.Random()\ndef seed_all(seed):\n    rng.seed(seed)\n"
        "def main():\n    seed_all(1)\nmain()",
        "rng.random()",
        "`rng`",
        "from its number",
    ),
    "a random stream that one step seeds": (
        "noise = torch.Generator()",
        "torch.rand(1, generator=noise)\n    if step == 0: noise.manual_seed(1)",
        "`noise`",
        "from its number",
    ),
    "a random stream that an object begins with": (
        "import random\nclass Draws:\n    def __init__(self):\n"
        "        self.rng = random.Random()\n        self.rng.seed(1)\ndraws = Draws()",
        "draws.rng.random()",
        "`draws.rng`",
        "from its number",
    ),
    "a random stream in an object": (
        "import random\ntrainer.rng = random.Random(0)",
        "trainer.rng.random()",
        "`trainer.rng`",
        "from its number",
    ),
    "a mean that another takes the place of": (
        RUNNING,
        "running.replace(batches(step)[0])",
        "`running.mean`",
        "state_dict and load_state_dict",
    ),
    "an array that another takes the place of": (
        RUNNING,
        "running.replace_an_array(batches(step)[0])",
        "`running.of`",
        "state_dict and load_state_dict",
    ),
    "a list that another takes the place of": (
        RUNNING,
        "running.replace_a_list(batches(step)[0])",
        "`running.flat`",
        "state_dict and load_state_dict",
    ),
    "tensors of a list that others take the place of": (
        RUNNING,
        "running.replace_items(batches(step)[0])",
        "`running.flat`",
        "state_dict and load_state_dict",
    ),
    "a tensor of a dict that another takes the place of": (
        RUNNING,
        "running.replace_by_a_key(batches(step)[0])",
        "`running.rows`",
        "state_dict and load_state_dict",
    ),
    "a tensor of a class that another takes the place of": (
        RUNNING,
        "Running.replace_of_all(batches(step)[0])",
        "`Running.total`",
        "state_dict and load_state_dict",
    ),
    "tensors around a function that others take the place of": (
        AVERAGED,
        "follow(); torch.stack([each.mean() for each in AVERAGE])",
        "`AVERAGE[i]`",
        "state_dict and load_state_dict",
    ),
    "a tensor of the script that another takes the place of": (
        "factor = torch.ones(())\ndef shrink():\n    global factor\n    factor = factor * 0.9",
        "shrink(); optimizer.param_groups[0]['lr'] = float(factor)",
        "`factor`",
        "state_dict and load_state_dict",
    ),
    "a count in a namespace": (
        "from types import SimpleNamespace\nat = SimpleNamespace(seen=0)",
        "at.seen += 1; optimizer.param_groups[0]['lr'] = 0.1 / at.seen",
        "`at.seen`",
        "state_dict and load_state_dict",
    ),
    "what gradients are made smaller by": (
        "class State:\n    lr = 0.1\n",
        "State.lr = State.lr * 0.9\n    for p in model.parameters(): p.grad = p.grad * State.lr",
        "`State.lr`",
        "state_dict and load_state_dict",
    ),
    "what gradients are made smaller by in place": (
        "class State:\n    lr = 0.1\n",
        "State.lr = State.lr * 0.9\n    for p in model.parameters(): p.grad *= State.lr",
        "`State.lr`",
        "state_dict and load_state_dict",
    ),
    "a count that a library's object is given": (
        f"{PLATEAU}\nclass State:\n    seen = 0\n",
        "State.seen += 1; plateau.factor = 0.1 / State.seen",
        "`State.seen`",
        "state_dict and load_state_dict",
    ),
    "a count that is asked for by its name": (
        "class State:\n    seen = 0\n",
        "State.seen += 1; optimizer.param_groups[0]['lr'] = 0.1 / getattr(State, 'seen')",
        "`State.seen`",
        "state_dict and load_state_dict",
    ),
    "a count that is given to what only seems to say it": (
        "class State:\n    seen = 0\ndef log(n): optimizer.param_groups[0]['lr'] = 0.1 / n\n",
        "State.seen += 1; log(State.seen)",
        "`State.seen`",
        "state_dict and load_state_dict",
    ),
    "a count around a function": (
        MADE.replace(
            "WHAT",
            "n = 0\n    def rate():\n        nonlocal n\n        n += 1\n        return n",
        ),
        RATE,
        "`rate.n`",
        "state_dict and load_state_dict",
    ),
    "a factor of the script": (
        "factor = 1.0\ndef shrink():\n    global factor\n    factor = factor * 0.9\n    return factor",
        "shrink()",
        "`factor`",
        "state_dict and load_state_dict",
    ),
    "a list that a function has as its default": (
        "def rate(seen=[0]):\n    seen[0] += 1\n    return seen[0]",
        RATE,
        "`rate.seen[0]`",
        "state_dict and load_state_dict",
    ),
    "a dict that a method has as its default": (
        "class Rate:\n    def __call__(self, *, kept={'n': 0}):\n        kept['n'] = kept['n'] + 1\n        return kept['n']\n"
        "rate = Rate()",
        RATE,
        "`__call__.kept['n']`",
        "state_dict and load_state_dict",
    ),
    "the best of an array": (
        "import numpy as np; best = np.zeros(2)\n"
        "def least(loss):\n    if loss > best[0]: best[0] = loss\n    return best[0]",
        "least(step + 1)",
        "`best[0]`",
        "state_dict and load_state_dict",
    ),
    "an average around a function": (
        MADE.replace(
            "WHAT",
            "shadow = torch.zeros(())\n    def rate(): return shadow.mul_(0.9).add_(1).item()",
        ),
        RATE,
        "`rate.shadow`",
        "state_dict and load_state_dict",
    ),
    "an iterator around a function": (
        MADE.replace("WHAT", "it = iter(range(1, 99))\n    def rate(): return next(it)"),
        RATE,
        "`rate.it`",
        "anew from its number",
    ),
    "a count of a class": (
        "class State:\n    seen = 0",
        "State.seen += 1; optimizer.param_groups[0]['lr'] = 0.1 / State.seen",
        "`State.seen`",
        "state_dict and load_state_dict",
    ),
    "a count of a function": (
        "batches.seen = 0",
        "batches.seen += 1; optimizer.param_groups[0]['lr'] = 0.1 / batches.seen",
        "`batches.seen`",
        "state_dict and load_state_dict",
    ),
    "a counter": (
        f"import itertools; it = itertools.count(); {BATCHES.format('it').replace('next(it)', 'torch.ones(2, 4) * next(it)')}",
        "",
        "`it`",
        "anew from its number",
    ),
    "what goes round": (
        f"import itertools; it = itertools.cycle(data); {BATCHES.format('it')}",
        "",
        "`it`",
        "anew from its number",
    ),
    "what comes of an iterator": (
        f"it = map(abs, iter(data)); {BATCHES.format('it')}",
        "",
        "`it`",
        "anew from its number",
    ),
    "a count of an optimizer of one's own": (
        LION.replace("WHAT", "t += 1"),
        "",
        "`optimizer.t`",
        "its state_dict has",
    ),
    "means of an optimizer of one's own": (
        LION.replace("self.WHAT", MEANS),
        "",
        "`optimizer.means`",
        "state_dict and load_state_dict",
    ),
    "a number that the model goes by": (
        COOLING,
        "model.cool()",
        "`model.tau`",
        'register_buffer("tau"',
    ),
    "an average": (
        AVERAGE,
        "average.update_parameters(model)",
        "`average`",
        "Session(model, optimizer, average, ...)",
    ),
    "a copy that follows": (
        "average = copy.deepcopy(model)",
        "average.load_state_dict(model.state_dict())",
        "`average`",
        "Session(model, optimizer, average, ...)",
    ),
    "an average in a dict": (
        f"average = {COPY}",
        BLEND.format("average"),
        "`average`",
        "state_dict and load_state_dict",
    ),
    "an average among what is the model's": (
        "average = {**model.state_dict(), 'bias': model.bias.detach().clone()}",
        "average['bias'].mul_(0.9).add_(model.bias.detach(), alpha=0.1)",
        "`average`",
        "state_dict and load_state_dict",
    ),
    "a tensor that shrinks": (
        "factor = torch.ones(())",
        "factor.mul_(0.9)",
        "`factor`",
        "state_dict and load_state_dict",
    ),
    "a tensor in a list": (
        "factors = [torch.ones(())]",
        "factors[0].mul_(0.9)",
        "`factors`",
        "state_dict and load_state_dict",
    ),
    "an average in inference mode": (
        "with torch.inference_mode(): average = torch.zeros(1, 4)",
        "with torch.inference_mode(): average.lerp_(model.weight, 0.1)",
        "`average`",
        "state_dict and load_state_dict",
    ),
    "an average in an object": (
        f"trainer.shadow = {COPY}",
        BLEND.format("trainer.shadow"),
        "`trainer.shadow`",
        "state_dict and load_state_dict",
    ),
    "an average in an object of an object": (
        "trainer.average = Average()",
        BLEND.format("trainer.average.shadow"),
        "`trainer.average.shadow`",
        "state_dict and load_state_dict",
    ),
    "a schedule of the loss": (
        PLATEAU,
        "plateau.step(session.loss)",
        "`plateau`",
        "Session(model, optimizer, plateau, ...)",
    ),
    "a loader's iterator": (
        f"it = iter(data); {BATCHES.format('it')}",
        "",
        "`it`",
        "anew from its number",
    ),
    "a generator": (f"it = endless(); {BATCHES.format('it')}", "", "`it`", "anew from its number"),
    "a generator that hands on": (
        f"it = handed_on(); {BATCHES.format('it')}",
        "",
        "`it`",
        "anew from its number",
    ),
    "an iterator of a list": (
        f"it = iter(list(data)); {BATCHES.format('it')}",
        "",
        "`it`",
        "anew from its number",
    ),
    "a generator in an object": (
        f"trainer.it = endless(); {BATCHES.format('trainer.it')}",
        "",
        "`trainer.it`",
        "anew from its number",
    ),
}
ALLOWED = {
    "a random stream that each step seeds": (
        "noise = torch.Generator()",
        "",
        "noise.manual_seed(step); torch.rand(1, generator=noise)",
    ),
    "a random stream that a function seeds": (
        "import random\nrng = random.Random()\ndef drawn(step):\n    rng.seed(step)\n    return rng.random()",
        "",
        "drawn(step)",
    ),
    "a random stream that functions seed for each other": (
        "import random\nrng = random.Random()\ndef seed_all(seed): rng.seed(seed)\n"
        "def drawn(step):\n    seed_all(step)\n    return rng.random()\nseed_all(0)",
        "",
        "drawn(step)",
    ),
    "a random stream that a function seeds by another name": (
        "import random\nrng = random.Random()\ndef seed_all(seed): rng.seed(seed)\nseed_all(0); hooks = [seed_all]",
        "",
        "hooks[0](step); rng.random()",
    ),
    "a random stream that is made anew": (
        "import numpy as np",
        "",
        "rng = np.random.default_rng(step); rng.random()",
    ),
    "a random stream that nothing is drawn from": ("rng = torch.Generator()", "", ""),
    "what is begun anew before it is made of itself": (
        RUNNING,
        "",
        "running.begin_anew(batches(step)[0])",
    ),
    "what another has by the same name": (
        "",
        "",
        "trainer.loss = session.loss; trainer.x = batches(step)[0]; trainer.x = model(trainer.x).detach()",
    ),
    "what is the same when it is made of itself": (RUNNING, "", "running.give_back(0)"),
    "an average of times": (
        f"import time\n{RUNNING}running.began_s, running.spent_s = time.perf_counter(), 0.0",
        "",
        "running.tell_times(0)",
    ),
    "a count that is only said": (
        "calls, told = 0, {'n': 0}\ndef say():\n    global calls\n    calls += 1; told['n'] += 1\n"
        "    if calls % 9 == 0: print(calls)\n    print(f\"{told['n']} times\")",
        "",
        "say()",
    ),
    "what is said once": (
        "warned = False\ndef warn():\n    global warned\n    if not warned:\n        warned = True\n        print('slow')",
        "",
        "warn()",
    ),
    "what a function remembers": (
        "import functools\n@functools.lru_cache\ndef cached(n): return n * 2\n"
        "def of(n, memo={}, table=[None] * 9):\n    if n not in memo: memo[n] = n * 2\n"
        "    if table[n] is None: table[n] = n * 2\n    return memo[n] + table[n]",
        "",
        "of(step) + cached(step)",
    ),
    "what is made once": (
        MADE.replace(
            "WHAT",
            "scale = None\n    def rate():\n        nonlocal scale\n        if scale is None: scale = 2.0\n        return scale",
        ),
        "",
        "rate()",
    ),
    "what begins anew": (
        "hits, sums = 0, {'all': 0.0}\ndef evaluate():\n    global hits\n    hits, sums['all'] = 0, 0.0\n"
        "    for i in range(step): hits += i; sums['all'] += i\n    return hits + sums['all']",
        "",
        "evaluate()",
    ),
    "a time around a function": (
        "import time; spent_s = 0.0\ndef spend():\n    global spent_s\n    spent_s += time.perf_counter()\n    return spent_s",
        "",
        "spend()",
    ),
    "the number of the step around a function": (
        "class Meter:\n    def count(self): self.step += 1\n",
        "",
        "rate = lambda: 0.1 / (step + 1); optimizer.param_groups[0]['lr'] = rate()",
    ),
    "what is given by another name": (
        "average = Average()\n"
        + MADE.replace(
            "WHAT",
            "shadow = average.shadow\n    def rate(): return [v.mul_(0.9) for v in shadow.values()]",
        ),
        "average, ",
        "rate()",
    ),
    "what a class and a function have": (
        "class Config:\n    width, rows = 4, [torch.ones(2)]\nbatches.width = 4",
        "",
        "",
    ),
    "a counter of every step": ("import itertools", "", "it = itertools.count(); next(it)"),
    "an optimizer of one's own that keeps to its state": (
        LION.replace("self.WHAT", "pass"),
        "",
        "",
    ),
    "an optimizer of one's own that tells of itself": (
        LION.replace("WHAT", "t += 1").replace(
            "    @torch",
            "    def state_dict(self):\n        return {**super().state_dict(), 't': self.t}\n"
            "    def load_state_dict(self, state):\n        self.t = state.pop('t')\n"
            "        super().load_state_dict(state)\n    @torch",
        ),
        "",
        "",
    ),
    "a count that the model does not go by": (COOLING, "", "model.count()"),
    "tensors without memory of their own": (
        "graph = torch.eye(4).to_sparse(); sizes = torch.empty(4, device='meta')",
        "",
        "",
    ),
    "a score that is computed in inference mode": (
        "with torch.inference_mode(): scores = [torch.zeros(1)]",
        "",
        "with torch.inference_mode(): score = model(torch.ones(1, 4)).sum()",
    ),
    "an average that is given": (AVERAGE, "average, ", "average.update_parameters(model)"),
    "an average of one's own that is given": (
        "average = Average()",
        "average, ",
        BLEND.format("average.shadow"),
    ),
    "a schedule that is given": (PLATEAU, "plateau, ", "plateau.step(session.loss)"),
    "a schedule of schedules": (WARM, "both, ", "both.step()"),
    "a library's dict that loads what it is asked for": (
        "models = Lazy(weight='a.module')",
        "",
        "",
    ),
    "what is made anew in its place": (
        "last = {}; kept = [None]",
        "",
        "last['rows'] = torch.ones(2).mul_(step); kept[0] = last['rows']",
    ),
    "the model's buffers": (
        "norm = torch.nn.BatchNorm1d(4); model.norm = norm; own = list(model.buffers())",
        "",
        "norm(torch.ones(2, 4))",
    ),
    "a teacher that stays": ("teacher = copy.deepcopy(model)", "", "teacher(batches(0)[0])"),
    "a copy of every step": ("", "", f"before = {COPY}"),
    "an iterator of every step": ("", "", "it = iter(data); next(it)"),
    "a state dict that is kept": (
        "kept = model.state_dict(); kept['bias'] = torch.zeros(1); model.load_state_dict(kept)",
        "",
        "",
    ),
    "the model by another name": ("core = torch.nn.ModuleList([model])", "", ""),
    "an iterator's class": ("from itertools import repeat, count; import datetime", "", ""),
    "a compiled model": ("fast = torch.compile(model, backend='eager')", "", ""),
}


def filled(before: str, given: str, behind: str) -> str:
    return SCRIPT.format(before=before, given=given, behind=behind or "pass")


@pytest.mark.parametrize("case", REFUSED)
def test_what_moves_on_is_refused(by_hand: Callable[[str], None], case: str) -> None:
    """By its name, in the second step, with what to do."""
    before, behind, name, advice = REFUSED[case]
    with pytest.raises(Misuse, match=r"^step 1: .*goes on from step to step") as error:
        by_hand(filled(before, "", behind))
    assert name in str(error.value)
    assert advice in str(error.value)


@pytest.mark.parametrize("case", ALLOWED)
def test_what_is_given_or_stays_is_not(by_hand: Callable[[str], None], case: str) -> None:
    """Nor what is made anew in every step."""
    before, given, behind = ALLOWED[case]
    by_hand(filled(before, given, behind))


def test_what_the_loop_empties_it_empties_by_whatever_name(by_hand: Callable[[str], None]) -> None:
    """A hook has it around itself."""
    hook = "heard = []\n    def rate(module, given, out): heard.append(out)"
    before = f"{MADE.replace('WHAT', hook)}\nheard = rate.__closure__[0].cell_contents\nmodel.register_forward_hook(rate)"
    loop = "        heard.clear()\n        session.backward"
    by_hand(filled(before, "", "").replace("        session.backward", loop))
