"""What a script keeps beside its session in objects, iterators and random streams."""

from frames import LEAVE, PRELUDE, Table

BESIDE = Table(
    "beside",
    PRELUDE
    + """
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.DataLoader(torch.randn(256, 4), batch_size=4)
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
        self.shadow = {k: v.clone() for k, v in model.state_dict().items()}
    def state_dict(self):
        return {"shadow": self.shadow}
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
    return [torch.full((2, 4), step + 1.0)] * 4
<before>
session = Session(model, optimizer<given>)
for step in session.steps(8):
    result = session.backward(lambda x: model(x).square().mean() / 100, batches(step))
    <then>
    optimizer.step()
    <behind>
"""
    + LEAVE,
)
AVERAGE = "average = torch.optim.swa_utils.AveragedModel(model)"
BATCHES = "batches = lambda step: [next({}) for _ in range(4)]"
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

BESIDE.refused(
    "a random stream of one's own",
    "the stream rng goes on from where the step before has left it",
    before="rng = np.random.default_rng(0)",
    behind="optimizer.param_groups[0]['lr'] = rng.random()",
)

BESIDE.refused(
    "a random stream that is seeded once",
    "the stream noise goes on from where the step before has left it",
    before="noise = torch.Generator()\nnoise.manual_seed(0)",
    behind="torch.rand(1, generator=noise)",
)

BESIDE.refused(
    "a random stream that a function seeds once",
    "the stream rng goes on from where the step before has left it",
    before=(
        "rng = random.Random()\ndef seed_all(seed):\n    rng.seed(seed)\n"
        "def main():\n    seed_all(1)\nmain()"
    ),
    behind="rng.random()",
)

BESIDE.refused(
    "a random stream that one step seeds",
    "the stream noise goes on from where the step before has left it",
    before="noise = torch.Generator()",
    behind="torch.rand(1, generator=noise)\nif step == 0: noise.manual_seed(1)",
)

BESIDE.refused(
    "a random stream that an object begins with",
    "the stream draws.rng goes on from where the step before has left it",
    before=(
        "class Draws:\n    def __init__(self):\n"
        "        self.rng = random.Random()\n        self.rng.seed(1)\ndraws = Draws()"
    ),
    behind="draws.rng.random()",
)

BESIDE.refused(
    "a random stream in an object",
    "the stream trainer.rng goes on from where the step before has left it",
    before="trainer.rng = random.Random(0)",
    behind="trainer.rng.random()",
)

BESIDE.refused(
    "a mean that another takes the place of",
    "running.mean is made of what it was in the step before",
    before=RUNNING,
    behind="running.replace(batches(step)[0])",
)

BESIDE.refused(
    "an array that another takes the place of",
    "running.of is made of what it was in the step before",
    before=RUNNING,
    behind="running.replace_an_array(batches(step)[0])",
)

BESIDE.refused(
    "a list that another takes the place of",
    "running.flat is made of what it was in the step before",
    before=RUNNING,
    behind="running.replace_a_list(batches(step)[0])",
)

BESIDE.refused(
    "tensors of a list that others take the place of",
    "running.flat is made of what it was in the step before",
    before=RUNNING,
    behind="running.replace_items(batches(step)[0])",
)

BESIDE.refused(
    "a tensor of a dict that another takes the place of",
    "running.rows is made of what it was in the step before",
    before=RUNNING,
    behind="running.replace_by_a_key(batches(step)[0])",
)

BESIDE.refused(
    "a tensor of a class that another takes the place of",
    "Running.total is made of what it was in the step before",
    before=RUNNING,
    behind="Running.replace_of_all(batches(step)[0])",
)

BESIDE.refused(
    "tensors around a function that others take the place of",
    "AVERAGE[i] is made of what it was in the step before",
    before=AVERAGED,
    behind="follow(); torch.stack([each.mean() for each in AVERAGE])",
)

BESIDE.refused(
    "a tensor of the script that another takes the place of",
    "factor is made of what it was in the step before",
    before="factor = torch.ones(())\ndef shrink():\n    global factor\n    factor = factor * 0.9",
    behind="shrink(); optimizer.param_groups[0]['lr'] = float(factor)",
)

BESIDE.refused(
    "a count in a namespace",
    "at.seen is made of what it was in the step before",
    before="at = types.SimpleNamespace(seen=0)",
    behind="at.seen += 1; optimizer.param_groups[0]['lr'] = 0.1 / at.seen",
)

BESIDE.refused(
    "what gradients are made smaller by",
    "State.lr is made of what it was in the step before",
    before="class State:\n    lr = 0.1\n",
    then="State.lr = State.lr * 0.9\nfor p in model.parameters(): p.grad = p.grad * State.lr",
)

BESIDE.refused(
    "what gradients are made smaller by in place",
    "State.lr is made of what it was in the step before",
    before="class State:\n    lr = 0.1\n",
    then="State.lr = State.lr * 0.9\nfor p in model.parameters(): p.grad *= State.lr",
)

BESIDE.refused(
    "a count that a library's object is given",
    "State.seen is made of what it was in the step before",
    before=f"{PLATEAU}\nclass State:\n    seen = 0\n",
    behind="State.seen += 1; plateau.factor = 0.1 / State.seen",
)

BESIDE.refused(
    "a count that is asked for by its name",
    "State.seen is made of what it was in the step before",
    before="class State:\n    seen = 0\n",
    behind="State.seen += 1; optimizer.param_groups[0]['lr'] = 0.1 / getattr(State, 'seen')",
)

BESIDE.refused(
    "a count that is given to what only seems to say it",
    "State.seen is made of what it was in the step before",
    before="class State:\n    seen = 0\ndef log(n): optimizer.param_groups[0]['lr'] = 0.1 / n\n",
    behind="State.seen += 1; log(State.seen)",
)

BESIDE.refused(
    "a count around a function",
    "rate.n is made of what it was in the step before",
    before=(
        MADE.replace(
            "WHAT",
            "n = 0\n    def rate():\n        nonlocal n\n        n += 1\n        return n",
        )
    ),
    behind=RATE,
)

BESIDE.refused(
    "a factor of the script",
    "factor is made of what it was in the step before",
    before="factor = 1.0\ndef shrink():\n    global factor\n    factor = factor * 0.9\n    return factor",
    behind="shrink()",
)

BESIDE.refused(
    "a list that a function has as its default",
    "rate.seen[0] is made of what it was in the step before",
    before="def rate(seen=[0]):\n    seen[0] += 1\n    return seen[0]",
    behind=RATE,
)

BESIDE.refused(
    "a dict that a method has as its default",
    "__call__.kept['n'] is made of what it was in the step before",
    before=(
        "class Rate:\n    def __call__(self, *, kept={'n': 0}):\n        kept['n'] = kept['n'] + 1\n        return kept['n']\n"
        "rate = Rate()"
    ),
    behind=RATE,
)

BESIDE.refused(
    "the best of an array",
    "best[0] is made of what it was in the step before",
    before=(
        "best = np.zeros(2)\n"
        "def least(loss):\n    if loss > best[0]: best[0] = loss\n    return best[0]"
    ),
    behind="least(step + 1)",
)

BESIDE.refused(
    "an average around a function",
    "rate.shadow is made of what it was in the step before",
    before=(
        MADE.replace(
            "WHAT",
            "shadow = torch.zeros(())\n    def rate(): return shadow.mul_(0.9).add_(1).item()",
        )
    ),
    behind=RATE,
)

BESIDE.refused(
    "an iterator around a function",
    "the iterator rate.it is where the steps so far have left it",
    before=MADE.replace("WHAT", "it = iter(range(1, 99))\n    def rate(): return next(it)"),
    behind=RATE,
)

BESIDE.refused(
    "a count of a class",
    "State.seen is made of what it was in the step before",
    before="class State:\n    seen = 0",
    behind="State.seen += 1; optimizer.param_groups[0]['lr'] = 0.1 / State.seen",
)

BESIDE.refused(
    "a count of a function",
    "batches.seen is made of what it was in the step before",
    before="batches.seen = 0",
    behind="batches.seen += 1; optimizer.param_groups[0]['lr'] = 0.1 / batches.seen",
)

BESIDE.refused(
    "a counter",
    "the iterator it is where the steps so far have left it",
    before=f"it = itertools.count(); {BATCHES.format('it').replace('next(it)', 'torch.ones(2, 4) * next(it)')}",
)

BESIDE.refused(
    "what goes round",
    "the iterator it is where the steps so far have left it",
    before=f"it = itertools.cycle(data); {BATCHES.format('it')}",
)

BESIDE.refused(
    "what comes of an iterator",
    "the iterator it is where the steps so far have left it",
    before=f"it = map(abs, iter(data)); {BATCHES.format('it')}",
)

BESIDE.refused(
    "a count of an optimizer of one's own",
    "optimizer.t is made of what it was in the step before",
    before=LION.replace("WHAT", "t += 1"),
)

BESIDE.refused(
    "means of an optimizer of one's own",
    "optimizer.means is made of what it was in the step before",
    before=LION.replace("self.WHAT", MEANS),
)

BESIDE.refused(
    "a number that the model goes by",
    "model.tau is made of what it was in the step before",
    before=COOLING,
    behind="model.cool()",
)

BESIDE.refused(
    "an average",
    "average follows the steps, and is not registered",
    before=AVERAGE,
    behind="average.update_parameters(model)",
)

BESIDE.refused(
    "a copy that follows",
    "average follows the steps, and is not registered",
    before="average = copy.deepcopy(model)",
    behind="average.load_state_dict(model.state_dict())",
)

BESIDE.refused(
    "an average in a dict",
    "average is made of what it was in the step before",
    before=f"average = {COPY}",
    behind=BLEND.format("average"),
)

BESIDE.refused(
    "an average among what is the model's",
    "average is made of what it was in the step before",
    before="average = {**model.state_dict(), 'bias': model.bias.detach().clone()}",
    behind="average['bias'].mul_(0.9).add_(model.bias.detach(), alpha=0.1)",
)

BESIDE.refused(
    "a tensor that shrinks",
    "factor is made of what it was in the step before",
    before="factor = torch.ones(())",
    behind="factor.mul_(0.9)",
)

BESIDE.refused(
    "a tensor in a list",
    "factors is made of what it was in the step before",
    before="factors = [torch.ones(())]",
    behind="factors[0].mul_(0.9)",
)

BESIDE.refused(
    "an average in inference mode",
    "average is made of what it was in the step before",
    before="with torch.inference_mode(): average = torch.zeros(1, 4)",
    behind="with torch.inference_mode(): average.lerp_(model.weight, 0.1)",
)

BESIDE.refused(
    "an average in an object",
    "trainer.shadow is made of what it was in the step before",
    before=f"trainer.shadow = {COPY}",
    behind=BLEND.format("trainer.shadow"),
)

BESIDE.refused(
    "an average in an object of an object",
    "trainer.average.shadow is made of what it was in the step before",
    before="trainer.average = Average()",
    behind=BLEND.format("trainer.average.shadow"),
)

BESIDE.refused(
    "a schedule of the loss",
    "plateau follows the steps, and is not registered",
    before=PLATEAU,
    behind="plateau.step(result.loss)",
)

BESIDE.refused(
    "a loader's iterator",
    "the iterator it is where the steps so far have left it",
    before=f"it = iter(data); {BATCHES.format('it')}",
)

BESIDE.refused(
    "a generator",
    "the iterator it is where the steps so far have left it",
    before=f"it = endless(); {BATCHES.format('it')}",
)

BESIDE.refused(
    "a generator that hands on",
    "the iterator it is where the steps so far have left it",
    before=f"it = handed_on(); {BATCHES.format('it')}",
)

BESIDE.refused(
    "an iterator of a list",
    "the iterator it is where the steps so far have left it",
    before=f"it = iter(list(data)); {BATCHES.format('it')}",
)

BESIDE.refused(
    "a generator in an object",
    "the iterator trainer.it is where the steps so far have left it",
    before=f"trainer.it = endless(); {BATCHES.format('trainer.it')}",
)

BESIDE.allowed(
    "a random stream that each step seeds",
    "the stream begins anew in each step, by its number",
    before="noise = torch.Generator()",
    behind="noise.manual_seed(step); torch.rand(1, generator=noise)",
)

BESIDE.allowed(
    "a random stream that a function seeds",
    "the stream begins anew in each step, by its number",
    before="rng = random.Random()\ndef drawn(step):\n    rng.seed(step)\n    return rng.random()",
    behind="drawn(step)",
)

BESIDE.allowed(
    "a random stream that functions seed for each other",
    "the stream begins anew in each step, by its number",
    before=(
        "rng = random.Random()\ndef seed_all(seed): rng.seed(seed)\n"
        "def drawn(step):\n    seed_all(step)\n    return rng.random()\nseed_all(0)"
    ),
    behind="drawn(step)",
)

BESIDE.allowed(
    "a random stream that a function seeds by another name",
    "the stream begins anew in each step, by its number",
    before="rng = random.Random()\ndef seed_all(seed): rng.seed(seed)\nseed_all(0); hooks = [seed_all]",
    behind="hooks[0](step); rng.random()",
)

BESIDE.allowed(
    "a random stream that is made anew",
    "the stream is made anew in each step, by its number",
    before="",
    behind="rng = np.random.default_rng(step); rng.random()",
)

BESIDE.allowed(
    "a random stream that nothing is drawn from",
    "nothing is drawn from the stream",
    before="rng = torch.Generator()",
)

BESIDE.allowed(
    "what is begun anew before it is made of itself",
    "running.row is set anew before it is read",
    before=RUNNING,
    behind="running.begin_anew(batches(step)[0])",
)

BESIDE.allowed(
    "what another has by the same name",
    "trainer.loss and trainer.x are set anew in each step",
    behind="trainer.loss = result.loss; trainer.x = batches(step)[0]; trainer.x = model(trainer.x).detach()",
)

BESIDE.allowed(
    "what is the same when it is made of itself",
    "running.mean stays what it is",
    before=RUNNING,
    behind="running.give_back(0)",
)

BESIDE.allowed(
    "an average of times",
    "running.spent_s is a time, and is only kept",
    before=f"{RUNNING}running.began_s, running.spent_s = time.perf_counter(), 0.0",
    behind="running.tell_times(0)",
)

BESIDE.allowed(
    "a count that is only said",
    "calls and told are only shown",
    before=(
        "calls, told = 0, {'n': 0}\ndef say():\n    global calls\n    calls += 1; told['n'] += 1\n"
        "    if calls % 9 == 0: show(calls)\n    show(f\"{told['n']} times\")"
    ),
    behind="say()",
)

BESIDE.allowed(
    "what is said once",
    "warned says whether something was shown",
    before="warned = False\ndef warn():\n    global warned\n    if not warned:\n        warned = True\n        show('slow')",
    behind="warn()",
)

BESIDE.allowed(
    "what a function remembers",
    "memories hold what is computed of their key",
    before=(
        "@functools.lru_cache\ndef cached(n): return n * 2\n"
        "def of(n, memo={}, table=[None] * 9):\n    if n not in memo: memo[n] = n * 2\n"
        "    if table[n] is None: table[n] = n * 2\n    return memo[n] + table[n]"
    ),
    behind="of(step) + cached(step)",
)

BESIDE.allowed(
    "what is made once",
    "scale is the same whenever it is made",
    before=(
        MADE.replace(
            "WHAT",
            "scale = None\n    def rate():\n        nonlocal scale\n        if scale is None: scale = 2.0\n        return scale",
        )
    ),
    behind="rate()",
)

BESIDE.allowed(
    "what begins anew",
    "hits and sums begin anew whenever they are used",
    before=(
        "hits, sums = 0, {'all': 0.0}\ndef evaluate():\n    global hits\n    hits, sums['all'] = 0, 0.0\n"
        "    for i in range(step): hits += i; sums['all'] += i\n    return hits + sums['all']"
    ),
    behind="evaluate()",
)

BESIDE.allowed(
    "a time around a function",
    "spent_s is a time, and is only kept",
    before="spent_s = 0.0\ndef spend():\n    global spent_s\n    spent_s += time.perf_counter()\n    return spent_s",
    behind="spend()",
)

BESIDE.allowed(
    "the number of the step around a function",
    "the rate is a function of the step's number",
    before="class Meter:\n    def count(self): self.step += 1\n",
    behind="rate = lambda: 0.1 / (step + 1); optimizer.param_groups[0]['lr'] = rate()",
)

BESIDE.allowed(
    "what is given by another name",
    "the average's tensors are registered with it",
    before=(
        "average = Average()\n"
        + MADE.replace(
            "WHAT",
            "shadow = average.shadow\n    def rate(): return [v.mul_(0.9) for v in shadow.values()]",
        )
    ),
    given=", average",
    behind="rate()",
)

BESIDE.allowed(
    "what a class and a function have",
    "a class and a function have settings that stay",
    before="class Config:\n    width, rows = 4, [torch.ones(2)]\nbatches.width = 4",
)

BESIDE.allowed(
    "a counter of every step",
    "the counter is made anew in each step",
    before="import itertools",
    behind="it = itertools.count(); next(it)",
)

BESIDE.allowed(
    "an optimizer of one's own that keeps to its state",
    "all that the optimizer keeps is in its state",
    before=LION.replace("self.WHAT", "pass"),
)

BESIDE.allowed(
    "an optimizer of one's own that tells of itself",
    "the optimizer's state_dict has its count",
    before=(
        LION.replace("WHAT", "t += 1").replace(
            "    @torch",
            "    def state_dict(self):\n        return {**super().state_dict(), 't': self.t}\n"
            "    def load_state_dict(self, state):\n        self.t = state.pop('t')\n"
            "        super().load_state_dict(state)\n    @torch",
        )
    ),
)

BESIDE.allowed(
    "a count that the model does not go by",
    "model.told is counted and never read",
    before=COOLING,
    behind="model.count()",
)

BESIDE.allowed(
    "tensors without memory of their own",
    "a sparse tensor and one without memory stay as they are",
    before="graph = torch.eye(4).to_sparse(); sizes = torch.empty(4, device='meta')",
)

BESIDE.allowed(
    "a score that is computed in inference mode",
    "the score is made anew in each step",
    before="with torch.inference_mode(): scores = [torch.zeros(1)]",
    behind="with torch.inference_mode(): score = model(torch.ones(1, 4)).sum()",
)

BESIDE.allowed(
    "an average that is given",
    "the average is registered",
    before=AVERAGE,
    given=", average",
    behind="average.update_parameters(model)",
)

BESIDE.allowed(
    "an average of one's own that is given",
    "the average is registered",
    before="average = Average()",
    given=", average",
    behind=BLEND.format("average.shadow"),
)

BESIDE.allowed(
    "a schedule that is given",
    "the schedule is registered",
    before=PLATEAU,
    given=", plateau",
    behind="plateau.step(result.loss)",
)

BESIDE.allowed(
    "a schedule of schedules",
    "the schedule of schedules is registered",
    before=WARM,
    given=", both",
    behind="both.step()",
)

BESIDE.allowed(
    "a library's dict that loads what it is asked for",
    "a dict of a library's stays as it is",
    before="models = Lazy(weight='a.module')",
)

BESIDE.allowed(
    "what is made anew in its place",
    "the tensors are made anew in each step",
    before="last = {}; kept = [None]",
    behind="last['rows'] = torch.ones(2).mul_(step); kept[0] = last['rows']",
)

BESIDE.allowed(
    "the model's buffers",
    "the buffers are the model's",
    before="norm = torch.nn.BatchNorm1d(4); model.norm = norm; own = list(model.buffers())",
    behind="norm(torch.ones(2, 4))",
)

BESIDE.allowed(
    "a teacher that stays",
    "the teacher stays as it is",
    before="teacher = copy.deepcopy(model)",
    behind="teacher(batches(0)[0])",
)

BESIDE.allowed(
    "a copy of every step",
    "the copy is made anew in each step",
    behind=f"before = {COPY}",
)

BESIDE.allowed(
    "an iterator of every step",
    "the iterator is made anew in each step",
    behind="it = iter(data); next(it)",
)

BESIDE.allowed(
    "a state dict that is kept",
    "the dict is read once, before the session is made",
    before="kept = model.state_dict(); kept['bias'] = torch.zeros(1); model.load_state_dict(kept)",
)

BESIDE.allowed(
    "the model by another name",
    "the model has another name as well",
    before="core = torch.nn.ModuleList([model])",
)

BESIDE.allowed(
    "an iterator's class",
    "names of classes are imported, and not used",
    before="from itertools import repeat, count; import datetime",
)

BESIDE.allowed(
    "a compiled model",
    "the compiled model is the model",
    before="fast = torch.compile(model, backend='eager')",
)


# Where nothing is done with what is kept, the same again with the learning rate going by it.
RATES = {
    "a random stream that is seeded once": "float(torch.rand(1, generator=noise))",
    "a random stream that a function seeds once": "rng.random()",
    "a random stream that one step seeds": "float(torch.rand(1, generator=noise))",
    "a random stream that an object begins with": "draws.rng.random()",
    "a random stream in an object": "trainer.rng.random()",
    "a mean that another takes the place of": "1 / (1 + float(running.mean.sum()))",
    "an array that another takes the place of": "1 / (1 + abs(running.of.sum()))",
    "a list that another takes the place of": "abs(float(running.flat[0].sum()))",
    "tensors of a list that others take the place of": "abs(float(running.flat[0].sum()))",
    "a tensor of a dict that another takes the place of": "1 / (1 + float(running.rows['mean'].sum()))",
    "a tensor of a class that another takes the place of": "1 / (1 + float(Running.total.sum()))",
    "tensors around a function that others take the place of": "abs(float(AVERAGE[0].sum()))",
    "a factor of the script": "factor",
    "an average": "abs(float(average.module.weight.sum()))",
    "an average in a dict": "abs(float(average['weight'].sum()))",
    "an average among what is the model's": "abs(float(average['bias'].sum()))",
    "a tensor that shrinks": "float(factor)",
    "a tensor in a list": "float(factors[0])",
    "an average in inference mode": "abs(float(average.sum()))",
    "an average in an object": "abs(float(trainer.shadow['weight'].sum()))",
    "an average in an object of an object": "abs(float(trainer.average.shadow['weight'].sum()))",
}
for name, rate in RATES.items():
    BESIDE.gone_by(name, behind=f"optimizer.param_groups[0]['lr'] = 0.1 * {rate}")
BESIDE.gone_by(
    "a copy that follows",
    then="optimizer.param_groups[0]['lr'] = 0.1 / (1 + abs(float(average.weight.sum())))",
)
BESIDE.gone_by("a schedule of the loss", before="plateau.patience = 0")
BESIDE.gone_by(
    "a count that a library's object is given",
    before="plateau.patience = 0",
    behind="plateau.step(step)",
    given=", plateau",
)
BESIDE.refused(
    "a count of an optimizer of one's own, gone by",
    "optimizer.t is made of what it was in the step before",
    before=LION.replace("WHAT", "t += 1; self.param_groups[0]['lr'] = 0.1 / self.t"),
)
BESIDE.refused(
    "means of an optimizer of one's own, gone by",
    "optimizer.means is made of what it was in the step before",
    before=LION.replace("self.WHAT", MEANS).replace(
        'self.state[p]["mean"].sign()', "self.means[p]"
    ),
)

ALONGSIDE = Table(
    "alongside",
    PRELUDE
    + """
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=4, shuffle=True)
def endless():
    while True:
        yield from loader
class Bar:
    def __init__(self, inner):
        self.inner = inner
    def __iter__(self):
        for one in self.inner:
            yield one
session = Session(model, optimizer)
<before>
for <target> in <steps>:
    session.backward(lambda x: model(x).square().mean(), [<x>] * 4)
    optimizer.step()
"""
    + LEAVE,
)
LOADED = "what a loader gives is drawn beside the steps, from its beginning"
COUNTED = "a number is counted beside the steps, from its beginning"
ALONGSIDE.refused(
    "zip, steps first", LOADED, target="step, x", steps="zip(session.steps(8), endless())", x="x"
)
ALONGSIDE.refused(
    "zip, steps last", LOADED, target="x, step", steps="zip(endless(), session.steps(8))", x="x"
)
ALONGSIDE.refused(
    "zip in what hands on",
    LOADED,
    target="step, x",
    steps="Bar(zip(session.steps(8), endless()))",
    x="x",
)
ALONGSIDE.refused(
    "zip of what hands on",
    LOADED,
    target="step, x",
    steps="zip(Bar(session.steps(8)), loader)",
    x="x",
)
ALONGSIDE.refused(
    "zip_longest",
    COUNTED,
    target="step, n",
    steps="itertools.zip_longest(session.steps(8), range(2), fillvalue=2)",
    x="torch.ones(2, 4) * n",
)
ALONGSIDE.refused(
    "map of two",
    COUNTED,
    target="n",
    steps="map(lambda step, n: n, session.steps(8), itertools.count(1))",
    x="torch.ones(2, 4) / n",
)
ALONGSIDE.refused(
    "enumerate",
    COUNTED,
    target="n, step",
    steps="enumerate(session.steps(8), 1)",
    x="torch.ones(2, 4) / n",
)
ALONGSIDE.refused(
    "islice",
    "the steps of this worker are counted, and not those of the job",
    target="step",
    steps="itertools.islice(session.steps(9), 7)",
    x="torch.ones(2, 4) / 3",
)
HANDED = "the steps are only handed on"
for steps in ("session.steps(8)", "Bar(session.steps(8))", "iter(session.steps(8))"):
    ALONGSIDE.allowed(steps, HANDED, target="step", steps=steps, x="torch.ones(2, 4) / 3")
ALONGSIDE.allowed(
    "map of one",
    HANDED,
    target="step",
    steps="map(int, session.steps(8))",
    x="torch.ones(2, 4) / 3",
)
ALONGSIDE.allowed(
    "a list that has the steps in it",
    "what goes through the list is begun before the loop",
    before="held = [session.steps(8)]; rows = enumerate(held); next(rows)",
    target="step",
    steps="held[0]",
    x="torch.ones(2, 4) / 3",
)
TABLES = (BESIDE, ALONGSIDE)
