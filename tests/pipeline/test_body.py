"""The body of a script's loop is its recording: found in the source, run with placeholders, refused with its line."""

import runpy
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from agent import session
from agent.crew.anew import Anew
from agent.errors import CannotRecord, Misuse
from agent.pipeline import modes, variants
from agent.pipeline.body import _as_before
from agent.pipeline.examine import Facts, cut_points, examine
from agent.pipeline.record import FIXED
from agent.pipeline.recording import Recording, Told, nobody
from agent.pipeline.stage import Stage
from agent.pipeline.variants import Pieces, Variant, Variants, form_of
from agent.tensors.away import nothing
from agent.world import Alone

START = """
import numpy, random, types
import torch
from torch.nn import functional
from agent import Session
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = Session(model, optimizer, microbatches=2)
def batches(step):
    rows = torch.Generator().manual_seed(step)
    return [(torch.randn(5, 4, generator=rows), torch.arange(5) % 3) for _ in range(2)]
weight, kept, running = 0.5, {}, 0.0; trainer = types.SimpleNamespace(model=model, zero_grad=optimizer.zero_grad)
def train(x, y):
    session.backward(functional.cross_entropy(model(x), y))
for step in session.steps(3):
"""
WITH_CLASSES = START.replace(
    "weight, kept",
    """
import collections
class Encoded(collections.UserDict):
    def __getattr__(self, name):
        if name == "data":
            raise AttributeError(name)
        return self.data[name]
class Batch:
    def __init__(self, x, y):
        self.x, self.more, self.weight, self.name = x, {"y": y}, 1.0, "a"
weight, kept""",
)
GOOD = {
    "over a name": """
    def through(rows):
        yield from rows
    share = session.share(batches(step))
    pairs = ((x, y) for x, y in through(share))
    for x, y in pairs:
        session.backward(functional.cross_entropy(model(x), y))
""",
    "handed to a function": """
    def train_on(rows):
        for x, y in rows:
            session.backward(functional.cross_entropy(model(x), y))
    train_on(session.share(batches(step)))
""",
    "plain": """
    for x, y in session.share(batches(step)):
        loss = functional.cross_entropy(model(x), y)
        session.backward(loss)
    """,
    "enumerated": """
    for index, (x, y) in enumerate(session.share(batches(step))):
        session.backward(functional.cross_entropy(model(x), y))
    """,
    "a dict": """
    for batch in session.share([{"x": x, "y": y} for x, y in batches(step)]):
        session.backward(functional.cross_entropy(model(batch["x"]), batch["y"]))
    """,
    "a dictionary of a library": """
    for batch in session.share([Encoded(x=x, y=y) for x, y in batches(step)]):
        session.backward(functional.cross_entropy(model(batch["x"]), batch.y))
    """,
    "an object": """
    for batch in session.share([Batch(x, y) for x, y in batches(step)]):
        session.backward(functional.cross_entropy(model(batch.x), batch.more["y"]) * batch.weight)
    """,
    "a number in it": """
    for x, y, factor in session.share([(x, y, 0.5 + each) for each, (x, y) in enumerate(batches(step))]):
        found = functional.cross_entropy(model(x), y) * factor + (1 - factor)
        session.backward(found)
    """,
    "a number that decides": """
    for batch in session.share([(each, *batch) for each, batch in enumerate(batches(step))]):
        found = functional.cross_entropy(model(batch[1]), batch[2])
        session.backward(found * 2 if batch[0] > 0 else found)
    """,
    "in a function": """
    for x, y in session.share(batches(step)):
        train(x, y)
    """,
    "a line that is broken": """
    for x, y in session.share(
        batches(step)
    ):
        hidden = model[0](x)
        for layer in model[1:]:
            hidden = layer(hidden)
        session.backward(
            functional.cross_entropy(hidden, y)
        )
    """,
    "gradients that are cleared first": """
    for x, y in session.share(batches(step)):
        optimizer.zero_grad()
        trainer.model.zero_grad(set_to_none=True)
        session.backward(functional.cross_entropy(model(x), y))
    """,
    "what is collected for one microbatch": """
    for x, y in session.share(batches(step)):
        losses = {}
        rows = []
        for row in range(2):
            rows.append(x[row:])
            losses[row] = functional.cross_entropy(model(x), y)
        parts = [loss for loss in losses.values()]
        parts += [0.0]
        parts[0] = parts[0] + 0.0
        del rows
        session.backward(sum(parts) / 2)
    """,
    "names of before": """
    x, y = batches(step)[0]
    for x, y in session.share(batches(step)):
        losses = [functional.cross_entropy(model(x), y) for _ in range(2)]
        session.backward(sum(losses) / 2)
    x = step
    """,
}
REENTRANT = """
class Kept(torch.nn.Module):
    def __init__(self, inner, use):
        super().__init__()
        self.inner, self.use = inner, use
    def forward(self, x):
        again = torch.utils.checkpoint.checkpoint
        return again(self.inner, x, use_reentrant=self.use) if x.sum() < 1e9 else x
model[0], model[2] = Kept(model[0], False), Kept(model[2], True)
"""
BAD = {
    "a value": (
        "    for x, y in session.share(batches(step)):\n"
        "        loss = functional.cross_entropy(model(x), y)\n"
        "        found = float(loss.detach())\n"
        "        session.backward(loss * found)\n",
        ":19 in <module>: this line cannot be recorded",
    ),
    "a trace": (
        "    for x, y in session.share(batches(step)):\n"
        "        kept.update(last=x)\n"
        "        session.backward(functional.cross_entropy(model(x), y))\n",
        ":18: this line does something besides the loss",
    ),
    "a trace in what is called as something new": (
        "    for x, y in session.share(batches(step)):\n"
        "        loss = functional.cross_entropy(model(x), y)\n"
        "        found = kept\n"
        "        found['last'] = x\n"
        "        session.backward(loss)\n",
        ":20: this line does something besides the loss",
    ),
    "gradients that are cleared by something of one's own": (
        "    for x, y in session.share(batches(step)):\n"
        "        trainer.zero_grad()\n"
        "        session.backward(functional.cross_entropy(model(x), y))\n",
        "train.py:18: this line does something besides the loss",
    ),
    "behind the backward": (
        "    for x, y in session.share(batches(step)):\n"
        "        loss = functional.cross_entropy(model(x), y)\n"
        "        session.backward(loss)\n"
        "        kept.update(last=loss)\n",
        "train.py:20: this line comes behind session.backward(...)",
    ),
    "carried over": (
        "    for x, y in session.share(batches(step)):\n"
        "        running += 1.0\n"
        "        session.backward(functional.cross_entropy(model(x), y))\n",
        "train.py:18: `running` goes from one microbatch to the next",
    ),
    "two losses": (
        "    for x, y in session.share(batches(step)):\n"
        "        session.backward(functional.cross_entropy(model(x), y))\n"
        "        session.backward(model(x).sum())\n",
        "train.py:19: a microbatch has more than one session.backward(...)",
    ),
    "no loop": (
        "    share = session.share(batches(step))\n"
        "    while (batch := next(share, None)) is not None:\n"
        "        session.backward(functional.cross_entropy(model(batch[0]), batch[1]))\n",
        "train.py:17: cutting the model into stages needs a loop that can be found",
    ),
    "a number of numpy's": (
        "    for x, y, w in session.share([(x, y, numpy.float64(1)) for x, y in batches(step)]):\n"
        "        session.backward(functional.cross_entropy(model(x), y))\n",
        "train.py:17: a microbatch is made of Tensor, float64;",
    ),
    "not tensors": (
        "    for x, y, name in session.share([(x, y, 'a') for x, y in batches(step)]):\n"
        "        session.backward(functional.cross_entropy(model(x), y))\n",
        "train.py:17: a microbatch is made of Tensor, str;",
    ),
    "a draw that does not travel": (
        "    for x, y in session.share(batches(step)):\n"
        "        session.backward(functional.cross_entropy(model(x), y) * random.random())\n",
        "it draws",
    ),
}


class Recorder(Alone):
    """Records in every step, and goes on."""

    def __init__(self) -> None:
        self.found: list[Recording] = []
        self.failed = ""
        self.told: Told = nobody
        self.anew = Anew()

    def share(self) -> tuple[int, int]:
        try:
            own = session.made()[0]
            self.found.append(self.anew.recorded(own.version, lambda: own.recording(self.told)))
        except CannotRecord as error:
            self.failed = str(error)
        return super().share()


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    session._sessions.clear()
    world = Recorder()
    session.join(world)
    yield world
    session._sessions.clear()
    session._world = None


def run(folder: Path, loop: str, start: str = START) -> dict[str, object]:
    script = folder / "train.py"
    script.write_text(start + loop + "\n    optimizer.zero_grad()\n")
    return runpy.run_path(str(script))


@pytest.mark.parametrize("case", GOOD)
def test_a_loop_is_recorded(tmp_path: Path, recorder: Recorder, case: str) -> None:
    """However the loop is written, the graph computes the loss that the body computes."""
    names = run(tmp_path, GOOD[case], WITH_CLASSES)
    assert recorder.failed == ""
    (recording,) = {id(found): found for found in recorder.found}.values()
    assert cut_points(recording.facts)
    x, y = names["batches"](0)[0]
    expected = torch.nn.functional.cross_entropy(names["model"](x), y)
    assert torch.equal(
        recording.graph(*recording.flatten(recording_batch(case, names, x, y))), expected
    )


def test_a_loop_that_differentiates_where_it_draws(tmp_path: Path, recorder: Recorder) -> None:
    """What is run to compare with needs what its forward saves, and draws the same when it is run for that once more."""
    loop = """
    for x, y in session.share(batches(step)):
        x = (x + torch.randn_like(x)).requires_grad_()
        found = model(x)
        (slope,) = torch.autograd.grad(found.square().sum(), x, create_graph=True)
        session.backward(functional.cross_entropy(found, y) + slope.square().mean())
    """
    run(tmp_path, loop)
    assert recorder.failed == ""


def test_what_an_object_holds_besides_is_the_same_in_each(
    tmp_path: Path, recorder: Recorder
) -> None:
    """It is part of what was recorded."""
    names = run(tmp_path, GOOD["an object"], WITH_CLASSES)
    batch = names["Batch"](torch.zeros(5, 4), torch.zeros(5, dtype=torch.int64))
    recorder.found[0].flatten(batch)
    batch.weight = 2.0
    recorder.found[0].flatten(batch)
    batch.name = "b"
    with pytest.raises(
        CannotRecord, match=r"this microbatch is Batch\(.*name='b'\), and .*name='a'"
    ):
        recorder.found[0].flatten(batch)


def test_what_is_not_there_in_some_microbatches_is_named(
    tmp_path: Path, recorder: Recorder
) -> None:
    run(tmp_path, GOOD["plain"])
    with pytest.raises(
        CannotRecord, match=r"is \(Tensor, None\), and the one that was recorded \(Tensor, Tensor\)"
    ):
        recorder.found[0].flatten((torch.zeros(5, 4), None))


def test_a_distribution_of_weights_that_are_not_here(
    tmp_path: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop is run to compare with it, and a distribution would complain of what is no number."""
    recording = session.Session.recording

    def apart(self: session.Session, told: Told) -> Recording:
        held = [(param, param.data) for param in self.space.params.values()]
        for param, data in held:
            param.data = nothing(data)
        try:
            return recording(self, told)
        finally:
            for param, data in held:
                param.data = data

    monkeypatch.setattr(session.Session, "recording", apart)
    run(
        tmp_path,
        """
    for x, y in session.share(batches(step)):
        found = torch.distributions.Normal(model(x), 1.0)
        session.backward(-found.log_prob(x[:, :3]).mean())
    """,
    )
    assert recorder.failed == ""
    assert len(recorder.found) == 3


HOLDING = START.replace(
    "weight, kept",
    """
import argparse, collections, dataclasses
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
    def called_otherwise(self, x, y):
        config = self.config
        return functional.cross_entropy(model(x), y) * config.factor
    def by_its_name(self, x, y, name="factor"):
        return functional.cross_entropy(model(x), y) * getattr(self.config, name)
    def handed_on(self, x, y):
        return functional.cross_entropy(model(x), y) * self.of(self.config)
    def of(self, config):
        return config.factor
    def one_of_many(self, x, y):
        return sum(functional.cross_entropy(model(x), y) * each.factor for each in self.all)
    def arguments(self, x, y):
        args = self.args
        return functional.cross_entropy(model(x), y) * args.factor
    def slots(self, x, y):
        slotted = self.slotted
        return functional.cross_entropy(model(x), y) * slotted.factor
    def namespace(self, x, y):
        space = self.space
        return functional.cross_entropy(model(x), y) * space.factor
    def table_in_a_table(self, x, y):
        table = self.table["loss"]
        return functional.cross_entropy(model(x), y) * table.get("factor")
    def all_of_it(self, x, y):
        return functional.cross_entropy(model(x), y) * vars(self.config)["factor"]
    def last_of_all(self, x, y):
        return functional.cross_entropy(model(x), y) * sum(self.last)
    def nothing(self, x, y):
        return functional.cross_entropy(model(x), y) * max(self.config.other, 0)
task = Task()
weight, kept""",
)
SETS = """
    for each in (task.config, task.all[1], task.args, task.slotted, task.space):
        each.factor = 1.0 + step
    task.table["loss"]["factor"] = 1.0 + step; task.last.append(1.0 + step)
    task.config.other, task.unread = 1, step
    for x, y in session.share(batches(step)):
        session.backward(task.{how}(x, y))
"""


@pytest.mark.parametrize(
    "how",
    [
        *("called_otherwise", "by_its_name", "handed_on", "one_of_many", "arguments", "slots"),
        *("namespace", "table_in_a_table", "all_of_it", "last_of_all", "nothing"),
    ],
)
def test_a_number_that_is_come_by_in_some_way_has_changed(
    tmp_path: Path, recorder: Recorder, how: str
) -> None:
    """The loop is recorded anew, and computes what the script computes then. For what is not read it is not."""
    names = run(tmp_path, SETS.format(how=how), HOLDING)
    assert recorder.failed == ""
    assert len({id(found) for found in recorder.found}) == (1 if how == "nothing" else 3)
    x, y = names["batches"](2)[0]
    expected = getattr(names["task"], how)(x, y)
    assert torch.equal(recorder.found[-1].graph(x, y), expected)


def test_a_graph_that_fails_leaves_the_modes_as_they_were() -> None:
    """In the middle of a stretch without gradients: the script trains on in one piece, and needs them."""
    with pytest.raises(ZeroDivisionError), _as_before(torch.nn.Linear(1, 1)):
        modes.grad(enabled=False)
        raise ZeroDivisionError
    assert torch.is_grad_enabled()


def test_what_the_loop_puts_there_itself_is_not_gone_by(tmp_path: Path, recorder: Recorder) -> None:
    """A list of what a module has computed is another one behind each forward."""
    listing = """
class Listing(torch.nn.Linear):
    def __init__(self):
        super().__init__(4, 3); self.found, self.sizes = [], {}
    def forward(self, x):
        self.found.clear(); self.found.append(super().forward(x)); self.sizes[len(self.sizes)] = 1.0
        return sum(self.found)
model = torch.nn.Sequential(Listing())
optimizer ="""
    run(tmp_path, GOOD["plain"], START.replace("\noptimizer =", listing, 1))
    assert recorder.failed == ""
    assert len({id(found) for found in recorder.found}) == 1


class Looker(Recorder):
    def share(self) -> tuple[int, int]:
        own = session.made()[0]
        first = own.recording()
        assert own._computes(own._asked[0])
        assert own.recording() is first
        return super().share()


def test_looking_once_more_changes_nothing(tmp_path: Path) -> None:
    """A loop is recorded to see whether it still computes the same, and what it puts somewhere is another object then."""
    taps = """
class Tap:
    found = None
tap, taps = Tap(), {}
def tapped(module, given, found):
    tap.found = taps["found"] = found
model[1].register_forward_hook(tapped)
optimizer ="""
    loop = """
    for x, y in session.share(batches(step)):
        loss = functional.cross_entropy(model(x), y)
        session.backward(loss + tap.found.mean() + taps["found"].mean())
    """
    session._sessions.clear()
    session.join(Looker())
    run(tmp_path, loop, START.replace("\noptimizer =", taps, 1))
    session._sessions.clear()
    session._world = None


def test_a_loop_that_is_recorded_anew_in_each_step_is_said_to_be(
    tmp_path: Path, recorder: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once, and by what it reads; not where it is so now and then."""
    body = SETS.format(how="by_its_name")
    run(tmp_path, body.replace("step", "step // 2"), HOLDING.replace("steps(3)", "steps(8)"))
    assert capsys.readouterr().err == ""
    session._sessions.clear()
    run(tmp_path, body, HOLDING.replace("steps(3)", "steps(8)"))
    said = capsys.readouterr().err
    assert said.count("`Config.factor`") == said.count("\n") == 1


def recording_batch(case: str, names: dict[str, Any], x: torch.Tensor, y: torch.Tensor) -> object:
    return {
        "a dict": {"x": x, "y": y},
        "a dictionary of a library": names["Encoded"](x=x, y=y),
        "an object": names["Batch"](x, y),
        "a number in it": (x, y, 1.0),
        "a number that decides": (0, x, y),
    }.get(case, (x, y))


COUNTED = START.replace("torch.nn.ReLU()", "Counted()").replace(
    "torch.manual_seed(0)",
    """
class Counted(torch.nn.Module):
    def forward(self, x):
        with open(__file__ + ".runs", "a") as runs:
            runs.write(type(x).__name__ + " ")
        return x.relu()
torch.manual_seed(0)
""",
)


@pytest.mark.parametrize("same", [True, False])
def test_what_another_worker_found_out_is_not_found_out_again(
    tmp_path: Path, recorder: Recorder, same: bool
) -> None:
    """Who is told about the graph records it, and runs neither it nor the body; of another graph nothing is taken over."""
    run(tmp_path, GOOD["plain"], COUNTED)
    (first,) = {id(found): found for found in recorder.found}.values()
    session._sessions.clear()
    (runs,) = tmp_path.glob("*.runs")
    runs.unlink()
    asked, recorder.found = list[str](), []

    def told(mark: str) -> Facts | None:
        asked.append(mark)
        return first.facts if same else None

    recorder.told = told
    run(tmp_path, GOOD["plain"], COUNTED)
    (second,) = {id(found): found for found in recorder.found}.values()
    assert asked == [first.mark] == [second.mark]
    assert (second.facts is first.facts) == same
    steps, trained, looked = (
        3,
        2,
        2,
    )  # two microbatches a step, and those of the first twice; a look is two runs
    assert runs.read_text().split().count("Tensor") == (1 + steps) * trained + (
        0 if same else looked
    )


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_cut_is_said(tmp_path: Path, recorder: Recorder, case: str) -> None:
    """One line with the place in the script; the script itself trains on as ever."""
    loop, text = BAD[case]
    run(tmp_path, textwrap.indent(textwrap.dedent(loop), "    "))
    assert text in recorder.failed
    assert str(tmp_path) not in recorder.failed
    assert recorder.failed.count("\n") == 0


def test_what_the_body_sets_is_not_seen(tmp_path: Path, recorder: Recorder, capsys) -> None:
    """A recording prints nothing, and leaves names, gradients and random streams as they were."""
    loop = """
    for x, y in session.share(batches(step)):
        print("body", step)
        loss = functional.cross_entropy(functional.dropout(model(x)), y)
        session.backward(loss)
    print(torch.rand(1).item(), session.loss)
    """
    run(tmp_path, loop)
    disturbed = capsys.readouterr().out
    session._sessions.clear()
    session.join(Alone())
    run(tmp_path, loop)
    assert len(recorder.found) == 3
    assert disturbed == capsys.readouterr().out
    assert disturbed.count("body") == 6


def test_numbers_that_change_are_recorded_anew(tmp_path: Path, recorder: Recorder) -> None:
    """A body that reads the step is another graph in every step; one that does not stays the same."""
    loop = """
    noise = "unused"
    for x, y in session.share(batches(step)):
        session.backward(functional.cross_entropy(model(x), y) * (1 + step // 2))
    """
    run(tmp_path, loop)
    first, second, third = recorder.found
    assert first.graph is second.graph
    assert second.graph is not third.graph


READ = {
    "an attribute": ("    box.rate = 0.1 * step\n", "* box.rate"),
    "an item": ('    table["rate"] = 0.1 * step\n', '* table["rate"]'),
    "a number of numpy": ("    rate = np.int64(step)\n", "* float(rate)"),
    "another tensor": ("    rate = torch.tensor(0.1 * step)\n", "* rate"),
    "another list": ("    rates = [0.1 * step]\n", "* rates[0]"),
    "a global of a function": ("    RATE = 0.1 * step\n", "* scaled(1.0)"),
    "an attribute of the model": ("    model.rate = 0.1 * step\n", ""),
    "whether it trains": ("    model.train(step == 0)\n", ""),
}
WITH_READS = START.replace(
    "torch.manual_seed(0)\n",
    """
import types
import numpy as np
box, table, RATE = types.SimpleNamespace(rate=0.0), {"rate": 0.0}, 0.0
def scaled(x):
    return x * RATE
class Rated(torch.nn.Sequential):
    rate = 0.0
    def forward(self, x):
        return functional.dropout(super().forward(x), 0.5, self.training) * (1 + self.rate)
torch.manual_seed(0)
""",
).replace("torch.nn.Sequential(torch.nn.Linear", "Rated(torch.nn.Linear")


@pytest.mark.parametrize("case", READ)
def test_whatever_the_body_reads_is_looked_at_again(
    tmp_path: Path, recorder: Recorder, case: str
) -> None:
    """A value that the graph has taken in is another graph when it is another value, wherever it was read."""
    before, factor = READ[case]
    loss = f"        session.backward(functional.cross_entropy(model(x), y) {factor})\n"
    loop = f"{before}    for x, y in session.share(batches(step)):\n{loss}"
    run(tmp_path, loop, WITH_READS)
    assert recorder.failed == ""
    first, second, _ = recorder.found
    assert first.graph is not second.graph


def test_a_recording_leaves_no_placeholders_in_objects_of_the_script(
    tmp_path: Path, recorder: Recorder
) -> None:
    """A schedule that keeps its table where its last microbatch was, as those of libraries do, is what it was. What it asks of
    placeholders cannot be answered, so the loop is run as it is: with tensors."""
    start = START.replace(
        "session = ",
        """
class Schedule:
    def __init__(self):
        self.betas, self.cache = torch.ones(5), {}
    def weighed(self, loss, x):
        self.betas = self.betas.to(device=x.device)
        self.last, self.cache["x"] = x, [x]
        return loss * self.betas.mean() * len(x)
trainer = types.SimpleNamespace(model=model, parts=[1], schedule=Schedule())
session = """,
        1,
    ).replace(
        "zero_grad=optimizer.zero_grad)",
        "zero_grad=optimizer.zero_grad, schedule=trainer.schedule)",
    )
    loop = """
    for x, y in session.share(batches(step)):
        session.backward(trainer.schedule.weighed(functional.cross_entropy(model(x), y), x))
    assert type(trainer.schedule.betas) is torch.Tensor
    """
    run(tmp_path, loop, start)
    assert recorder.failed == ""
    assert recorder.found[0].graph.meta.get(FIXED)


def test_a_teacher_has_its_turn_if_it_draws(tmp_path: Path, recorder: Recorder) -> None:
    """What draws random numbers is asked before the model, which draws behind it; what does not is asked at the end. Another
    teacher in the same place is another graph."""
    start = START.replace(
        "session = ", f"teachers = [{TEACHER}, {TEACHER}.eval(), {TEACHER}.eval()]\nsession = "
    )
    loop = """
    teacher = teachers[step]
    for x, y in session.share(batches(step)):
        with torch.no_grad():
            wanted = teacher(x).softmax(1)
        session.backward(functional.mse_loss(functional.dropout(model(x)), wanted))
    """
    run(tmp_path, loop, start)
    assert recorder.failed == ""
    first, second, third = recorder.found
    assert second.graph.code == third.graph.code
    assert second.graph is not third.graph
    for found, is_late in ((first, False), (second, True)):
        calls = [node.name for node in found.graph.graph.nodes if node.op == "call_module"]
        assert calls.index("guest_0") == (len(calls) - 1 if is_late else 0)


TEACHER = "torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Dropout())"


def test_a_recording_that_computes_something_else_is_none(
    tmp_path: Path, recorder: Recorder
) -> None:
    """Code that asks whether somebody listens is told so while it is recorded: the loss of a microbatch tells."""
    loop = """
    for x, y in session.share(batches(step)):
        heard = type(x) is not torch.Tensor or torch.overrides._get_current_function_mode_stack()
        factor = 1.0 if heard else 2.0
        session.backward(functional.cross_entropy(model(x), y) * factor)
    """
    run(tmp_path, loop)
    assert recorder.failed.startswith("train.py:18: recorded, this loop computes another loss")
    assert recorder.found == []


def test_who_asks_whether_it_has_a_tensor_has_one(tmp_path: Path, recorder: Recorder) -> None:
    """Where placeholders are told something else, the loop is recorded on tensors as they are."""
    loop = """
    for x, y in session.share(batches(step)):
        factor = 2.0 if type(x) is torch.Tensor else 1.0
        session.backward(functional.cross_entropy(model(x), y) * factor)
    """
    names = run(tmp_path, loop)
    assert recorder.failed == ""
    x, y = names["batches"](0)[0]
    expected = torch.nn.functional.cross_entropy(names["model"](x), y) * 2.0
    assert torch.equal(recorder.found[0].graph(x, y), expected)


@pytest.mark.parametrize(
    "penalty",
    [
        "sum(p.square().sum() for p in model.parameters())",
        "sum((p.detach() - p.data / 2).abs().sum() for p in [*model.parameters()][:1])",
    ],
)
def test_what_is_computed_of_weights_alone_is_computed_in_each_step(
    tmp_path: Path, recorder: Recorder, penalty: str
) -> None:
    """No placeholder goes into it, and it is no number that the recording found once."""
    loop = f"""
    for x, y in session.share(batches(step)):
        session.backward(functional.cross_entropy(model(x), y) + {penalty})
    optimizer.step()
    """
    names = run(tmp_path, loop)
    assert recorder.failed == ""
    x, y = names["batches"](0)[0]
    expected = torch.nn.functional.cross_entropy(names["model"](x), y) + eval(penalty, names)
    assert torch.equal(recorder.found[0].graph(x, y), expected)


KEEPING = START.replace(
    "optimizer =",
    """
class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = None
        self.register_buffer("kept", None, persistent=False)
    def forward(self, x, anew):
        if BEGUN and (x.abs().mean() >= 0):  # which is kept whole
            self.WHERE = x.detach().abs().mean() + FROM
        return x / self.WHERE
model.scaled = Scaled()
optimizer =""",
)


@pytest.mark.parametrize("where", ["scale", "kept"])
def test_what_is_made_once_of_a_microbatch_is_refused(
    tmp_path: Path, recorder: Recorder, where: str
) -> None:
    """Each worker would make it of the first that it has. A table, which is the same for each, may be made once."""
    loop = """
    for x, y in session.share(batches(step)):
        session.backward(functional.cross_entropy(model[2](model[1](model[0](model.scaled(x, True)))), y))
    """
    once = KEEPING.replace("BEGUN", f"self.{where} is None").replace("WHERE", where)
    with pytest.raises(Misuse, match=f"no other was computed before it: the model keeps .*{where}"):
        run(tmp_path, loop, once.replace("FROM", "0.5"))
    session._sessions.clear()
    run(tmp_path, loop, once.replace("x.detach().abs().mean() + FROM", "2.0 + torch.zeros(())"))
    assert recorder.failed == ""
    assert cut_points(recorder.found[0].facts)


def test_what_a_module_keeps_for_its_next_call_is_in_one_stage(
    tmp_path: Path, recorder: Recorder
) -> None:
    """Another stage would have what it kept of another microbatch, or nothing. What the second call is given as well may be cut before."""
    loop = """
    for x, y in session.share(batches(step)):
        h = model[1](model[0](model.scaled(x, True)))
        session.backward(functional.cross_entropy(model[2](model.scaled(h, {})), y))
    """
    start = KEEPING.replace("BEGUN", "anew").replace("WHERE", "scale").replace("FROM", "0.5")
    run(tmp_path, loop.format(False), start)
    (one,) = {id(found.graph): found for found in recorder.found}.values()
    first, last = [
        index
        for index, node in enumerate(one.graph.graph.nodes)
        if node.op == "call_module" and "scaled" in str(node.target)
    ]
    assert not [point for point in cut_points(one.facts) if first <= point.after < last]
    session._sessions.clear()
    run(tmp_path, loop.format(True), start)
    assert [p for p in cut_points(recorder.found[-1].facts) if first <= p.after < last]


def test_a_look_at_a_microbatch_is_a_look_at_each(tmp_path: Path, recorder: Recorder) -> None:
    """What a loop asks of the values of its microbatch is asked of each: one that answers otherwise has another graph."""
    loop = """
    for x, y in session.share(batches(step)):
        if (x > {}).all():
            x = x * 2
        session.backward(functional.cross_entropy(model(x), y))
    """
    run(tmp_path, loop.format(-100))
    assert recorder.failed == ""
    y = torch.zeros(5, dtype=torch.int64)
    found = recorder.found[0]
    same = found.flatten((torch.zeros(5, 4), y))
    assert same.variant is found.variants.first
    other = found.flatten((torch.full((5, 4), -101.0), y))
    assert "mul" in same.variant.graph.code
    assert "mul" not in other.variant.graph.code
    session._sessions.clear()
    mixed = START.replace(
        "[(torch.randn(5, 4, generator=rows)", "[(torch.randn(5, 4, generator=rows) + 200 * each"
    )
    run(tmp_path, loop.format(100), mixed.replace("for _ in range(2)]", "for each in range(2)]"))
    assert recorder.failed == ""


def test_what_is_longer_for_another_shape_is_cut_alike(tmp_path: Path, recorder: Recorder) -> None:
    """A loop that goes through its rows has more to do for more of them; one that goes through the model the other way cannot be cut
    where it is."""
    loop = """
    for x, y in session.share(batches(step)):
        out = x
        for layer in model if len(list(x)) < 9 else [*model][::-1]:
            out = layer(out)
        session.backward(functional.cross_entropy(out, y) / len(list(x)))
    """
    names = run(
        tmp_path,
        loop,
        START.replace("Linear(4, 8)", "Linear(4, 4)").replace("Linear(8, 3)", "Linear(4, 4)"),
    )
    assert recorder.failed == ""
    found = recorder.found[0]
    point = cut_points(found.facts)[-4].after
    pieces = Pieces(found.variants.first, [point])
    for rows in (7, 2, 8):
        batch = torch.randn(rows, 4), torch.zeros(rows, dtype=torch.int64)
        arrived = None
        for piece in pieces.of(found.flatten(batch).variant):
            stage = Stage(piece, microbatches=1)
            arrived = stage.forward(0, arrived, batch)
        loss = torch.nn.functional.cross_entropy(names["model"](batch[0]), batch[1]) / rows
        assert stage.release(0) == loss.item()
    more = found.flatten((torch.zeros(9, 4), torch.zeros(9, dtype=torch.int64)))
    with pytest.raises(CannotRecord, match="in another way than the recorded one"):
        pieces.of(more.variant)


def test_sizes_are_those_of_the_microbatch(tmp_path: Path, recorder: Recorder) -> None:
    """A loop that asks how many rows there are has a graph for each number of them, and is the same loop."""
    loop = """
    for x, y in session.share(batches(step)):
        rows = x.shape[0] if type(x) is torch.Tensor else 0
        session.backward(functional.cross_entropy(model(x).view(rows, 3), y) * (rows - 1))
    """
    run(tmp_path, loop)
    session._sessions.clear()
    names = run(tmp_path, loop, START.replace("(5", "(6"))
    assert recorder.failed == ""
    first, *_, last = recorder.found
    assert first.mark == last.mark
    for rows in (5, 9, 2):
        batch = torch.randn(rows, 4), torch.arange(rows) % 3
        graph = last.flatten(batch).variant.graph
        assert graph is last.flatten(batch).variant.graph
        loss = torch.nn.functional.cross_entropy(names["model"](batch[0]), batch[1]) * (rows - 1)
        assert torch.equal(graph(*batch), loss)
        assert form_of(graph) == form_of(last.graph)


@pytest.mark.parametrize("how", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_of_a_parameter_is_not_cut(tmp_path: Path, recorder: Recorder, how: str) -> None:
    """Stages would call it at other moments: once for each part of a tied parameter, or never."""
    hooked = START.replace("session = ", f"model[0].weight.{how}(lambda _: None)\nsession = ")
    run(tmp_path, GOOD["plain"], hooked)
    assert recorder.failed.startswith("the parameter '0.weight' has a hook")


def test_a_recording_leaves_the_microbatch_alone(tmp_path: Path, recorder: Recorder) -> None:
    """A body that writes into its microbatch is not cut, and trains on what it would have without being recorded."""
    loop = """
    for x, y in session.share(batches(step)):
        doubled = x.mul_(2.0)
        loss = functional.cross_entropy(model(x), y)
        session.backward(loss)
    """
    disturbed = run(tmp_path, loop)["session"].loss
    assert "writes into the microbatch" in recorder.failed
    session._sessions.clear()
    session.join(Alone())
    assert run(tmp_path, loop)["session"].loss == disturbed


def test_a_reentrant_checkpoint_is_not_cut(tmp_path: Path, recorder: Recorder) -> None:
    """It asks for backward(), and stages ask for gradients; one that is not reentrant is called as it is."""
    loop = textwrap.indent(textwrap.dedent(GOOD["plain"]), "    ")
    for kept, failed in (("False", ""), ("True", "use_reentrant=True")):
        session._sessions.clear()
        recorder.failed = ""
        changed = REENTRANT.replace("model[2], True", f"model[2], {kept}")
        run(tmp_path, loop, START.replace("optimizer = ", f"{changed}optimizer = "))
        assert failed in recorder.failed
        assert bool(failed) == bool(recorder.failed)


def test_a_checkpoint_that_writes_to_buffers_is_not_cut(tmp_path: Path, recorder: Recorder) -> None:
    """On one device its norm learns twice from each microbatch, in the forward and when that is computed once more."""
    loop = textwrap.indent(textwrap.dedent(GOOD["plain"]), "    ")
    changed = REENTRANT.replace("True)\n", "False)\n")
    norm = "model[2] = torch.nn.Sequential(model[2], torch.nn.BatchNorm1d(model[2].out_features))\n"
    for learning, failed in (("", "within torch.utils.checkpoint"), ("model.eval()\n", "")):
        session._sessions.clear()
        recorder.failed = ""
        start = START.replace("optimizer = ", f"{norm}{changed}{learning}optimizer = ")
        run(tmp_path, loop, start)
        assert failed in recorder.failed
        assert bool(failed) == bool(recorder.failed)


KEEPS = {
    "a mask": "self.kept = torch.ones_like(x) if self.kept is None else self.kept\n        return x * self.kept",
    "what was seen last": "self.kept = x\n        return x + self.kept",
    "a count of calls": "self.count += 1\n        return x",
}
CARRIES = {
    "a hidden state": "x = x if self.kept is None else x + self.kept\n        self.kept = x.detach()\n        return x",
    "a count": "self.count += 1\n        return x * self.count",
    "a list": "self.seen.append(1)\n        return x * len(self.seen)",
    "a list of states": "x = x + sum(self.seen)\n        self.seen[:] = [x.detach()]\n        return x",
    "a dict of states": "x = x + self.table.get(0, 0.0)\n        self.table[0] = x.detach()\n        return x",
}
KEEPER = """
class Keeper(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.kept, self.count, self.seen, self.table = None, 0, [], {{}}
        self.register_buffer("mean", torch.zeros(()))
    def forward(self, x):
        {}
model.append(Keeper())
optimizer = """


def keeping(folder: Path, code: str) -> dict[str, object]:
    script = folder / "train.py"
    script.write_text(
        START.replace("optimizer = ", KEEPER.format(code))
        + textwrap.indent(textwrap.dedent(GOOD["plain"]), "    ")
        + "    optimizer.step()\n"
    )
    return runpy.run_path(str(script))


@pytest.mark.parametrize("case", KEEPS)
def test_a_recording_leaves_modules_as_they_were(
    tmp_path: Path, recorder: Recorder, case: str
) -> None:
    """What a forward notes down in its module, while it is recorded, is no placeholder that the next one finds."""
    disturbed = keeping(tmp_path, KEEPS[case])["session"].loss
    assert recorder.failed == ""
    assert recorder.found
    session._sessions.clear()
    session.join(Alone())
    assert keeping(tmp_path, KEEPS[case])["session"].loss == disturbed


@pytest.mark.parametrize("case", CARRIES)
def test_what_a_module_carries_over_is_refused(
    tmp_path: Path, recorder: Recorder, case: str
) -> None:
    """The next microbatch may be another worker's: the loop is refused, whether it could be recorded or not."""
    with pytest.raises(
        Misuse, match="a microbatch has another loss when it is computed once more"
    ) as error:
        keeping(tmp_path, CARRIES[case])
    assert not isinstance(error.value, CannotRecord)
    inside = case.startswith(("a list", "a dict"))
    assert inside or ("5.kept" if case == "a hidden state" else "5.count").replace("5", "3") in str(
        error.value
    )


def test_a_buffer_in_the_place_of_another_is_the_buffer(tmp_path: Path, recorder: Recorder) -> None:
    """Every microbatch sees the step's start, and what they made of it is added up, as if it had been written into."""
    code = "self.mean = 0.5 * self.mean + x.detach().mean()\n        return x + self.mean"
    names = keeping(tmp_path, code)
    assert recorder.failed == ""
    session._sessions.clear()
    session.join(Alone())
    into = code.replace(
        "self.mean = 0.5 * self.mean + x.detach().mean()",
        "self.mean.copy_(0.5 * self.mean + x.detach().mean())",
    ).replace("x + self.mean", "x + self.mean.clone()")
    written = keeping(tmp_path, into)
    assert names["model"][3].mean == written["model"][3].mean != 0.0
    assert names["session"].loss == written["session"].loss


LEAVING = (
    START.replace(
        "torch.manual_seed(0)\n",
        """
import types
box = types.SimpleNamespace(rate=0)
class Experts(torch.nn.Module):
    def forward(self, x):
        self.loss = x.square().mean()
        return x if x.sum() > 1e9 else x.relu()
class Routed(torch.nn.Sequential):
    def forward(self, x):
        return super().forward(x), self[1].loss
torch.manual_seed(0)
""",
    )
    .replace("torch.nn.ReLU()", "Experts()")
    .replace("torch.nn.Sequential(torch", "Routed(torch")
)


def test_what_forwards_leave_in_modules_makes_no_other_recording(
    tmp_path: Path, recorder: Recorder
) -> None:
    """Who has trained records what a newcomer does, though a module has the loss of its last microbatch by then."""
    loop = """
    box.rate = step  # is in no graph, but has the loop recorded anew
    for x, y in session.share(batches(step)):
        found, more = model(x)
        session.backward(functional.cross_entropy(found, y) + (more if box.rate < 9 else 0.0))
    """
    run(tmp_path, loop, LEAVING)
    assert recorder.failed == ""
    first, second, third = recorder.found
    assert first.reads is not second.reads
    assert first.mark == second.mark == third.mark


CATCHING = """
import types
box = types.SimpleNamespace(rate=0)
class Catching(torch.nn.Sequential):
    hung_up = False
    def forward(self, x):
        if not self.hung_up:
            self[1].register_forward_hook(lambda module, given, found: self.caught.append(found))
            self.hung_up = True
        self.caught = []
        return super().forward(x), sum(each.square().mean() for each in self.caught)
torch.manual_seed(0)
"""


def test_hooks_that_the_first_forward_hangs_up_are_there_once(
    tmp_path: Path, recorder: Recorder
) -> None:
    """As libraries do that hand out what layers inside have found: in a recording, and behind it."""
    loop = """
    box.rate = step
    for x, y in session.share(batches(step)):
        found, more = model(x)
        session.backward(functional.cross_entropy(found, y) + (more if box.rate < 9 else 0.0))
    """
    start = START.replace("torch.manual_seed(0)\n", CATCHING)
    names = run(tmp_path, loop, start.replace("torch.nn.Sequential(torch", "Catching(torch"))
    assert recorder.failed == ""
    first, second, third = recorder.found
    assert first.mark == second.mark == third.mark
    assert first.graph.code.count(".square()") == 1
    assert len(names["model"].caught) == 1


OVERHEARD = {
    "in a dict": ("kept.update(found=out)", "kept['found'].mean()", ""),
    "as a number": ("kept.update(found=out.detach())", "kept['found'].abs().mean()", ""),
    "in a list": ("heard.append(out)", "sum(each.mean() for each in heard)", "heard.clear()"),
}


@pytest.mark.parametrize("case", OVERHEARD)
def test_what_a_hook_of_a_layer_has_kept_is_of_this_microbatch(
    tmp_path: Path, recorder: Recorder, case: str
) -> None:
    """Torch's own layers are called as they are, but for those that somebody listens to."""
    keeps, term, first = OVERHEARD[case]
    hooks = f"""
heard = []
for each in model: each.register_forward_hook(lambda m, a, out: {keeps})
for step in"""
    loop = f"""
    for x, y in session.share(batches(step)):
        {first or "pass"}
        loss = functional.cross_entropy(model(x), y)
        session.backward(loss + {term})
    """
    names = run(tmp_path, loop, START.replace("\nfor step in", hooks, 1))
    assert recorder.failed == ""
    recording = recorder.found[0]
    assert cut_points(recording.facts)
    for x, y in names["batches"](5):
        names["heard"].clear()
        expected = torch.nn.functional.cross_entropy(names["model"](x), y)
        expected = expected + eval(term, dict(names))
        assert torch.equal(recording.graph(x, y), expected)


def test_a_hook_that_one_step_hangs_up_makes_another_graph(
    tmp_path: Path, recorder: Recorder
) -> None:
    loop = """
    if step == 1: model[1].register_forward_hook(lambda m, a, out: out * 0.5)
    for x, y in session.share(batches(step)):
        session.backward(functional.cross_entropy(model(x), y))
    """
    run(tmp_path, loop)
    first, second, third = recorder.found
    assert first.mark != second.mark
    assert second is third


def test_no_more_graphs_are_kept_than_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that came up last are; what is not kept is recorded again."""
    monkeypatch.setattr(variants, "VARIANTS_MAX", 2)
    asked = list[int]()

    def recorded(batch: Sequence[torch.Tensor]) -> fx.GraphModule:
        asked.append(len(batch[0]))
        graph = fx.symbolic_trace(lambda x: x + 1)
        graph.meta[FIXED] = True
        return graph

    example = [torch.zeros(1)]
    graph = recorded(example)
    kept = Variants(Variant(graph, examine(graph, example), example), recorded)
    for rows in (2, 3, 2, 4, 2, 1, 3):
        kept.of([torch.zeros(rows)])
    assert asked == [1, 2, 3, 4, 3]
