"""What a script keeps from microbatch to microbatch, of which each worker has others."""

from frames import LEAVE, PRELUDE, Table

WITHIN = Table(
    "within",
    PRELUDE
    + """
class Meter:
    def __init__(self):
        self.sum, self.last = 0.0, None
    def update(self, value):
        self.sum += value
class Trainer:
    def __init__(self):
        self.meter, self.state, self.loss = Meter(), 0.0, 0.0
    def train(self, x):
        loss = model(x).square().mean()
        <inside>
        return loss
class Data:
    def __init__(self):
        self.found = {}
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return self.found.setdefault(index, torch.full((2, 4), index + 1.0))
class Metric(torch.nn.Module):
    asked = 0
    def forward(self, found):
        self.asked += 1
        return found.mean()
model = torch.nn.Linear(4, 1)
<model>
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
group = optimizer.param_groups[0]
trainer, data, meter, kept, parts = Trainer(), Data(), Meter(), {}, {}
frozen = torch.nn.Linear(4, 1).requires_grad_(False)
losses, hidden, stats = [], [0.0, 0.0], collections.defaultdict(float)
total, loss, own, before = 0.0, 0.0, [], 0.0
metrics = torch.nn.ModuleDict({"mean": Metric()})
<around>
def seen_by(x):
    return model(x)
def loss_of(x):
    global total, loss, own, before
    <body>
session = Session(model, optimizer)
for step in session.steps(8):
    total, own = 0.0, []
    result = session.backward(loss_of, data)
    <behind>
    optimizer.step()
"""
    + LEAVE,
)
PLAIN = "return model(x).square().mean()"
LOSS = "loss = model(x).square().mean()"
OWN = "of the microbatches that this worker has computed"
WITHIN.refused(
    "a total",
    f"total is the sum {OWN}, and is shown",
    body=f"{LOSS}; total += loss.item()\nreturn loss",
    behind="show(total)",
)
WITHIN.refused(
    "a total that steps go by",
    f"total is the sum {OWN}",
    body=f"{LOSS}; total += loss.item()\nreturn loss",
    behind="group['lr'] = 0.01 / (1 + total)",
)
WITHIN.refused(
    "the last loss",
    f"loss is the last {OWN}, and is shown",
    body=f"{LOSS}\nreturn loss",
    behind="show(loss.item())",
)
WITHIN.refused(
    "the last loss that steps go by",
    f"loss is the last {OWN}",
    body=f"{LOSS}\nreturn loss",
    behind="group['lr'] = 0.01 / (1 + loss.item())",
)
WITHIN.refused(
    "a list",
    f"losses are those {OWN}, of all steps",
    body=f"{LOSS}; losses.append(loss.item())\nreturn loss",
)
WITHIN.refused(
    "a list that steps go by",
    f"losses are those {OWN}, of all steps",
    body=f"{LOSS}; losses.append(loss.item())\nreturn loss",
    behind="group['lr'] = 0.01 / (1 + sum(losses))",
)
WITHIN.refused(
    "a list of every step",
    f"own has the losses {OWN}, and is shown",
    body=f"{LOSS}; own.append(loss.item())\nreturn loss",
    behind="show(sum(own))",
)
WITHIN.refused(
    "a list of every step that steps go by",
    f"own has the losses {OWN}",
    body=f"{LOSS}; own.append(loss.item())\nreturn loss",
    behind="group['lr'] = 0.01 / (1 + len(own))",
)
WITHIN.refused(
    "a list that is emptied, and read behind",
    f"losses has the last {OWN}, and is shown",
    body=f"losses.clear(); {LOSS}; losses.append(loss.item())\nreturn loss",
    behind="show(losses)",
)
WITHIN.refused(
    "a list that is emptied too late",
    "losses has the one of the microbatch before when it is read",
    body=f"{LOSS}; losses.append(loss.detach()); found = losses[0]; losses.clear()\n"
    "losses.append(loss.detach())\nreturn loss / (1 + found)",
)
WITHIN.refused(
    "a state that goes on until one begins",
    "hidden[0] is what the microbatches before it have come to, since one that begins",
    body="hidden[0] = 0.9 * hidden[0] * (x[0, 0] > 1) + float(x.mean())\n"
    "return model(x).square().mean() * hidden[0]",
)
WITHIN.refused(
    "a state that one of them goes by",
    "hidden[0] is set by the one before it",
    body="hidden[0] = 1.0 if x[0, 0] == 2 else hidden[0]\n"
    "return model(x).square().mean() / (1 + hidden[0] * (x[0, 0] == 3))",
)
WITHIN.refused(
    "a list that the last step goes by",
    f"losses are those {OWN}, of all steps",
    body=f"{LOSS}; losses.append(loss.item())\nreturn loss",
    behind="group['lr'] = 0.01 / (1 + (step == 7) * len(losses))",
)
WITHIN.refused(
    "a state for the next step",
    f"hidden[0] is the last loss {OWN}",
    body=f"{LOSS}; hidden[0] = loss.detach()\nreturn loss",
)
WITHIN.refused(
    "a state for the next step that it goes by",
    f"hidden[0] is the last loss {OWN}",
    body=f"{LOSS}; hidden[0] = loss.detach()\nreturn loss + hidden[1] * model(x).mean()",
    behind="hidden[1] = hidden[0]",
)
WITHIN.refused(
    "a state of the model for the next step, by a key",
    "kept[0] is what the model has computed of the microbatch before",
    body="found = model(x + kept.get(0, 0.0)); kept[0] = found.detach()\n"
    "return found.square().mean()",
)
WITHIN.refused(
    "such a state in an object",
    "trainer.state is what the model has computed of the microbatch before",
    body="found = seen_by(x + trainer.state); trainer.state = (found.detach(), 1)[0]\n"
    "return found.mean() / 100",
)
WITHIN.refused(
    "a state by a key, beside another",
    "kept[0] is what the model has computed of the microbatch before",
    body="kept['x'] = 1.0; found = model(x * kept['x'] + kept.get(0, 0.0)); kept[0] = found.detach()\n"
    "return found.mean() / 100",
)
WITHIN.refused(
    "a state by a key that is begun once",
    "kept['at'] is what the model has computed of the microbatch before",
    body="if 'at' not in kept: kept['at'] = 0.0\n"
    "found = model(x + kept['at']); kept['at'] = found.detach()\nreturn found.mean() / 100",
)
WITHIN.refused(
    "a count in a dict",
    f"stats['loss'] is the sum {OWN}",
    body=f"{LOSS}; stats['loss'] += loss.item()\nreturn loss",
)
WITHIN.refused(
    "a count in a dict that steps go by",
    f"stats['loss'] is the sum {OWN}",
    body=f"{LOSS}; stats['loss'] += loss.item()\nreturn loss",
    behind="group['lr'] = 0.01 / (1 + stats['loss'])",
)
WITHIN.refused(
    "a metric of a library",
    f"metrics['mean'] counts those {OWN}",
    body=f"{LOSS}; metrics['mean'](loss)\nreturn loss",
)
WITHIN.refused(
    "a meter",
    f"meter.sum is the sum {OWN}",
    body=f"{LOSS}; meter.update(loss.item())\nreturn loss",
)
WITHIN.refused(
    "a meter that steps go by",
    f"meter.sum is the sum {OWN}",
    body=f"{LOSS}; meter.update(loss.item())\nreturn loss",
    behind="group['lr'] = 0.01 / (1 + meter.sum)",
)
WITHIN.refused(
    "a meter, where another function is the body",
    f"trainer.meter.sum is the sum {OWN}",
    body="return trainer.train(x)",
    inside="self.meter.update(loss.item())",
)
WITHIN.allowed(
    "what belongs together in a dict",
    "parts are set anew for each microbatch",
    body="parts['a'] = model(x).square().mean(); parts['b'] = model(x).mean()\n"
    "return parts['a'] + parts['b']",
)
WITHIN.allowed(
    "one part from another in a dict",
    "parts are set anew for each microbatch",
    body="parts['a'] = model(x); parts['b'] = model(x * parts['a'].mean())\n"
    "return parts['b'].mean() / 100",
)
WITHIN.allowed(
    "what is added to in an object",
    "trainer.loss is set anew for each microbatch",
    body="found = model(x)\nwith torch.enable_grad(): trainer.loss = found.square().mean()\n"
    "trainer.loss = trainer.loss + found.mean(); return trainer.loss",
)
WITHIN.allowed(
    "a state that is begun anew",
    "trainer.state is set anew for each microbatch",
    body="trainer.state = 0.0; trainer.state = model(x + trainer.state); return trainer.state.mean()",
)
WITHIN.allowed(
    "what does not learn is asked once",
    "kept[0] is what a frozen model has made of the first microbatch of this worker",
    body="found = frozen(x) if 0 not in kept else kept[0]; kept[0] = found\n"
    "return (model(x) + found).mean()",
)
WITHIN.allowed(
    "a name of another use",
    "loss is another number behind",
    body="loss = model(x).square().mean(); return loss",
    behind="loss = result.loss; show(loss)",
)
WITHIN.allowed(
    "a metric that is asked behind the loop",
    "metrics['mean'] is asked once a step",
    body=PLAIN,
    behind="metrics['mean'](model(data[0]))",
)
WITHIN.allowed("what is printed", "nothing is kept", body=f"{LOSS}; show(loss.item())\nreturn loss")
WITHIN.allowed(
    "what was loaded",
    "data.found holds what is loaded by its index",
    body=PLAIN,
    behind="show(data.found)",
)
WITHIN.allowed(
    "what every microbatch sets anew",
    "trainer.meter.last is set anew for each microbatch",
    body="return trainer.train(x)",
    inside="self.meter.last = loss",
)
WITHIN.allowed(
    "a list of every microbatch",
    "parts is set anew for each microbatch",
    body="parts = []; parts.append(model(x).square().mean()); return sum(parts)",
)
WITHIN.allowed(
    "a list that is emptied for every microbatch",
    "losses begins anew for each microbatch",
    body="losses.clear(); losses.append(model(x).square().mean()); return losses[0]",
)
WITHIN.allowed(
    "what is counted behind the loop",
    "meter.sum is the sum of the losses of all steps, and is not read",
    body=PLAIN,
    behind="meter.update(result.loss)",
)
WITHIN.refused(
    "rows that shorten themselves",
    "the weights of the rows, in the forward",
    model="model = torch.nn.Sequential(torch.nn.EmbeddingBag(4, 2, max_norm=0.5))",
    around="data = [torch.tensor([[0, 1]])] * 4",
    body=PLAIN,
)
WITHIN.allowed(
    "rows that are shortened behind the loop",
    "the weights of the rows, once a step",
    model="model = torch.nn.Sequential(torch.nn.EmbeddingBag(4, 2))",
    around="data = [torch.tensor([[0, 1]])] * 4",
    body=PLAIN,
    behind="with torch.no_grad():\n    model[0].weight.copy_(torch.renorm(model[0].weight, 2.0, 0, 0.5))",
)
FOLLOWS = """
class Follows(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.student, self.teacher = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
        self.teacher.load_state_dict(self.student.state_dict())
        TEACHER
    def forward(self, x):
        for theirs, ours in zip(self.teacher.KIND(), self.student.parameters()):
            theirs.data.lerp_(ours.data, 0.5)
        return self.student(x) - self.teacher(x).detach()
model = Follows()
"""
BUFFERS = """for name, value in [*self.teacher.named_parameters()]:
            self.teacher.__delattr__(name)
            self.teacher.register_buffer(name, value.detach())"""
WITHIN.refused(
    "a teacher that follows in the forward",
    "the teacher's parameters, once for each microbatch of this worker",
    model=FOLLOWS.replace("TEACHER", "self.teacher.requires_grad_(False)").replace(
        "KIND", "parameters"
    ),
    body="return (model(x) + x.mean()).square().mean() / 9",
)
WITHIN.allowed(
    "a teacher of buffers that follows in the forward",
    "the teacher's buffers, of which the mean over all microbatches is taken",
    model=FOLLOWS.replace("TEACHER", BUFFERS).replace("KIND", "buffers"),
    body="return (model(x) + x.mean()).square().mean() / 9",
)
COUNTING = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.calls = torch.nn.Linear(4, 1), 0
    def forward(self, x):
        self.calls += 1
        return self.inner(x) * BY
    def said(self, by):
        if self.calls % 100 == 0:
            show("forwards", self.calls)
        return by
    def begun(self, by):
        self.depth = 0
        for _ in range(3):
            by = by / (1 + self.depth)
            self.depth += 1
        return by
model = Net()
"""
WITHIN.refused(
    "what a model counts and goes by",
    "model.calls counts the forwards of this worker",
    model=COUNTING.replace("BY", "min(1.0, 0.5 + self.calls // 9)"),
    body=PLAIN,
)
for name, by in {
    "what a model counts": "0.5",
    "what a model counts to be said": "self.said(0.5)",
    "what a forward begins anew": "self.begun(0.5)",
}.items():
    WITHIN.allowed(
        name,
        "model.calls counts the forwards of this worker, and the loss does not go by it",
        model=COUNTING.replace("BY", by),
        body=PLAIN,
    )
PARTS = """
class Parts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rows, self.part, self.most = 0, 0.0, 0.0
    def forward(self, found):
        self.rows = len(found)
        self.part = found.mean().item()
        WHAT
        return found.square().mean() / self.rows + self.part
parts = Parts()
"""
PARTED = "return parts(model(x)) + 0 * parts.most"
WITHIN.allowed(
    "parts that a loss leaves",
    "parts.part is set anew for each microbatch",
    around=PARTS.replace("WHAT", "pass"),
    body=PARTED,
)
WITHIN.refused(
    "parts that a loss leaves, shown behind",
    "parts.part is that of the last microbatch of this worker, and is shown",
    around=PARTS.replace("WHAT", "pass"),
    body=PARTED,
    behind="show(parts.part)",
)
WITHIN.refused(
    "parts that a loss leaves, that steps go by",
    "parts.part is that of the last microbatch of this worker",
    around=PARTS.replace("WHAT", "pass"),
    body=PARTED,
    behind="group['lr'] = 0.01 / (1 + abs(parts.part))",
)
WITHIN.refused(
    "the most that a loss has seen",
    "parts.most is made of what it was for the microbatch before",
    around=PARTS.replace("WHAT", "self.most = max(self.most, self.part)"),
    body=PARTED,
)
WITHIN.refused(
    "the most that a loss has seen and goes by",
    "parts.most is made of what it was for the microbatch before",
    around=PARTS.replace("WHAT", "self.most = max(self.most, abs(self.part))"),
    body="return parts(model(x)) / (1 + parts.most)",
)
WITHIN.refused(
    "a count of rows that a loss begins anew, and a sum that it does not",
    "parts.most is made of what it was for the microbatch before",
    around=PARTS.replace("WHAT", "self.rows += 1; self.most += self.rows"),
    body=PARTED,
)
# Between the microbatches and the loss there was a generator, or what was drawn along with it. Now the
# microbatches are a sequence.
ROWS = """
class Rows:
    def __init__(self):
        self.n, self.before = 0, 0.0
        self.weights = itertools.cycle([1.0, 2.0, 0.5])
    def __len__(self):
        return 4
    def __getitem__(self, index):
        x = torch.full((2, 4), index + 1.0)
        WHAT
data = Rows()
"""
for name, what, because in (
    ("a count", "self.n += 1; return x / self.n", "data.n counts what this worker has asked for"),
    (
        "a count that decides",
        "self.n += 1; return x / 2 if self.n > 6 else x",
        "data.n counts what this worker has asked for",
    ),
    (
        "what is drawn along",
        "return x * next(self.weights)",
        "data.weights is drawn from by this worker's microbatches only",
    ),
    (
        "the one before",
        "found = x + self.before; self.before = x; return found",
        "data.before is the microbatch that this worker has asked for before",
    ),
):
    WITHIN.refused(
        f"microbatches with {name}", because, around=ROWS.replace("WHAT", what), body=PLAIN
    )
for name, what, because in (
    ("what does not change", "return x * 0.5", "nothing is kept"),
    ("their own number", "return x * (1 + index)", "the number is the microbatch's own"),
    ("a count for nothing", "self.n += 1; assert self.n; return x", "data.n is counted in vain"),
):
    WITHIN.allowed(
        f"microbatches with {name}", because, around=ROWS.replace("WHAT", what), body=PLAIN
    )
WITHIN.refused(
    "what is drawn along in the loss",
    "weights is drawn from by this worker's microbatches only",
    around="weights = itertools.cycle([1.0, 2.0, 0.5])",
    body="return next(weights) * model(x).square().mean()",
)
WITHIN.allowed(
    "what is put beside microbatches in a list",
    "each microbatch has its own weight",
    around="data = [*zip(data, [1.0, 2.0, 0.5, 1.0])]",
    body="x, weight = x\nreturn weight * model(x).square().mean()",
)
GONE = {
    **{
        f"within: a generator that has {what}": "there is no generator between microbatches and loss"
        for what in (
            "enumerate",
            "zip with two",
            "a count that is halved",
            "a comprehension inside",
            "another function inside",
            "an object inside",
            "a method inside",
            "zip with repeat",
            "a new name",
            "a number that is only checked",
        )
    },
    **{
        f"within: a loop over {what}": "no loop over microbatches is written by hand"
        for what in (
            "zip in zip",
            "enumerate of zip",
            "a function of zip",
            "enumerate of a function of zip",
            "map of zip",
            "a function of zip with letters",
            "zip with letters",
            "zip with repeat",
            "map with a list",
        )
    },
    **{
        f"within: microbatches gone through in {what}": "no loop over microbatches is written by hand"
        for what in (
            "a comprehension",
            "a comprehension that has a name",
            "a sum",
            "a function that adds up",
            "a loop that asks by itself, and its last loss",
            "an iterator of enumerate",
            "enumerate under a name",
            "enumerate of a list",
            "a deque of nothing",
            "a comprehension of nothing",
            "a function",
            "a loop that asks by itself",
            "two names",
        )
    },
    "rehearsal: what ends with the microbatches": "no loop over microbatches is written by hand",
    "rehearsal: what ends with them under a name": "no loop over microbatches is written by hand",
    "rehearsal: what ends with them in a generator": "no loop over microbatches is written by hand",
    "rehearsal: a generator that asks by itself": "is `within: microbatches with a count`",
    "rehearsal: such a generator that has a name": "is `within: microbatches with a count`",
}

REHEARSAL = Table(
    "rehearsal",
    PRELUDE
    + """
model = torch.nn.Sequential(
    torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = [torch.randn(3, 8)[:, ::2] for _ in range(4)]
<around>
def loss_of(x):
    <body>
session = Session(model, optimizer)
for step in session.steps(8):
    session.backward(loss_of, [<each> for x in data])
    optimizer.step()
"""
    + LEAVE,
)
REHEARSAL.refused(
    "a stream of its own",
    "stream goes on from where the microbatch before has left it",
    around="stream = torch.Generator().manual_seed(1)",
    body="x = x + torch.randn(x.shape, generator=stream)\n" + PLAIN,
    each="x",
)
REHEARSAL.refused(
    "an iterator in a function",
    "the default of scaled counts the microbatches of this worker",
    around="def scaled(x, scales=itertools.count(1)):\n    return x * next(scales)",
    body="return model(scaled(x)).square().mean()",
    each="x",
)
REHEARSAL.refused(
    "a count that goes further than a few",
    "seen['n'] counts the microbatches of this worker",
    around="seen = dict(n=0)",
    body="seen['n'] += 1\nif seen['n'] > 9: x = x * 2\n" + PLAIN,
    each="x",
)
REHEARSAL.refused(
    "a count in a hook of a gradient",
    "n around the hook counts the microbatches of this worker",
    around="""
def counting():
    n = 0
    def hook(gradient):
        nonlocal n
        n += 1
        return gradient / n
    return hook
model[0].weight.register_hook(counting())
""",
    body=PLAIN,
    each="x",
)
REHEARSAL.allowed("norms, dropout and slices", "nothing is kept", body=PLAIN, each="x")
REHEARSAL.allowed(
    "what is taken out of a microbatch",
    "a dict that is made anew for each step",
    body="y = x.pop('y')\nreturn (model(x['x'])[:, 0] - y).square().mean()",
    each="{'x': x, 'y': x.sum(1)}",
)
REHEARSAL.allowed(
    "what is taken out of a microbatch that stays",
    "a dict that is there for all steps",
    around="data = [{'x': x, 'y': x.sum(1)} for x in data]",
    body="y = x.pop('y', 0.0)\nreturn (model(x['x'])[:, 0] - y).square().mean()",
    each="x",
)
REHEARSAL.allowed(
    "what is written into a microbatch",
    "a tensor that is made anew for each step",
    body="x.mul_(2.0)\n" + PLAIN,
    each="x.clone()",
)
REHEARSAL.refused(
    "what is written into a microbatch that stays",
    "a tensor that is there for all steps",
    body="x.mul_(1.1)\n" + PLAIN,
    each="x",
)
REHEARSAL.allowed(
    "a gradient for a microbatch",
    "a tensor that is made anew for each step",
    body="x.mul_(2.0).requires_grad_(True)\n"
    "(slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)\n"
    "return slope.square().mean()",
    each="x.clone()",
)
REHEARSAL.allowed(
    "a parameter that is added to a microbatch",
    "a tensor that is made anew for each step",
    body="x += model[0].bias\n" + PLAIN,
    each="x.clone()",
)
REHEARSAL.allowed(
    "gradients of the microbatches only",
    "nothing is trained",
    around="model.requires_grad_(False)\ndata = [x.clone().requires_grad_() for x in data]",
    body=PLAIN,
    each="x",
)

POINTERS = Table(
    "pointers",
    PRELUDE
    + """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)
        self.register_buffer("queue", torch.zeros(3, 8))
        self.register_buffer("ptr", torch.zeros(1, dtype=torch.long))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.long))
    def forward(self, x):
        out = self.layer(x)
        <called>
        return out.square().mean()
    @torch.no_grad()
    def put(self, keys):
        <put>
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = Session(model, optimizer)
for step in session.steps(8):
    session.backward(model, [torch.ones(2, 4) * (1 + n) / 2 for n in range(<microbatches>)])
    optimizer.step()
    <behind>
"""
    + LEAVE,
)
RING = "ptr = int(self.ptr); end = ptr + len(keys)\nself.queue[:, ptr:end] = keys.T; self.ptr[0] = end % 8"
COPIED = (
    "at = (self.ptr + torch.arange(len(keys))) % 8; self.queue.index_copy_(1, at, keys.T)\n"
    "self.ptr.add_(len(keys)).remainder_(8)"
)
COUNTED = (
    "kind = keys.argmax(1); self.seen.index_add_(0, kind, torch.ones_like(kind)); self.ptr += 1"
)
QUEUE = "a place in a queue goes round with the microbatches, of which all see the step's start"
POINTERS.refused(
    "a place that goes round", QUEUE, put=RING, called="self.put(out)", microbatches="4"
)
POINTERS.refused(
    "a place that goes round, by index", QUEUE, put=COPIED, called="self.put(out)", microbatches="4"
)
POINTERS.allowed(
    "of one microbatch",
    "the queue is in buffers",
    put=RING,
    called="self.put(out)",
    microbatches="1",
)
POINTERS.allowed(
    "behind the loop",
    "the queue is in buffers, and is filled once a step",
    put=RING,
    microbatches="4",
    behind="model.put(model.layer(torch.ones(4, 4)))",
)
POINTERS.allowed(
    "a count", "the counts are in buffers", put=COUNTED, called="self.put(out)", microbatches="4"
)
TABLES = (WITHIN, REHEARSAL, POINTERS)
