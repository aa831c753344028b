"""What a loss goes by, wherever its functions read it, and what its forward keeps."""

from frames import LEAVE, PRELUDE, Table

DOUBTS = Table(
    "doubts",
    PRELUDE
    + """
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
session = Session(model, optimizer)
os.environ["WEIGHT"] = "1.0"
def loss_of(x):
    return float(os.environ["WEIGHT"]) * model(x).square().mean()
for step in session.steps(8):
    <set>
    rows = torch.randn(4, 8, 6, generator=torch.Generator().manual_seed(step))
    session.backward(loss_of, list(rows))
    optimizer.step()
"""
    + LEAVE,
)
WEIGHT = 'os.environ["WEIGHT"] = str'
DOUBTS.allowed(
    "what changes in every step",
    "a variable of the process is set in each step, by its number",
    set=f"{WEIGHT}(1 + 0.1 * step)",
)
DOUBTS.allowed(
    "what changes at some time",
    "a variable of the process is set in each step, by its number",
    set=f"{WEIGHT}(1 + (step >= 5))",
)
DOUBTS.refused(
    "what one step changes",
    "a variable of the process is set by one step, and later steps go by it",
    set=f"if step == 2: {WEIGHT}(3.0)",
)

GIVEN = Table(
    "given",
    PRELUDE
    + """
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
PARTS = 4
class options:
    parts = 4
def loss_of(x):
    loss = model(x).square().mean()
    <division>
    return <loss>
session = Session(model, optimizer)
for step in session.steps(8):
    session.backward(loss_of, [torch.ones(2, 4)] * 4)
    optimizer.step()
"""
    + LEAVE,
)
for loss in ("loss / 4", "loss / PARTS", "loss / options.parts", "loss", "loss / 3", "loss * 2"):
    GIVEN.allowed(loss, "nothing is kept", loss=loss)
GIVEN.allowed("loss / len(x)", "nothing is kept", loss="loss / len(x)")
GIVEN.allowed("loss /= PARTS", "nothing is kept", division="loss /= PARTS", loss="loss")
GIVEN.allowed("another loss", "nothing is kept", division="other = loss / 2", loss="loss")
GONE = {
    "given: a microbatch that is clipped by itself": "loss_of returns before there are gradients",
    "given: a loss that is no number": "is checked for each step, and nothing that is kept",
    "given: how many microbatches": "is the length of what backward is given",
    "body: two losses": "loss_of returns one",
    "body: behind the backward": "loss_of returns before the backward",
    "body: a loop that cannot be found": "no loop over microbatches is written by hand",
    "body: over a name": "no loop over microbatches is written by hand",
    "body: handed to a function": "no loop over microbatches is written by hand",
    "body: enumerated": "no loop over microbatches is written by hand",
    "body: a line that is broken": "is how a loop is written",
    "body: names of before": "is how a loop is written",
    "body: what a recording prints or leaves": "is about the recording of a loop's source",
    "body: who asks whether somebody listens": "is about the recording of a loop's source",
    "reads: what was measured": "is about the key of a measurement, and stays in its test",
}

BODY = Table(
    "body",
    PRELUDE
    + """
class Encoded(collections.UserDict):
    def __getattr__(self, name):
        if name == "data":
            raise AttributeError(name)
        return self.data[name]
class Batch:
    def __init__(self, x, y):
        self.x, self.more, self.weight, self.name = x, {"y": y}, 1.0, "a"
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
<model>
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def batches(step):
    rows = torch.Generator().manual_seed(step)
    return [(torch.randn(5, 4, generator=rows), torch.arange(5) % 3) for _ in range(4)]
weight, kept, running, heard = 0.5, {}, 1.0, []
trainer = types.SimpleNamespace(model=model, zero_grad=optimizer.zero_grad)
box, table, rates, RATE = types.SimpleNamespace(rate=0.0), {"rate": 0.0}, [0.0], 0.0
<around>
def scaled(x):
    return x * RATE
def trained(x, y):
    return functional.cross_entropy(model(x), y)
def loss_of(batch):
    global running
    <body>
session = Session(model, optimizer)
for step in session.steps(8):
    <first>
    session.backward(loss_of, [<each> for n, (x, y) in enumerate(batches(step))])
    <behind>
    optimizer.step()
    optimizer.zero_grad()
"""
    + LEAVE,
)
PLAIN = "x, y = batch\nreturn functional.cross_entropy(model(x), y)"


def body(
    name: str,
    because: str = "nothing is kept",
    *,
    body: str = PLAIN,
    each: str = "(x, y)",
    refused: bool = False,
    **pieces: str,
) -> None:
    add = BODY.refused if refused else BODY.allowed
    add(name, because, body=body, each=each, **pieces)


body("plain")
body(
    "a dict",
    body='return functional.cross_entropy(model(batch["x"]), batch["y"])',
    each='{"x": x, "y": y}',
)
body(
    "a dictionary of a library",
    body='return functional.cross_entropy(model(batch["x"]), batch.y)',
    each="Encoded(x=x, y=y)",
)
body(
    "an object",
    body='return functional.cross_entropy(model(batch.x), batch.more["y"]) * batch.weight',
    each="Batch(x, y)",
)
body(
    "a number in it",
    body="x, y, factor = batch\n"
    "return functional.cross_entropy(model(x), y) * factor + (1 - factor)",
    each="(x, y, 0.5 + n)",
)
body(
    "a number that decides",
    body="found = functional.cross_entropy(model(batch[1]), batch[2])\n"
    "return found * 2 if batch[0] > 0 else found",
    each="(n, x, y)",
)
body("in a function", body="return trained(*batch)")
body(
    "gradients that are cleared first",
    "gradients, cleared for each microbatch of this worker",
    body="optimizer.zero_grad()\ntrainer.model.zero_grad(set_to_none=True)\n" + PLAIN,
)
body(
    "gradients that are cleared by something of one's own",
    "gradients, cleared for each microbatch of this worker",
    body="trainer.zero_grad()\n" + PLAIN,
)
body(
    "what is collected for one microbatch",
    "losses and parts are made anew for each microbatch",
    body="""
x, y = batch
losses = {}
for row in range(2):
    losses[row] = functional.cross_entropy(model(x), y)
parts = [loss for loss in losses.values()]
parts += [0.0]
parts[0] = parts[0] + 0.0
return sum(parts) / 2
""",
)
body(
    "a value",
    body="loss = trained(*batch)\nfound = float(loss.detach())\nreturn loss * found",
)
body(
    "a trace",
    "kept has the last microbatch of this worker, and is not read",
    body="kept.update(last=batch[0])\n" + PLAIN,
)
body(
    "a trace in what is called as something new",
    "kept has the last microbatch of this worker, and is not read",
    body="found = kept\nfound['last'] = batch[0]\n" + PLAIN,
)
body(
    "carried over",
    "running counts the microbatches of this worker, and is not read",
    body="running += 1.0\n" + PLAIN,
)
body(
    "carried over and gone by",
    "running counts the microbatches of this worker",
    body="running += 1.0\nreturn trained(*batch) / running",
    refused=True,
)
body(
    "a number of numpy's",
    body="x, y, w = batch\nreturn trained(x, y) * w",
    each="(x, y, np.float64(1))",
)
body("not tensors", body="x, y, name = batch\nreturn trained(x, y)", each="(x, y, 'a')")
body(
    "a draw that does not travel",
    "Python's random stream, which begins anew for each microbatch",
    body="return trained(*batch) * random.random()",
)
body(
    "a loss that differentiates where it draws",
    "torch's random stream, which begins anew for each microbatch",
    body="""
x, y = batch
x = (x + torch.randn_like(x)).requires_grad_()
found = model(x)
(slope,) = torch.autograd.grad(found.square().sum(), x, create_graph=True)
return functional.cross_entropy(found, y) + slope.square().mean()
""",
)
body(
    "a distribution",
    body="found = torch.distributions.Normal(model(batch[0]), 1.0)\n"
    "return -found.log_prob(batch[0][:, :3]).mean()",
)
for name, penalty in {
    "a penalty on all weights": "sum(p.square().sum() for p in model.parameters()) / 9",
    "a penalty on some weights": "sum((p.detach() - p.data / 2).abs().sum() for p in "
    "[*model.parameters()][:1])",
}.items():
    body(name, body=f"return trained(*batch) + {penalty}")
body(
    "a microbatch that is written into",
    "a tensor that is made anew for each step",
    body="batch[0].mul_(2.0)\n" + PLAIN,
)
body(
    "a look at a microbatch",
    body="x, y = batch\nif (x > 0.2).all():\n    x = x * 2\nreturn functional.cross_entropy(model(x), y)",
)
# What the loss reads, wherever that lies: set anew in each step, and by one step for those behind it.
READ = {
    "an attribute": ("box.rate = RATE_", "* (1 + box.rate)"),
    "an item": ('table["rate"] = RATE_', '* (1 + table["rate"])'),
    "a number of numpy": ("rates = [np.float64(RATE_)]", "* (1 + float(rates[0]))"),
    "another tensor": ("rates = [torch.tensor(RATE_)]", "* (1 + rates[0])"),
    "another list": ("rates = [RATE_]", "* (1 + rates[0])"),
    "a global of a function": ("RATE = RATE_", "* (1 + scaled(1.0))"),
    "an attribute of the model": ("model.rate = RATE_", "* (1 + getattr(model, 'rate', 0.0))"),
    "whether it trains": ("model.train(RATE_ == 0)", ""),
}
for name, (sets, factor) in READ.items():
    drops = "model.append(torch.nn.Dropout(0.5))" if name == "whether it trains" else "pass"
    loss = f"return trained(*batch) {factor}"
    body(
        f"{name}, by each step",
        "it is set in each step, by its number",
        model=drops,
        body=loss,
        first=sets.replace("RATE_", "0.1 * step"),
    )
    body(
        f"{name}, by one step",
        "it is set by one step, and later steps go by it",
        model=drops,
        body=loss,
        behind=f"if step == 2: {sets.replace('RATE_', '0.5')}",
        refused=True,
    )
HOLDING = """
import argparse, dataclasses
class Config:
    def __init__(self, **names): self.__dict__.update(names)
@dataclasses.dataclass(slots=True)
class Slotted:
    factor: float = 1.0
class Sealed(type):
    def __setattr__(cls, name, value): raise TypeError(name)
class Task(metaclass=Sealed):
    def __init__(self):
        self.config, self.all = Config(factor=1.0), [Config(factor=1.0), Config(factor=1.0)]
        self.args, self.slotted = argparse.Namespace(factor=1.0), Slotted()
        self.space, self.table = types.SimpleNamespace(factor=1.0), {"loss": {"factor": 1.0}}
        self.last = collections.deque([1.0], maxlen=1)
    def called_otherwise(self):
        config = self.config
        return config.factor
    def by_its_name(self, name="factor"):
        return getattr(self.config, name)
    def handed_on(self):
        return self.of(self.config)
    def of(self, config):
        return config.factor
    def one_of_many(self):
        return sum(each.factor for each in self.all) / 2
    def arguments(self):
        return self.args.factor
    def slots(self):
        return self.slotted.factor
    def namespace(self):
        return self.space.factor
    def table_in_a_table(self):
        return self.table["loss"].get("factor")
    def all_of_it(self):
        return vars(self.config)["factor"]
    def last_of_all(self):
        return sum(self.last)
    def nothing(self):
        return 1.0
    def set(self, factor):
        for each in (self.config, self.all[1], self.args, self.slotted, self.space):
            each.factor = factor
        self.table["loss"]["factor"] = factor; self.last.append(factor)
task = Task()
"""
for how in (
    *("called_otherwise", "by_its_name", "handed_on", "one_of_many", "arguments", "slots"),
    *("namespace", "table_in_a_table", "all_of_it", "last_of_all", "nothing"),
):
    words = how.replace("_", " ")
    loss = f"return trained(*batch) * task.{how}()"
    body(
        f"held, {words}, by each step",
        "it is set in each step, by its number",
        around=HOLDING,
        body=loss,
        first="task.set(1 + step / 9)",
    )
    body(
        f"held, {words}, by one step",
        "it is set by one step, and later steps go by it",
        around=HOLDING,
        body=loss,
        behind="if step == 2: task.set(2.0)",
        refused=how != "nothing",
    )
KEEPER = """
class Keeper(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.kept, self.count, self.seen, self.table = None, 0, [], {}
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("scale", None, persistent=False)
    def forward(self, x):
        CODE
model.append(Keeper())
"""
KEEPS = {
    "a mask": "self.kept = torch.ones_like(x) if self.kept is None else self.kept; return x * self.kept",
    "what was seen last": "self.kept = x; return x + self.kept",
    "a count of calls": "self.count += 1; return x",
    "a table that is made once": "self.kept = 2.0 if self.kept is None else self.kept; return x / self.kept",
    "a buffer of a table that is made once": "self.scale = torch.full((), 2.0) if self.scale is None "
    "else self.scale; return x / self.scale",
    "the loss of its last microbatch": "self.kept = x.square().mean(); return x + self.kept",
    "a list that it empties": "self.seen.clear(); self.seen.append(x); return sum(self.seen)",
    "a buffer in the place of another": "self.mean = 0.5 * self.mean + x.detach().mean(); return x + self.mean",
    "a buffer that is written into": "self.mean.copy_(0.5 * self.mean + x.detach().mean()); "
    "return x + self.mean.clone()",
}
CARRIES = {
    "a hidden state": "x = x if self.kept is None else x + self.kept; self.kept = x.detach(); return x",
    "a count that it goes by": "self.count += 1; return x * self.count",
    "a list": "self.seen.append(1); return x * len(self.seen)",
    "a list of states": "x = x + sum(self.seen); self.seen[:] = [x.detach()]; return x",
    "a dict of states": "x = x + self.table.get(0, 0.0); self.table[0] = x.detach(); return x",
    "what is made once of a microbatch": "self.kept = x.detach().abs().mean() + 0.5 if self.kept is None "
    "else self.kept; return x / self.kept",
    "a buffer that is made once of a microbatch": "self.scale = x.detach().abs().mean() + 0.5 "
    "if self.scale is None else self.scale; return x / self.scale",
}
for name, code in KEEPS.items():
    body(
        f"a module keeps {name}",
        "an attribute of a module, which no microbatch has from another",
        model=KEEPER.replace("CODE", code),
    )
for name, code in CARRIES.items():
    body(
        f"a module carries {name}",
        "an attribute of a module goes from one microbatch to the next",
        model=KEEPER.replace("CODE", code),
        refused=True,
    )
for name, (keeps, term, first) in {
    "in a dict": ("kept.update(found=out)", "kept['found'].mean()", "pass"),
    "as a number": ("kept.update(found=out.detach())", "kept['found'].abs().mean()", "pass"),
    "in a list": ("heard.append(out)", "sum(each.mean() for each in heard)", "heard.clear()"),
}.items():
    body(
        f"a hook of a layer keeps, {name}",
        "what a hook has heard of a microbatch, which is that of no other",
        around=f"for each in model: each.register_forward_hook(lambda m, a, out: {keeps})",
        body=f"{first}\nloss = trained(*batch)\nreturn loss + {term} / 9",
    )
body(
    "a hook of a layer that one step hangs up",
    "a hook of a module is set by one step, and later steps go by it",
    first="if step == 1: model[1].register_forward_hook(lambda m, a, out: out * 0.5)",
    refused=True,
)
body(
    "hooks that the first forward hangs up",
    "hooks of modules, hung up by the first microbatch of this worker",
    model="""
class Catching(torch.nn.Sequential):
    hung_up = False
    def forward(self, x):
        if not self.hung_up:
            self[1].register_forward_hook(lambda module, given, found: self.caught.append(found))
            self.hung_up = True
        self.caught = []
        found = super().forward(x)
        return found + sum(each.square().mean() for each in self.caught)
model = Catching(*model)
""",
)
for how in ("register_hook", "register_post_accumulate_grad_hook"):
    body(
        f"a hook of a parameter, {how}",
        "a hook that keeps nothing",
        around=f"model[0].weight.{how}(lambda _: None)",
    )
TEACHER = "torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Dropout())"
body(
    "a teacher that draws",
    "torch's random stream, which begins anew for each microbatch",
    around=f"teachers = [{TEACHER}, {TEACHER}.eval(), {TEACHER}.eval()]\n"
    "for each in teachers: each.requires_grad_(False)",
    body="x, y = batch\nwith torch.no_grad():\n    wanted = teachers[step % 3](x).softmax(1)\n"
    "return functional.mse_loss(functional.dropout(model(x)), wanted)",
)
body(
    "a schedule that keeps its table where its last microbatch was",
    "an object keeps the last microbatch of this worker, and does not go by it",
    around="""
class Schedule:
    def __init__(self):
        self.betas, self.cache = torch.ones(5), {}
    def weighed(self, loss, x):
        self.betas = self.betas.to(device=x.device)
        self.last, self.cache["x"] = x, [x]
        return loss * self.betas.mean() * len(x)
schedule = Schedule()
""",
    body="return schedule.weighed(trained(*batch), batch[0])",
)
REENTRANT = """
class Again(torch.nn.Module):
    def __init__(self, inner, use):
        super().__init__()
        self.inner, self.use = inner, use
    def forward(self, x):
        again = torch.utils.checkpoint.checkpoint
        return again(self.inner, x, use_reentrant=self.use) if x.sum() < 1e9 else x
import torch.utils.checkpoint
NORM
model[0], model[2] = Again(model[0], False), Again(model[2], USE)
"""
for name, norm, use in (
    ("a checkpoint", "pass", "False"),
    ("a checkpoint that enters itself again", "pass", "True"),
    (
        "a checkpoint with a norm",
        "model[2] = torch.nn.Sequential(model[2], torch.nn.BatchNorm1d(3))",
        "False",
    ),
):
    body(
        name,
        "what a forward saves is computed twice",
        model=REENTRANT.replace("NORM", norm).replace("USE", use),
    )

READS = Table(
    "reads",
    PRELUDE
    + """
# A module beside the script, and one beside that.
losses, settings = types.ModuleType("losses"), types.ModuleType("settings")
losses.WEIGHT = settings.WEIGHT = settings.SCALE = 1.0
settings.memory = (torch.ones(2),)
def helped(x):
    return [x * each for each in (1, losses.WEIGHT)][1]
def of(x):
    return helped(model(x)).mean()
losses.of = of
def another(x):
    return 2 * model(x).mean()
def set_elsewhere(x):
    return model(x).mean() * settings.WEIGHT
def remembered(x):
    return sum(each.mean() if hasattr(each, "mean") else float(each) for each in settings.memory)
class Settings:
    def __init__(self):
        self.weight, self.items = 1.0, {"weight": 1.0}
    @property
    def half(self):
        return self.weight / 2
class Asked:
    def __init__(self, settings):
        self.settings = settings
    def __call__(self, x):
        return x.mean() * self.settings.weight
def given(x, settings):
    return model(x).mean() * settings.weight
def named(x, *, settings):
    return model(x).mean() * settings.items["weight"]
def defaulted(x, items={"weight": 1.0}):
    return model(x).mean() * items["weight"]
def aliased(x):
    elsewhere = settings
    return model(x).mean() * elsewhere.WEIGHT
def part(x):
    return model(x).mean() * settings.WEIGHT
PARTS, MORE = [part], {"more": functools.partial(part)}
def summed(x):
    return sum(each(x) for each in (*PARTS, *MORE.values()))
class Kind:
    weight = 1.0
    @classmethod
    def loss(cls, x):
        return model(x).mean() * cls.weight
    @staticmethod
    def other(x):
        return model(x).mean() * settings.WEIGHT
class Base:
    def loss(self, x):
        return self.weighed(model(x))
    def weighed(self, x):
        return x.mean() * self.settings.weight
class Trainer(Base):
    def __init__(self):
        self.settings = Settings()
        self.phase = self.weighed
class Net(torch.nn.Linear):
    def forward(self, x):
        return self.scaled(super().forward(x))
    def scaled(self, x):
        return x * settings.SCALE
model = Net(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
trainer, measure = Trainer(), torch.nn.CrossEntropyLoss()
kept, asked = trainer.settings, Asked(trainer.settings)
handed = functools.partial(given, settings=trainer.settings)
<around>
session = Session(model, optimizer)
for step in session.steps(8):
    session.backward(lambda x: <loss>, [torch.ones(2, 4) * (1 + n) / 4 for n in range(4)])
    optimizer.step()
    if step == 2: <change>
"""
    + LEAVE,
)
CHANGED = "it is set by one step, in another place than the script's loop, and later steps go by it"
MEMORY = "model(x).mean() * remembered(x)"
for name, (loss, change, around) in {
    "through another function": ("losses.of(x)", "losses.WEIGHT = 2.0", ""),
    "of another module": ("set_elsewhere(x)", "settings.WEIGHT = 2.0", ""),
    "in a method": ("model(x).mean()", "settings.SCALE = 2.0", ""),
    "in the loop": ("model(x).mean() * losses.WEIGHT", "losses.WEIGHT = 2.0", ""),
    "of a module by another name": ("aliased(x)", "settings.WEIGHT = 2.0", ""),
    "in functions of a list and a dict": ("summed(x)", "settings.WEIGHT = 2.0", ""),
    "in a function of a list": ("PARTS[0](x)", "settings.WEIGHT = 2.0", ""),
    "in a static method": ("Kind.other(x)", "settings.WEIGHT = 2.0", ""),
    "of an object whose method it is": ("trainer.loss(x)", "kept.weight = 2.0", ""),
    "of an object that is given": ("given(x, kept)", "kept.weight = 2.0", ""),
    "of an object of an object": ("given(x, trainer.settings)", "kept.weight = 2.0", ""),
    "of an item by a name": ("named(x, settings=kept)", "kept.items['weight'] = 2.0", ""),
    "of what a function was given before": ("handed(x=x)", "kept.weight = 2.0", ""),
    "of what is called": ("asked(model(x))", "kept.weight = 2.0", ""),
    "of a property": ("model(x).mean() * kept.half", "kept.weight = 2.0", ""),
    "another tensor": (MEMORY, "settings.memory = (torch.zeros(2) + 2,)", ""),
    "a list": (MEMORY, "settings.memory[1] = 3.0", "settings.memory = [1.0, 2.0]"),
    "of a class": ("Kind.loss(x)", "Kind.weight = 2.0", ""),
    "in a default": ("defaulted(x)", "defaulted.__defaults__[0]['weight'] = 2.0", ""),
    "an array": (MEMORY, "settings.memory.put(1, 2.0)", "settings.memory = np.ones(2)"),
    "a set": (MEMORY, "settings.memory.discard(1)", "settings.memory = {1, 2}"),
    "a dict of its own kind": (
        "model(x).mean() * settings.memory['one']",
        "settings.memory.update(one=2.0)",
        "settings.memory = collections.UserDict(one=1.0)",
    ),
    "a list that grows": (MEMORY, "settings.memory.append(1.0)", "settings.memory = [1.0] * 3"),
    "another method": ("trainer.phase(model(x))", "trainer.phase = lambda x: 2 * x.mean()", ""),
    "another forward": ("model(x).mean()", "model.forward = lambda x: 2 * x @ model.weight.T", ""),
    "of a loss": (
        "measure(torch.cat([model(x), x], 1), torch.tensor([1, 2]))",
        "measure.label_smoothing = 0.1",
        "",
    ),
    "another function": ("losses.of(x)", "losses.of = another", ""),
}.items():
    pieces = {"around": around} if around else {}
    READS.refused(name, CHANGED, loss=loss, change=change, **pieces)
READS.allowed(
    "what nobody reads",
    "losses.WEIGHT is set by one step, and not read",
    loss="another(x)",
    change="losses.WEIGHT = 2.0",
)
TABLES = (DOUBTS, GIVEN, BODY, READS)
