"""What a script keeps in the names of its loop, or sets there for the steps that follow."""

from frames import LEAVE, PRELUDE, Table

CLASSES = """
class Stopper:
    def __init__(self):
        self.best, self.bad, self.epoch, self.given, self.table = 9.9e9, 0, -1, False, {"best": 2}
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
x, kept = torch.ones(2, 4), Kept()
table, momentum, memory = {"best": 9.9e9, 0: 0, 1: 0, "s": 0.0}, [0.0], {}
group = optimizer.param_groups[0]
session = Session(model, optimizer, kept)
def train(before, trainer):
    best, factor, count, losses, order = 9.9e9, 1.0, 0, [], [*range(9)]
    began_s, waited_s = time.time(), 0.0
    for step in session.steps(8):
        <first>
        result = session.backward(lambda each: model(each).square().mean(), [x * (1 + step % 2)] * 4)
        optimizer.step()
        <behind>
"""
CARRIED = Table("carried", PRELUDE + CLASSES + "    <after>\ntrain(0, Trainer())\n" + LEAVE)
# The code behind the loop saves what some step has left there.
LEFT = Table(
    "left",
    PRELUDE
    + CLASSES
    + "    torch.save([model.state_dict(), best], sys.argv[1])\ntrain(0, Trainer())\n",
)
SET = Table(
    "set",
    PRELUDE
    + """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.scale = torch.nn.Linear(4, 1), 1.0
    def forward(self, x):
        return self.layer(x) * self.scale
class Course:
    beta = 1.0
    def __init__(self):
        self.phase, self.level, self.epoch, self.order = "easy", 0, -1, None
        self.target, self.asks, self.shown = copy.deepcopy(model), False, 0.0
    def update(self, step, loss=0.0):
        if step == 2 or loss > LIMIT:
            self.phase = "hard"
    def harder(self):
        self.level = 2
    def sync(self):
        self.target = copy.deepcopy(model)
    def begin(self, epoch):
        if epoch != self.epoch:
            self.epoch, self.order = epoch, [epoch, epoch]
    def rows(self, step):
        return [torch.full((2, 4), step + 1.0 + self.level)] * 4
    def loss(self, x):
        return model(x).square().mean() if self.phase == "easy" else model(x).abs().mean()
class Kept(Course):
    def state_dict(self):
        return {"phase": self.phase}
    def load_state_dict(self, state):
        vars(self).update(state)
LIMIT = 4.2
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
course, kept, cfg, weight = Course(), Kept(), {"w": 1.0, "on": True, "clip": 1.0}, 1.0
group = optimizer.param_groups[0]
def heavier():
    global weight
    weight = 3.0
def loss_of(x):
    return cfg["w"] * model(x).square().mean()
session = Session(model, optimizer, kept)
for step in session.steps(8):
    <first>
    result = session.backward(lambda x: <loss>, course.rows(step))
    <behind>
    optimizer.step()
    if session.leader: show(step, course.shown, cfg)
"""
    + LEAVE,
)
SQUARE = "model(x).square().mean()"

CARRIED.refused(
    "a best loss",
    "best is made of what it was in the step before",
    behind="best = min(best, result.loss); group['lr'] = best",
)

CARRIED.refused(
    "a factor that shrinks",
    "factor is made of what it was in the step before",
    behind="factor *= 0.9; group['lr'] = factor",
)

CARRIED.refused(
    "a count",
    "count is made of what it was in the step before",
    first="count += 1\nif count > 5: break",
)

CARRIED.refused(
    "a count that says what it is",
    "count is made of what it was in the step before",
    first="count: int = count + 1; group['lr'] = 0.1 / count",
)

CARRIED.refused(
    "a count that is counted in passing",
    "count is made of what it was in the step before",
    first="group['lr'] = 0.1 / (count := count + 1)",
)

CARRIED.refused(
    "a count that something is made of",
    "count is made of what it was in the step before",
    first="count += 1; half = count / 2; group['lr'] = half",
)

CARRIED.refused(
    "a count that a function is given",
    "count is made of what it was in the step before",
    first="count += 1; half = hash(count)",
)

CARRIED.refused(
    "a count that a function reads",
    "count is made of what it was in the step before",
    first="count += 1",
    after="look = lambda: count",
)

CARRIED.refused(
    "a count that is a result",
    "count is made of what it was in the step before",
    first="count += 1",
    after="show(count)",
)

CARRIED.refused(
    "a rate of steps made by hand",
    "factor is made of what it was in the step before",
    behind="factor *= 0.9\nwith torch.no_grad():\n    for p in model.parameters(): p -= factor * p.grad",
)

CARRIED.refused(
    "what a tensor is made smaller by",
    "factor is made of what it was in the step before",
    first="weight = model.weight.detach()",
    behind="factor *= 0.9; weight *= factor",
)

CARRIED.refused(
    "a count that a function is given while it is said",
    "count is made of what it was in the step before",
    first="def halved(n): group['lr'] /= n; return n",
    behind="count += 1; show(halved(count))",
)

CARRIED.refused(
    "a count that is given to what only seems to say it",
    "count is made of what it was in the step before",
    first="def log(n): group['lr'] = 0.1 / n",
    behind="count += 1; log(count)",
)

CARRIED.refused(
    "a count that says when something is done",
    "count is made of what it was in the step before",
    first="def halved(): group['lr'] /= 2",
    behind="count += 1\nif count > 2: best = halved()",
)

CARRIED.refused(
    "a count that says whether something is done",
    "count is made of what it was in the step before",
    first="def halved(): group['lr'] /= 2",
    behind="count += 1; best = halved() if count > 2 else 0",
)

CARRIED.refused(
    "a count that another name is given in passing",
    "count is made of what it was in the step before",
    behind="count += 1; show(half := count / 2); group['lr'] = half",
)

CARRIED.refused(
    "a count that is asked for in passing",
    "count is made of what it was in the step before",
    behind="count += 1\nif (half := count / 2) > 9: pass\ngroup['lr'] = half",
)

CARRIED.refused(
    "a count that is given to what something else is called",
    "count is made of what it was in the step before",
    first="def rate(n): group['lr'] = 0.1 / n\nlog = rate",
    behind="count += 1; log(count)",
)

CARRIED.refused(
    "a count that chooses a function",
    "count is made of what it was in the step before",
    behind="count += 1; [model.train, model.eval][count % 2]()",
)

CARRIED.refused(
    "a count that a text reads",
    "count is made of what it was in the step before",
    behind="count += 1; group['lr'] = eval('0.1 / count')",
)

CARRIED.refused(
    "what is saved where it is the best",
    "best is made of what it was in the step before",
    behind="if result.loss < best: best = result.loss; torch.save(model, '/dev/null')",
)

CARRIED.refused(
    "the last of something",
    "before is made of what it was in the step before",
    behind="group['lr'] = before / 100; before = result.loss",
)

CARRIED.refused(
    "what the first step of an epoch sets",
    "order is made of what it was in the step before",
    first="if step % 2 == 0: order = [step, step]",
    behind="group['lr'] = order[step % 2] / 100",
)

CARRIED.refused(
    "a best loss in a dict",
    "table is made of what it was in the step before",
    behind="if result.loss < table['best']: table['best'] = result.loss",
)

CARRIED.refused(
    "a momentum in a list",
    "momentum is made of what it was in the step before",
    behind="momentum[0] = 0.9 * momentum[0] + model.weight.grad",
)

CARRIED.refused(
    "a count of each",
    "table is made of what it was in the step before",
    behind="table[step % 2] += 1",
)

CARRIED.refused(
    "what each epoch makes of what it was",
    "factor is made of what it was in the step before",
    first="epoch = step // 2\nif epoch != count: count = epoch; factor = factor / 2",
    behind="group['lr'] = factor",
)

CARRIED.refused(
    "an order that is shuffled",
    "order is made of what it was in the step before",
    first="if step % 2 == 0: random.shuffle(order)",
)

CARRIED.refused(
    "a list of losses",
    "losses is made of what it was in the step before",
    behind="losses.append(result.loss)",
)

CARRIED.refused(
    "a list of losses and times",
    "losses is made of what it was in the step before",
    behind="losses.append(time.time() - began_s); losses.append(result.loss)",
)

CARRIED.refused(
    "a list of losses by time",
    "losses is made of what it was in the step before",
    behind="losses.append(result.loss / (time.time() - began_s))",
)

CARRIED.refused(
    "a list of what was no time at first",
    "losses is made of what it was in the step before",
    behind="took_s = result.loss; losses.append(took_s); took_s = time.time() - began_s",
)

CARRIED.refused(
    "a best loss in an object",
    "trainer.stopper.best is made of what it was in the step before",
    behind="trainer.stopper.look(result.loss); group['lr'] = trainer.stopper.best",
)

CARRIED.refused(
    "the least in an object",
    "trainer.stopper.best is made of what it was in the step before",
    behind="trainer.stopper.least(result.loss); group['lr'] = trainer.stopper.best",
)

LEFT.refused(
    "the best weights",
    "best is left by some step to the code after the loop, which saves it",
    behind="if result.loss > 0.3: best = copy.deepcopy(model.state_dict())",
)

LEFT.refused(
    "the best by what is given",
    "best is left by some step to the code after the loop, which saves it",
    behind="kept.bad += 1\nif kept.bad < 3: best = step",
)

LEFT.refused(
    "the best by a name",
    "best is left by some step to the code after the loop, which saves it",
    behind="found = result.loss\nif found > 0.3: best = step",
)

LEFT.allowed(
    "every step's",
    "best is left by a step that its number tells",
    behind="best = result.loss",
)

LEFT.refused(
    "an early step's",
    "best is left by some step to the code after the loop, which saves it",
    behind="if step == 1: best = copy.deepcopy(model.state_dict())",
)

LEFT.refused(
    "the first epoch's",
    "best is left by some step to the code after the loop, which saves it",
    behind="epoch = step // 2\nif epoch < order[1]: best = epoch",
)

LEFT.allowed(
    "every other step's",
    "best is left by a step that its number tells",
    behind="if step % 2 == 0: best = step",
)

LEFT.allowed(
    "an early step's, and all others'",
    "best is left by a step that its number tells",
    behind="best = step\nif step == 1: best = result.loss",
)

LEFT.allowed(
    "the last step's",
    "best is left by a step that its number tells",
    behind="if step == 7: best = result.loss",
)

LEFT.allowed(
    "an epoch's",
    "best is left by a step that its number tells",
    behind="epoch, at = divmod(step, 2)\nif at == 1: best = epoch",
)

LEFT.allowed(
    "what says why it was left",
    "best is left by a step that its number tells",
    behind="if result.loss < 0.1:\n    best = 1; break",
)

LEFT.allowed(
    "what a setting asks for",
    "best is left by a step that its number tells",
    behind="if trainer.times: best = step",
)

CARRIED.allowed(
    "shown, a loss that is added up",
    "factor is made of what it was in the step before, and is only shown",
    behind="factor += result.loss\nif step % 2: show(f'{factor / 2:.3f}'); factor = 0.0",
)

CARRIED.allowed(
    "shown, a count, and what is made of it",
    "count is made of what it was in the step before, and is only shown",
    first="count += 1; half = round(count / 2)",
    behind="show(half)",
)

CARRIED.allowed(
    "shown, the last of something",
    "before is made of what it was in the step before, and is only shown",
    behind="show(before); before = result.loss",
)

CARRIED.allowed(
    "shown, the best so far",
    "best is made of what it was in the step before, and is only shown",
    behind="best = min(best, result.loss)\nif best < 9: show(best)",
)

CARRIED.allowed(
    "shown, a count that says what it is",
    "count is made of what it was in the step before, and is only shown",
    first="count: int = count + 1; show(count)",
)

CARRIED.allowed(
    "shown, what is said beside something that is done",
    "count is made of what it was in the step before, and is only shown",
    first="def evaluated(): model.eval(); model.train(); return 1.0",
    behind="epoch = step // 2; count += 1\nif epoch % 2 == 0: show(count, evaluated())",
)

CARRIED.allowed(
    "shown, a rate in a second",
    "count is made of what it was in the step before, and is only shown",
    behind="count += 1\nif count == 2: now_s = time.time(); show(count / now_s); count = 0",
)

CARRIED.allowed(
    "shown, whether something was said",
    "before is made of what it was in the step before, and is only shown",
    behind="if before == 0: show(step); before = 1",
)

CARRIED.allowed(
    "a setting of the optimizer",
    "the learning rate is in the optimizer's state",
    first="group['lr'] *= 0.9",
)

CARRIED.allowed(
    "what an object that is given has",
    "the object is registered",
    first="kept.table['best'] = min(kept.table['best'], 1)",
)

CARRIED.allowed(
    "what is computed once",
    "memory holds what is computed of its key",
    first="if step % 2 not in memory: memory[step % 2] = step % 2",
    behind="show(memory[step % 2])",
)

CARRIED.allowed(
    "times in a dict",
    "a time is added up, and nothing is done with it",
    behind="table['s'] += time.time() - began_s",
)

CARRIED.allowed(
    "a list of times",
    "times are collected, and nothing is done with them",
    behind="losses.append(time.time() - began_s)",
)

CARRIED.allowed(
    "the last times",
    "times are collected, and nothing is done with them",
    first="now_s = time.perf_counter()",
    behind="took_s = time.perf_counter() - now_s; trainer.times.append(took_s * 1000)",
)

CARRIED.allowed(
    "a name that is called as a count is",
    "the name is set anew in each step",
    first="bad = step",
    behind="show(bad)",
)

CARRIED.allowed(
    "what is given",
    "the object is registered",
    behind="kept.look(result.loss)",
)

CARRIED.allowed(
    "an order that is made anew",
    "the order is made anew in each step",
    first="order = [1, 2]; random.shuffle(order)",
)

CARRIED.allowed(
    "what every step sets anew",
    "count and losses begin anew in each step",
    first="count = 0; count += 1; losses = []; losses.append(count)",
)

CARRIED.allowed(
    "what is set in either case",
    "order is set anew in each step",
    first="if step % 2 == 0: order = [1]\nelse: order = [2]",
    behind="show(order)",
)

CARRIED.allowed(
    "what is set in the same case",
    "order is set in the steps that read it",
    first="if step % 2 == 0: order = [1]",
    behind="if step % 2 == 0: show(order)",
)

CARRIED.allowed(
    "what is set in the case that goes on",
    "order is set in each step that goes on",
    first="if step == 3: break\nelse: order = [2]",
    behind="show(order)",
)

CARRIED.allowed(
    "what is set in other blocks",
    "order and other are set anew in each step",
    first="with torch.no_grad(): order = [1]",
    behind="show(order)\ntry: other = 1\nexcept ValueError: other = 2\nshow(other)",
)

CARRIED.allowed(
    "what is done for each epoch",
    "order is set by the first step of an epoch, and by whoever is new in it",
    first="epoch = step // 2\nif epoch != best: best = epoch; order = [epoch]",
    behind="show(order)",
)

CARRIED.allowed(
    "what an object does for each epoch",
    "the object is set by the first step of an epoch, and by whoever is new in it",
    first="trainer.stopper.begin(step // 2)",
)

CARRIED.allowed(
    "time",
    "times are added up, and nothing is done with them",
    behind="waited_s += time.time() - began_s; began_s = time.time()",
)

CARRIED.allowed(
    "what a comprehension names",
    "a comprehension has names of its own",
    behind="best = [count for count in range(step)]",
)

CARRIED.allowed(
    "what is counted within a step",
    "factor is set anew in each step",
    behind="for index in range(3): factor = index + 1.0",
)
SET.refused(
    "an item",
    "cfg['w'] is set by one step, and later steps go by it",
    loss=f"cfg['w'] * {SQUARE}",
    behind="if step == 4: cfg['w'] = 3.0",
)

SET.refused(
    "items by update",
    "cfg['w'] is set by one step, and later steps go by it",
    loss=f"cfg['w'] * {SQUARE}",
    behind="if step == 4: cfg.update(clip=1.0, w=3.0)",
)

SET.refused(
    "items by a dict",
    "cfg['w'] is set by one step, and later steps go by it",
    loss=f"cfg['w'] * {SQUARE}",
    behind="if step == 4: cfg.update({'w': 3.0})",
)

SET.refused(
    "an attribute by its name",
    "course.beta is set by one step, and later steps go by it",
    loss=f"course.beta * {SQUARE}",
    behind="if step == 4: setattr(course, 'beta', 3.0)",
)

SET.refused(
    "an attribute",
    "course.beta is set by one step, and later steps go by it",
    first="if step == 4: course.beta = 3.0",
    loss=f"course.beta * {SQUARE}",
)

SET.refused(
    "of a class",
    "Course.beta is set by one step, and later steps go by it",
    loss=f"Course.beta * {SQUARE}",
    behind="if step == 4: Course.beta = 3.0",
)

SET.refused(
    "again and again",
    "course.beta is set by one step, and later steps go by it",
    first="if step % 4 == 0: course.beta = 1 / (1 + step)",
    loss=f"course.beta * {SQUARE}",
)

SET.refused(
    "from a step on, but too late for it",
    "cfg['w'] is set by one step, and later steps go by it",
    loss=f"cfg['w'] * {SQUARE}",
    behind="if step >= 4: cfg['w'] = 3.0",
)

SET.refused(
    "by what was found out",
    "cfg['w'] is set by one step, and later steps go by it",
    loss=f"cfg['w'] * {SQUARE}",
    behind="if result.loss > LIMIT: cfg['w'] = 3.0",
)

SET.refused(
    "the last loss",
    "cfg['w'] is set by one step, and later steps go by it",
    loss=f"cfg['w'] * {SQUARE}",
    behind="cfg['w'] = result.loss",
)

SET.refused(
    "what a function reads",
    "cfg['w'] is set by one step, and later steps go by it",
    loss="loss_of(x)",
    behind="if step == 4: cfg['w'] = 3.0",
)

SET.refused(
    "what a method sets and another reads",
    "course.phase is set by one step, and later steps go by it",
    first="course.update(step)",
    loss="course.loss(x)",
)

SET.refused(
    "what a method finds out",
    "course.phase is set by one step, and later steps go by it",
    loss="course.loss(x)",
    behind="course.update(0, result.loss)",
)

SET.refused(
    "what the microbatches are made by",
    "course.level is set by one step, and later steps go by it",
    loss=SQUARE,
    behind="if step == 4: course.harder()",
)

SET.refused(
    "a name of all",
    "weight is set by one step, and later steps go by it",
    loss=f"weight * {SQUARE}",
    behind="if step == 4: heavier()",
)

SET.refused(
    "what a model goes by",
    "model.scale is set by one step, and later steps go by it",
    loss=SQUARE,
    behind="if step == 4: model.scale = 2.0",
)

SET.refused(
    "what gradients are clipped to",
    "cfg['clip'] is set by one step, and later steps go by it",
    loss=SQUARE,
    behind="session.clip_grad_norm_(cfg['clip'])\nif step == 4: cfg['clip'] = 0.1",
)

SET.refused(
    "what an object does for each epoch, asked in some steps only",
    "course.order is set by one step, and later steps go by it",
    first="if step % 3 == 0: course.begin(step // 3)",
    loss=f"{SQUARE} * course.order[0]",
)

SET.refused(
    "a target that is made anew now and then",
    "course.target is set by one step, and later steps go by it",
    loss="(model(x) - 2 * course.target(x).detach() - 1).square().mean()",
    behind="if step % 4 == 3: course.sync()",
)

SET.allowed(
    "what every step sets",
    "cfg['w'] is set in each step, by its number",
    first="cfg['w'] = 1.0 if step < 4 else 3.0; course.update(3 - 1)",
    loss="loss_of(x)",
)

SET.allowed(
    "what is set in either case",
    "cfg['w'] is set in each step, by its number",
    first="if step < 4: cfg['w'] = 1.0\nelse: cfg['w'] = 3.0",
    loss="loss_of(x)",
)

SET.allowed(
    "items that every step updates",
    "cfg['w'] is set in each step, by its number",
    first="cfg.update(w=1.0 if step < 4 else 3.0)",
    loss="loss_of(x)",
)

SET.allowed(
    "from a step on",
    "cfg['w'] is set in each step from the fourth on",
    first="if step >= 4: cfg['w'] = 3.0",
    loss="loss_of(x)",
)

SET.allowed(
    "from a step on, as it grows",
    "course.beta is set in each step from the fourth on",
    first="if step > 3: course.beta = (step - 3) / 9",
    loss=f"course.beta * {SQUARE}",
)

SET.allowed(
    "what is only shown",
    "course.shown is only shown",
    loss=SQUARE,
    behind="if step == 4: course.shown = result.loss\nline = f'{course.shown}'\nshow(line)",
)

SET.allowed(
    "what says whether to show",
    "cfg['on'] says whether something is shown",
    loss=SQUARE,
    behind="if step == 4: cfg['on'] = False\nif cfg['on']: show(step)",
)

SET.allowed(
    "what is there for a moment",
    "model.scale is put back within the step",
    first="if step % 4 == 0: model.scale = 2.0; model(torch.ones(1, 4)); model.scale = 1.0",
    loss=SQUARE,
)

SET.allowed(
    "what is put back",
    "cfg['w'] is put back within the step",
    first="if step % 4 == 0: before = cfg['w']; cfg['w'] = 2.0; show(cfg); cfg['w'] = before",
    loss="loss_of(x)",
)

SET.allowed(
    "what a step is over with",
    "cfg['w'] is put back within the step",
    loss="loss_of(x)",
    behind="if step % 4 == 0: cfg['w'] = 2.0; show(cfg)\ncfg['w'] = 1.0",
)

SET.allowed(
    "what an epoch begins with",
    "the object is set by the first step of an epoch, and by whoever is new in it",
    first="course.begin(step // 3)",
    loss=f"{SQUARE} * course.order[0]",
)

SET.allowed(
    "what the session has",
    "the object is registered",
    loss="kept.loss(x)",
    behind="if step == 4: kept.phase = 'hard'",
)

SET.allowed(
    "a setting of the optimizer",
    "the learning rate is in the optimizer's state",
    loss=SQUARE,
    behind="if step == 4: group['lr'] = 0.001",
)

SET.allowed(
    "what no setting asks for",
    "the setting that asks for it stays as it is",
    first="if not cfg['on']: cfg['w'] = 3.0",
    loss="loss_of(x)",
)
# Where nothing is done with what is kept, the same again with the learning rate going by it.
for name, rate in {
    "a count that a function is given": "0.01 / (1 + half)",
    "what is saved where it is the best": "0.01 * (1 + best)",
    "a best loss in a dict": "0.01 * (1 + table['best'])",
    "a momentum in a list": "0.01 + abs(float(momentum[0].sum())) / 100",
    "a count of each": "0.01 / (1 + table[0])",
    "an order that is shuffled": "0.001 * (1 + order[0])",
    "a list of losses": "0.01 / (1 + sum(losses))",
}.items():
    CARRIED.gone_by(name, behind=f"group['lr'] = {rate}")

TABLES = (CARRIED, LEFT, SET)
