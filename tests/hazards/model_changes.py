"""What a script changes in its models, their modes, hooks and settings, while they train."""

from frames import LEAVE, PRELUDE, Table

ALIKE = Table(
    "alike",
    PRELUDE
    + """
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(<rate>), torch.nn.Linear(4, 1))
<model>
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = Session(model, optimizer)
class Weights:
    def __init__(self):
        self.beta = 1.0
weights = Weights()
again, streams = functools.partial(next, itertools.count(1)), [np.random.default_rng(0)]
def batches(step):
    return [torch.full((2, 4), <value>) for i in range(4)]
for step in session.steps(8):
    count = again()
    <first>
    session.backward(lambda x: weights.beta * model(x).square().mean() / 200, batches(step))
    <then>
    optimizer.step()
    <behind>
"""
    + LEAVE,
)
VALUE = "step + 1.0 + i"


def unlike(name: str, because: str, value: str = VALUE, rate: str = "0.0", **pieces: str) -> None:
    ALIKE.refused(name, because, value=value, rate=rate, **pieces)


LATER = "is set by one step for those behind it"
unlike("a mode", f"the mode of the model {LATER}", rate="0.5", behind="if step == 2: model.eval()")
unlike(
    "what a module goes by",
    f"the rate of a dropout {LATER}",
    behind="if step == 2: model[1].p = 0.5",
)
unlike(
    "what overhears a module",
    f"a hook of a module {LATER}",
    behind="if step == 2: model[1].register_forward_hook(lambda m, a, out: out * 0.5)",
)
unlike(
    "what overhears a gradient",
    f"a hook of a gradient {LATER}",
    behind="if step == 2: model[0].bias.register_hook(lambda grad: grad / 2)",
)
unlike(
    "what a module runs",
    f"the forward of a module {LATER}",
    behind="if step == 2: model[1].forward = torch.relu",
)
unlike(
    "what a class runs",
    f"the forward of a class {LATER}",
    behind="if step == 2: torch.nn.Dropout.forward = lambda self, x: x * 2",
)
unlike(
    "what an object of one's own has",
    f"weights.beta {LATER}",
    behind="if step == 2: vars(weights).update(beta=0.5)",
)
unlike(
    "a stream that goes on",
    "the stream streams[0] goes on from where the step before has left it",
    value="streams[0].uniform()",
)
unlike(
    "a count",
    "the counter that again asks is where the steps so far have left it",
    then="optimizer.param_groups[0]['lr'] = 0.1 / count",
)
unlike(
    "what only the leader does to its model",
    "the buffers of a norm, which learn in an evaluation in training mode",
    model="model.append(torch.nn.BatchNorm1d(1))",
    behind="if session.leader: model(torch.randn(8, 4))",
)
unlike(
    "where only the leader ends its loop",
    "nothing is kept; others go on without their leader",
    behind="if session.leader and step == 1: break",
)
# What the workers tell each other of a module that a script has changed.
unlike(
    "a factor of a module",
    f"an attribute of a module {LATER}",
    model="model[0].scale = 1.0\nmodel.register_forward_hook(lambda m, a, out: out * m[0].scale)",
    behind="if step == 2: model[0].scale = 0.5",
)
unlike(
    "a mask of a module",
    f"a tensor that is a plain attribute of a module {LATER}",
    model="model.mask = torch.ones(1)\nmodel.register_forward_hook(lambda m, a, out: out * m.mask)",
    behind="if step == 2: model.mask[0] = 0.5",
)
unlike(
    "a table of a module",
    f"a buffer that is not saved {LATER}",
    model="model.register_buffer('mask', torch.ones(1), persistent=False)\n"
    "model.register_forward_hook(lambda m, a, out: out * m.mask)",
    behind="if step == 2: model.mask[0] = 0.5",
)
unlike(
    "a weight of a loss",
    f"a tensor of a loss that is registered nowhere {LATER}",
    model="loss = torch.nn.MSELoss(); loss.weight = torch.ones(1)\n"
    "model.register_forward_hook(lambda m, a, out: loss(out, out * 0) * loss.weight)",
    behind="if step == 2: loss.weight[0] = 0.5",
)
unlike(
    "a loss that is another",
    f"which loss it is {LATER}",
    model="schedule = types.SimpleNamespace(loss=torch.nn.MSELoss())\n"
    "model.register_forward_hook(lambda m, a, out: schedule.loss(out, out * 0))",
    behind="if step == 2: schedule.loss = torch.nn.L1Loss()",
)
unlike(
    "a temperature that is annealed",
    "an attribute of a model is made of what it was in the step before",
    model="model.tau = 1.0\nmodel.register_forward_hook(lambda m, a, out: out * m.tau)",
    behind="model.tau /= 2",
)
unlike(
    "a loss that shrinks",
    "a tensor of a loss is made of what it was for the microbatch before",
    model="shrunk = [torch.ones(1)]\n"
    "def hook(m, a, out):\n    shrunk[0] = shrunk[0] * 0.9\n    return out * shrunk[0]\n"
    "model.register_forward_hook(hook)",
)
ALIKE.allowed(
    "settings that are made anew",
    "the settings are made anew in each step, by its number",
    value=VALUE,
    rate="0.0",
    first="weights = Weights(); weights.beta = 1.0 / (1 + step)",
)
unlike(
    "settings that are made for the next step",
    "weights is made anew at the end of each step, by its number, and the next step goes by it",
    behind="weights = Weights(); weights.beta = 1.0 / (1 + step)",
)
ALIKE.allowed(
    "what modules hand each other",
    "an attribute of a module is set anew for each microbatch",
    value=VALUE,
    rate="0.0",
    model="def first(m, a): m[1].mask = a[0][:1] / 9\n"
    "model.register_forward_pre_hook(first)\n"
    "model[1].register_forward_hook(lambda m, a, out: out * m.mask)",
)
ALIKE.allowed(
    "a forward that the first forward has set",
    "a module runs another forward once it has been called",
    value=VALUE,
    rate="0.0",
    model="class Patched(torch.nn.Linear):\n    def forward(self, x):\n"
    "        self.forward = super().forward\n        return super().forward(x)\n"
    "model[0] = Patched(4, 4)",
)

SCRIPTS = Table(
    "scripts",
    PRELUDE
    + """
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, before = torch.ones(2, 4), 0.0
<around>
session = Session(model, optimizer)
<made>
def loss_of(b):
    global before
    <inside>
    return model(b).square().mean()
for step in session.steps(8):
    <first>
    session.backward(<loss>, <batches>)
    <behind>
"""
    + LEAVE,
)


def script(
    name: str,
    because: str,
    *,
    loss: str = "loss_of",
    batches: str = "[x * (1 + i) / 4 for i in range(4)]",
    behind: str = "optimizer.step()",
    allowed: bool = False,
    **pieces: str,
) -> None:
    add = SCRIPTS.allowed if allowed else SCRIPTS.refused
    add(name, because, loss=loss, batches=batches, behind=behind, **pieces)


STEP = "optimizer.step()\n"
script(
    "unfrozen later",
    "which parameters train is set by the loop",
    around="model.bias.requires_grad_(False)",
    first="model.bias.requires_grad_(True)",
)
script(
    "frozen later",
    "which parameters train is set by the loop",
    first="model.bias.requires_grad_(False)",
)
script(
    "frozen by one step",
    "which parameters train is set by one step for those behind it",
    behind=STEP + "if step == 2: model.bias.requires_grad_(False)",
)
script(
    "trained later",
    "an optimizer has more parameters from step to step",
    first="optimizer.param_groups[0]['params'].append(model.bias)",
)
script(
    "a loader",
    "nothing is kept; a loader cannot be asked for one of its microbatches",
    around="loader = torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2)",
    batches="loader",
)
script(
    "pairs",
    "nothing is kept; a zip cannot be asked for one of its microbatches",
    batches="zip([x, x, x, x])",
)
script(
    "wrong count",
    "nothing is kept; a step has fewer microbatches than the first",
    batches="[x] * (4 if step == 0 else 3)",
)
script(
    "optimizer in the loop",
    "the model, once for each microbatch of this worker",
    inside="optimizer.step()",
)
script(
    "carried into the loss",
    "before is what the model has computed of the microbatch before",
    loss="lambda b: carried(b)",
    made="def carried(b):\n    global before\n    found = model(b).sum()\n    loss = found + before * found\n"
    "    before = found.detach() / 9\n    return loss / 9",
)
script(
    "counted into the loss",
    "the number of the microbatch among those of this worker",
    inside="before += 1",
    loss="lambda b: loss_of(b) / before",
)
script(
    "a stream of its own",
    "the stream noise goes on from where the microbatch before has left it",
    made="noise = torch.Generator()",
    loss="lambda b: loss_of(b) * torch.rand(1, generator=noise).sum()",
)
script(
    "a weight of the loss that is in no model",
    "a parameter that is in no registered model",
    around="weight = torch.nn.Parameter(torch.zeros(2))\n"
    "optimizer.add_param_group({'params': [weight]})",
)
script(
    "optimizer not given",
    "an optimizer that is not registered",
    made="other = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)",
    behind="other.step()",
)
script(
    "schedule not given",
    "a schedule that is not registered",
    made="schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)",
    behind=STEP + "schedule.step()",
)
script(
    "schedule not given, nor asked",
    "a schedule that is not registered",
    made="schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)",
)
script(
    "replaced later",
    "a parameter is another one from the second step on",
    behind=STEP + "model.weight = torch.nn.Parameter(torch.zeros(1, 4))\n"
    "optimizer.param_groups[0]['params'][0] = model.weight",
)
script(
    "added later",
    "a module that came when the session was made",
    made="model.more = torch.nn.Linear(1, 1)",
)
script(
    "taken out later",
    "a parameter that went when the session was made",
    made="del model.bias\nmodel.bias = None",
)
script(
    "of another type later",
    "the type of the parameters",
    made="model.double()\nx = x.double()",
)
script(
    "a buffer that grows",
    "a buffer is larger from step to step",
    around="model.register_buffer('seen', torch.zeros(0))",
    behind=STEP + "model.seen = torch.cat([model.seen, torch.ones(1)])",
)
script(
    "a buffer that came later",
    "a buffer is there from the second step on",
    behind=STEP + "model.register_buffer('seen', torch.ones(1))",
)
HOOK = "model.register_forward_hook(lambda *_: (model.seen.WHAT, None)[1])"
script(
    "a buffer that is not saved and goes on",
    "a buffer that is not saved counts the microbatches of this worker",
    around="model.register_buffer('seen', torch.zeros(1), persistent=False)\n"
    + HOOK.replace("WHAT", "add_(1.0)"),
)
script(
    "a buffer that is not saved and is gone by",
    "a buffer that is not saved counts the microbatches of this worker",
    around="model.register_buffer('seen', torch.zeros(1), persistent=False)\n"
    + HOOK.replace("WHAT", "add_(1.0)"),
    loss="lambda b: loss_of(b) / model.seen.sum().clone()",
)
script(
    "a buffer that nothing is known to add up",
    "a buffer of small integers is set by each microbatch",
    around="model.register_buffer('seen', torch.zeros(1, dtype=torch.uint8))\n"
    + HOOK.replace("WHAT", "fill_(1)"),
)
script(
    "a buffer of another size in the forward",
    "a buffer is larger than it was",
    around="model.register_buffer('seen', torch.zeros(0))\n" + HOOK.replace("WHAT", "resize_(1)"),
)
script(
    "gradients of several steps",
    "the gradients of the step before",
    behind="if step % 2: optimizer.step()",
)
script(
    "a state that leaves weights out",
    "a weight that its model does not save",
    around="""
def saved(self, *args, **named):
    state = torch.nn.Module.state_dict(self, *args, **named)
    return {name: state[name] for name in ["bias"]}
torch.nn.Linear.state_dict = saved
""",
)
script(
    "a scripted module",
    "nothing is kept; the tensors of a scripted module cannot be told apart",
    around="model = torch.jit.script(model)",
)
script(
    "who leads, asked once",
    "who leads is asked before the loop, and kept",
    made="leads = session.leader",
)
script(
    "changed too early",
    "the model is changed before the gradients are there",
    first="torch.nn.init.zeros_(model.weight)",
)
script(
    "no backward",
    "nothing is kept; a step without gradients",
    loss="loss_of",
    first="continue",
)
script(
    "two models of one name",
    "two models are registered, whose tensors have the same names",
    around="other = torch.nn.Linear(4, 1); optimizer.add_param_group({'params': other.parameters()})\n"
    "Session = functools.partial(Session, other)",
    loss="lambda b: loss_of(b) + other(b).square().mean()",
    allowed=True,
)
script(
    "a step that is left out",
    "gradients that are dropped by the script, and a buffer that is made anew",
    around="model.register_buffer('mask', torch.zeros(0), persistent=False)",
    behind="optimizer.zero_grad(set_to_none=step % 4 > 0)\noptimizer.step()\n"
    "model.mask = torch.ones(step)",
    allowed=True,
)
script(
    "a loop that is left early",
    "nothing is kept",
    behind=STEP + "if step == 4: break",
    allowed=True,
)
script(
    "what each step sets before its microbatches",
    "a schedule's count, set before the gradients are there",
    around="schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)\n"
    "Session = functools.partial(lambda made, *things: made(*things, schedule), Session)",
    first="schedule.last_epoch += 1",
    allowed=True,
)
ENDS = "is how a script ends or is written, and nothing that may differ between workers"
GONE = {
    f"scripts: {name}": ENDS
    for name in (
        *("no session", "no loop", "exit", "an option that it has not", "words in a frame"),
        *("exit without a word", "exit past Python", "exit past Python, as if all were well"),
        *("a name that is no UTF-8", "syntax", "not a number", "forks"),
    )
} | {"scripts: not all microbatches": "no loop over microbatches is written by hand"}

FORM = Table(
    "form",
    PRELUDE
    + """
class Lazy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(3, 1)
    def forward(self, x):
        if not hasattr(self, "mask"):
            self.register_buffer("mask", torch.ones(3), persistent=<saved>)
        return self.inner(x * self.mask)
model = Lazy()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = Session(model, optimizer)
for step in session.steps(8):
    session.backward(lambda x: model(x).square().mean(), [torch.ones(2, 3)] * 4)
    optimizer.step()
"""
    + LEAVE,
)
FORM.allowed(
    "a table of the first forward", "a buffer that is made once, and not saved", saved="False"
)
FORM.refused(
    "a saved table of the first forward", "a buffer that is made once, and saved", saved="True"
)
TABLES = (ALIKE, SCRIPTS, FORM)
