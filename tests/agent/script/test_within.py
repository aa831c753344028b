"""What a script collects of its microbatches is only this worker's part of them: refused by its name in the first step."""

from collections.abc import Callable

import pytest

from agent.errors import Misuse

SCRIPT = """
import collections
import torch
from agent import Session
class Meter:
    def __init__(self):
        self.sum, self.last = 0.0, None
    def update(self, value):
        self.sum += value
class Trainer:
    def __init__(self):
        self.meter = Meter()
    def train(self, x):
        loss = model(x).square().mean()
        session.backward(loss)
        {inside}
class Data:
    def __init__(self):
        self.found = {{}}
    def __len__(self):
        return 2
    def __getitem__(self, index):
        return self.found.setdefault(index, torch.full((2, 4), index + 1.0))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
trainer, data, meter = Trainer(), Data(), Meter()
trainer.state, kept, parts = 0.0, {{}}, {{}}
frozen = torch.nn.Linear(4, 1).requires_grad_(False)
def seen_by(x):
    return model(x)
losses, hidden, stats = [], [0.0, 0.0], collections.defaultdict(float)
class Metric(torch.nn.Module):
    asked = 0
    def forward(self, found):
        self.asked += 1
        return found.mean()
metrics = torch.nn.ModuleDict({{"mean": Metric()}})
session = Session(model, optimizer, microbatches=2)
for step in session.steps(2):
    total, own = 0.0, []
    for x in session.share(data):
        {body}
    optimizer.step()
    {behind}
"""
LOSS = "loss = model(x).square().mean(); session.backward(loss)"
REFUSED = {
    "a total": (f"{LOSS}; total += loss.item()", "", "print(total)", "train.py:44: `total`"),
    "the last loss": (LOSS, "", "print(loss.item())", "train.py:44: `loss`"),
    "a list": (f"{LOSS}; losses.append(loss.item())", "", "", "`losses`"),
    "a list of every step": (
        f"{LOSS}; own.append(loss.item())",
        "",
        "print(sum(own))",
        "`own`",
    ),
    "a list that is emptied, and read behind": (
        f"losses.clear(); {LOSS}; losses.append(loss.item())",
        "",
        "print(losses)",
        "train.py:44: `losses`",
    ),
    "a state for the next step": (f"{LOSS}; hidden[0] = loss.detach()", "", "", "`hidden`"),
    "a state of the model for the next step, by a key": (
        "found = model(x + kept.get(0, 0.0)); kept[0] = found.detach(); session.backward(found.square().mean())",
        "",
        "",
        "train.py:41: `kept[0]` keeps what the model has computed",
    ),
    "such a state in an object": (
        "found = seen_by(x + trainer.state); trainer.state = (found.detach(), 1)[0]; session.backward(found.mean())",
        "",
        "",
        "train.py:41: `trainer.state` keeps what the model has computed",
    ),
    "a state by a key, beside another": (
        "kept['x'] = 1.0; found = model(x * kept['x'] + kept.get(0, 0.0)); kept[0] = found.detach(); session.backward(found.mean())",
        "",
        "",
        "train.py:41: `kept[0]` keeps what the model has computed",
    ),
    "a state by a key that is begun once": (
        "if 'at' not in kept: kept['at'] = 0.0\n        found = model(x + kept['at']); kept['at'] = found.detach(); "
        "session.backward(found.mean())",
        "",
        "",
        "train.py:41: `kept['at']` keeps what the model has computed",
    ),
    "a count in a dict": (f"{LOSS}; stats['loss'] += loss.item()", "", "", "`stats`"),
    "a metric of a library": (f"{LOSS}; metrics['mean'](loss)", "", "", "`metrics`"),
    "a meter": (f"{LOSS}; meter.update(loss.item())", "", "", "`meter.sum`"),
    "a meter, where another function is the body": (
        "trainer.train(x)",
        "self.meter.update(loss.item())",
        "",
        "`trainer.meter.sum`",
    ),
}
ALLOWED = {
    "what belongs together in a dict": (
        "parts['a'] = model(x).square().mean(); parts['b'] = model(x).mean(); session.backward(parts['a'] + parts['b'])",
        "",
        "",
    ),
    "one part from another in a dict": (
        "parts['a'] = model(x); parts['b'] = model(x * parts['a'].mean()); session.backward(parts['b'].mean())",
        "",
        "",
    ),
    "what is added to in an object": (
        "found = model(x)\n        with torch.enable_grad(): trainer.loss = found.square().mean()\n"
        "        trainer.loss = trainer.loss + found.mean(); session.backward(trainer.loss)",
        "",
        "",
    ),
    "a state that is begun anew": (
        "trainer.state = 0.0; trainer.state = model(x + trainer.state); session.backward(trainer.state.mean())",
        "",
        "",
    ),
    "what does not learn is asked once": (
        "found = frozen(x) if 0 not in kept else kept[0]; kept[0] = found; session.backward((model(x) + found).mean())",
        "",
        "",
    ),
    "a name of another use": (LOSS, "", "loss = session.loss; print(loss)"),
    "a metric that is asked behind the loop": (LOSS, "", "metrics['mean'](model(data[0]))"),
    "what is printed": (f"{LOSS}; print(loss.item())", "", ""),
    "what was loaded": (LOSS, "", "print(data.found)"),
    "what every microbatch sets anew": ("trainer.train(x)", "self.meter.last = loss", ""),
    "a list of every microbatch": (
        "parts = []; parts.append(model(x).square().mean()); session.backward(sum(parts))",
        "",
        "",
    ),
    "a list that is emptied for every microbatch": (
        "losses.clear(); losses.append(model(x).square().mean()); session.backward(losses[0])",
        "",
        "",
    ),
    "what is counted behind the loop": (LOSS, "", "meter.update(session.loss)"),
}


def filled(body: str, inside: str, behind: str) -> str:
    return SCRIPT.format(body=body, inside=inside or "pass", behind=behind or "pass")


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_collected_in_the_loop_is_refused(
    by_hand: Callable[[str], None], case: str
) -> None:
    """Whoever has other microbatches would have another total; a script that trains alone is told as well."""
    *parts, name = REFUSED[case]
    with pytest.raises(Misuse, match="in the loop over session") as error:
        by_hand(filled(*parts))
    assert str(error.value).startswith(name)


def test_a_list_that_is_emptied_too_late_is_refused(by_hand: Callable[[str], None]) -> None:
    """What the microbatch before has put there is read."""
    late = f"{LOSS}; losses.append(loss); losses.clear(); losses.append(loss)"
    with pytest.raises(Misuse, match="`losses` goes on from step to step"):
        by_hand(filled(late, "", ""))


@pytest.mark.parametrize("case", ALLOWED)
def test_what_is_of_one_microbatch_only_is_not(by_hand: Callable[[str], None], case: str) -> None:
    """Nor what is no count of microbatches."""
    by_hand(filled(*ALLOWED[case]))


LOOKS_UP = """
import torch
from agent import Session
bags = torch.nn.EmbeddingBag(4, 2{max_norm})
model = torch.nn.Sequential(bags)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = Session(model, optimizer, microbatches=1)
for step in session.steps(2):
    for x in session.share([torch.tensor([[0, 1]])]):
        session.backward(model(x).square().mean())
    optimizer.step()
    {behind}
"""


INSTEAD = "weight.copy_(torch.renorm(weight, 2.0, 0, 0.5))"


def test_rows_that_shorten_themselves_are_named_with_the_way_out(
    by_hand: Callable[[str], None],
) -> None:
    """It is not the optimizer that changes the model there."""
    with pytest.raises(Misuse, match="`0` does that by its max_norm") as error:
        by_hand(LOOKS_UP.format(max_norm=", max_norm=0.5", behind=""))
    assert str(error.value).endswith(INSTEAD)


def test_rows_may_be_shortened_behind_the_loop(by_hand: Callable[[str], None]) -> None:
    """As the line says."""
    behind = f"with torch.no_grad(): weight = bags.weight; {INSTEAD}"
    by_hand(LOOKS_UP.format(max_norm="", behind=behind))


WRITES = """
import torch
from agent import Session
class Follows(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.student, self.teacher = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
        self.teacher.load_state_dict(self.student.state_dict())
        {teacher}
    def forward(self, x):
        for theirs, ours in zip(self.teacher.{kind}(), self.student.parameters()):
            theirs.data.lerp_(ours.data, 0.5)
        return self.student(x) - self.teacher(x).detach()
model = Follows()
optimizer = torch.optim.SGD(model.student.parameters(), lr=0.1)
session = Session(model, optimizer, microbatches=2)
for step in session.steps(3):
    for x in session.share([torch.ones(2, 4)] * 2):
        session.backward(model(x).sum())
    optimizer.step()
"""
BUFFERS = """[
            (self.teacher.__delattr__(name), self.teacher.register_buffer(name, value.detach()))
            for name, value in [*self.teacher.named_parameters()]
        ]"""


def test_a_teacher_that_follows_in_the_forward_is_refused(by_hand: Callable[[str], None]) -> None:
    """It would follow as often as a worker has microbatches. In the first step it has nobody to follow, and `.data` leaves
    no trace in a tensor's version."""
    frozen = "self.teacher.requires_grad_(False)"
    with pytest.raises(Misuse, match=r"^step 1: the parameter 'teacher\.weight' is written to"):
        by_hand(WRITES.format(teacher=frozen, kind="parameters"))


def test_a_teacher_of_buffers_may_follow_in_the_forward(by_hand: Callable[[str], None]) -> None:
    """As the line says: each microbatch sees those of the step's start, and what all have made of them is added up."""
    by_hand(WRITES.format(teacher=BUFFERS, kind="buffers"))


COUNTING = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.calls = torch.nn.Linear(4, 1), 0
    def forward(self, x):
        self.calls += 1
        return self.inner(x) * {by}
    def said(self, by):
        if self.calls % 100 == 0:
            print("forwards", self.calls)
        return by
    def begun(self, by):
        self.depth = 0
        for _ in range(3):
            by = by / (1 + self.depth)
            self.depth += 1
        return by
class Other:
    seen = 0
    def one(self):
        self.calls += 1
        return self.calls
model = Net()
"""


@pytest.mark.parametrize(
    ("by", "refused"),
    [
        ("min(1.0, 0.5 + self.calls // 9)", True),
        ("2.0", False),
        ("self.said(2.0)", False),
        ("self.begun(2.0)", False),
    ],
)
def test_what_a_model_counts_and_goes_by_is_refused(
    by_hand: Callable[[str], None], by: str, refused: bool
) -> None:
    """A factor that grows with the forwards of this worker: also where it is the same in the first steps. What is counted to be
    said, what a forward begins anew and what an object of another class counts may be there."""
    model = COUNTING.format(by=by)
    script = filled(LOSS, "", "").replace("model = torch.nn.Linear(4, 1)\n", model)
    if not refused:
        by_hand(script)
        return
    with pytest.raises(Misuse, match=r"^`model\.calls` becomes another in the loop over session"):
        by_hand(script)


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


@pytest.mark.parametrize(
    ("what", "behind", "refused"),
    [
        ("pass", "", False),
        ("pass", "print(parts.part)", True),
        ("self.most = max(self.most, self.part)", "", True),
        ("self.rows += 1; self.most += self.rows", "", True),
    ],
)
def test_the_parts_that_a_loss_leaves_may_be_there(
    by_hand: Callable[[str], None], what: str, behind: str, refused: bool
) -> None:
    """Set anew for each microbatch. Who reads them behind the loop has those of one of its own, and is refused; so is what the
    loss makes of what it was."""
    script = filled("session.backward(parts(model(x)))", "", behind)
    script = script.replace("session = ", PARTS.replace("WHAT", what) + "session = ", 1)
    if not refused:
        by_hand(script)
        return
    with pytest.raises(Misuse, match=r"`parts.*` becomes another in the loop over session"):
        by_hand(script)


COUNTED = """
import itertools
def counting(rows):
    for k, x in enumerate(rows):
        yield x * k
class Counting:
    def __init__(self, rows):
        self.rows = rows
    def __iter__(self):
        for k, x in enumerate(self.rows):
            yield x * k
    def of(self, rows):
        for k, x in enumerate(rows):
            yield x * k
"""


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("for k, x in enumerate(rows): yield x * (1 + k)", "`k` goes into a microbatch and counts"),
        ("for x, w in zip(rows, [1.0, 2.0]): yield x * w", "`w` goes into a microbatch and counts"),
        (
            "before = 0\n    for x in rows:\n        yield x + before\n        before = x",
            "`before` goes from one",
        ),
        (
            "n = 0\n    for x in rows:\n        n += 1\n        scale = n / 2\n        yield x * scale",
            "`n` goes from one",
        ),
        (
            "n = 0\n    for x in rows:\n        n += 1\n        if n > 1:\n            x = x * 2\n        yield x",
            "`n` goes from one",
        ),
        ("yield from (x * k for k, x in enumerate(rows))", "`k` goes into a microbatch"),
        ("yield from counting(rows)", "`k` goes into a microbatch"),
        ("yield from Counting(rows)", "`k` goes into a microbatch"),
        ("yield from Counting([]).of(rows)", "`k` goes into a microbatch"),
        ("for x, w in zip(rows, itertools.repeat(0.5)): yield x * w", ""),
        ("for x in rows:\n        y = x * 2\n        yield y", ""),
        ("for k, x in enumerate(rows):\n        assert k < 9\n        yield x", ""),
    ],
)
def test_a_generator_between_the_share_and_the_loop_counts_nothing(
    by_hand: Callable[[str], None], body: str, words: str
) -> None:
    """It sees this worker's microbatches only, as the loop does."""
    script = filled(LOSS, "", "").replace(
        "in session.share(data)", "in through(session.share(data))"
    )
    script = script.replace("session = ", COUNTED + "session = ", 1)
    script = script.replace("session = ", f"def through(rows):\n    {body}\nsession = ", 1)
    if not words:
        by_hand(script)
        return
    with pytest.raises(Misuse, match=rf"^train\.py:\d+: {words}"):
        by_hand(script)


@pytest.mark.parametrize(
    ("loop", "name"),
    [
        ("x, y in zip(session.share(data), [1.0, 2.0])", "y"),
        ("y, (x, z) in zip([1.0, 2.0], zip(session.share(data), 'ab'))", "y"),
        ("i, (x, y) in enumerate(zip(session.share(data), [1.0, 2.0]))", "y"),
        ("x, y in shown(zip(session.share(data), [1.0, 2.0]))", "y"),
        ("i, (x, y) in enumerate(shown(zip(session.share(data), [1.0, 2.0])))", "y"),
        ("x, y in map(tuple, zip(session.share(data), [1.0, 2.0]))", "x"),
        ("x, z in shown(zip(session.share(data), 'ab'))", ""),
        ("x, z in zip(session.share(data), 'ab')", ""),
        ("x, y in zip(session.share(data), itertools.repeat(2.0))", ""),
        ("x, y in map(lambda a, b: (a, b), session.share(data), [1.0, 2.0])", "x"),
    ],
)
def test_what_is_drawn_along_with_microbatches_is_refused(
    by_hand: Callable[[str], None], loop: str, name: str
) -> None:
    """Every worker would have it from its beginning; what does not go into the loss may be drawn."""
    loss = "session.backward(y * model(x).mean())" if name else LOSS
    script = filled(loss, "", "").replace("x in session.share(data)", loop)
    script = "import itertools\ndef shown(rows):\n    return iter(rows)\n" + script
    if not name:
        by_hand(script)
        return
    with pytest.raises(
        Misuse, match=rf"^train\.py:\d+: `{name}` goes into the loss and is drawn along"
    ):
        by_hand(script)


OF_ONE_WORKER = {
    "a comprehension": (
        "print(sum([trained(x) for x in session.share(data)]))",
        "train.py:53: what this line makes",
    ),
    "what a comprehension has made": (
        "found = [trained(x) for x in session.share(data)]\n    print(found)",
        "train.py:53: what this line makes",
    ),
    "a sum": (
        "total = sum(trained(x) for x in session.share(data))\n    print(total)",
        "train.py:53: what this line makes",
    ),
    "a function that adds up": (
        "print(added_up(session.share(data)))",
        "train.py:35: `found` is set in the loop",
    ),
    "a loop that asks by itself": (
        "rows = session.share(data)\n    while (x := next(rows, None)) is not None:\n"
        "        loss = trained(x)\n    print(loss)",
        "train.py:56: `loss` is set in the loop",
    ),
    "a count behind another": (
        "for i, x in iter(enumerate(session.share(data))): session.backward(i * model(x).mean())",
        "train.py:53: `i` goes into the loss",
    ),
    "a count under a name": (
        "rows = enumerate(session.share(data))\n    for i, x in rows: session.backward(i * model(x).mean())",
        "train.py:54: `i` goes into the loss",
    ),
}
OF_ALL = {
    "a number of its own": "for i, x in iter(session.share([*enumerate([data[0], data[1]])])): session.backward(i * model(x).mean())",
    "what is dropped": "collections.deque((trained(x) for x in session.share(data)), maxlen=0)",
    "a comprehension of nothing": "_ = [trained(x) for x in session.share(data)]",
    "a function": "train(session.share(data))",
    "a loop that asks by itself": "rows = session.share(data)\n    while (x := next(rows, None)) is not None: trained(x)",
    "two names": "rows = session.share(data)\n    pairs = enumerate(rows)\n    for i, x in pairs: trained(x)",
}
TRAINED = """
def trained(x):
    loss = model(x).square().mean()
    session.backward(loss)
    return loss.item()
def train(rows):
    for x in rows:
        trained(x)
def added_up(rows):
    for x in rows:
        found = trained(x)
    return found
model = torch.nn.Linear(4, 1)
"""


def _over(loop: str) -> str:
    around = filled("", "", "").replace("model = torch.nn.Linear(4, 1)\n", TRAINED)
    before, _, behind = around.partition("    for x in session.share(data):\n        \n")
    return f"{before}    {loop}\n{behind}"


@pytest.mark.parametrize("case", OF_ONE_WORKER)
def test_what_comes_of_a_loop_of_another_form_is_refused(
    by_hand: Callable[[str], None], case: str
) -> None:
    """Wherever the microbatches are gone through: it is found by who asks for the first of them."""
    loop, words = OF_ONE_WORKER[case]
    with pytest.raises(Misuse) as error:
        by_hand(_over(loop))
    assert str(error.value).startswith(words)


@pytest.mark.parametrize("case", OF_ALL)
def test_loops_of_another_form_train(by_hand: Callable[[str], None], case: str) -> None:
    """Of which nothing is read."""
    by_hand(_over(OF_ALL[case]))
