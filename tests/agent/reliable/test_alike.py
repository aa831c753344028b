"""Workers that do not do the same: found out by what each says of its steps, before the numbers are anybody's guess."""

import functools
import sys
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from crews import Crew, until

from agent.messages import WorkerFailed
from agent.protocol import Seen
from agent.reliable.alike import STEPS_MAX, Alike
from agent.script.gone_by import GoneBy
from agent.script.seen import Eyes
from agent.source.found import Caller

LIST = [torch.arange(6.0).view(2, 3), torch.ones(4, 3)]


def seen(step: int, batches: tuple[float, ...] = (), change: tuple[float, ...] = ()) -> Seen:
    return Seen(step=step, batches=batches, change=change)


def test_the_same_is_alike() -> None:
    """Up to what machines round differently; whoever could not look says nothing against others."""
    alike = Alike()
    assert alike.hear("a", [seen(0, (1.0, 0.0), (0.25, -1.0))]) == ""
    assert alike.hear("b", [seen(0, (1.0000001, 0.0), (0.2501, -1.0))]) == ""
    assert alike.hear("c", [seen(0)]) == ""


def test_other_microbatches_are_named() -> None:
    """The step and both workers; what was said of earlier steps counts as well, for those who go through them again."""
    alike = Alike()
    for step in range(5):
        alike.hear("a", [seen(step, (float(step), 7.0))])
    assert "step 3: b has other microbatches than a" in alike.hear(
        "b", [seen(2, (2.0, 7.0)), seen(3, (9.0, 7.0)), seen(4, (4.0, 7.0))]
    )


def test_a_model_that_became_another_is_named() -> None:
    """By the step whose end it was; a difference that is small beside the change is none."""
    alike = Alike()
    alike.hear("a", [seen(4)])
    alike.hear("b", [seen(4, (), (1.0, 0.001))])
    assert alike.hear("c", [seen(4, (), (1.0, 0.0012))]) == ""
    assert "step 3: behind session.share(...)" in alike.hear("d", [seen(4, (), (0.5, 0.001))])


def test_machines_of_one_kind_round_alike() -> None:
    """A difference that another machine's rounding would explain is one there: an average that began anew, and weighs
    little. What sums in another order make of it is none."""
    one = msgspec.structs.replace(seen(4, (1.0,), (0.01, 0.02)), machine="x", grain=1e-8)
    one = msgspec.structs.replace(one, goes_by={"beta": 0.5})
    other = msgspec.structs.replace(one, change=(0.010001, 0.02))
    beside = msgspec.structs.replace(one, change=(0.01 + 5e-8, 0.02))
    alike = Alike()
    assert [alike.hear("a", [each]) for each in (one, beside)] == ["", ""]
    assert "step 3: behind session.share(...)" in alike.hear("b", [other])
    assert "has other microbatches" in alike.hear(
        "b", [msgspec.structs.replace(one, batches=(1.0002,))]
    )
    assert "`beta` goes into the loop" in alike.hear(
        "b", [msgspec.structs.replace(one, goes_by={"beta": 0.5001})]
    )
    assert alike.hear("c", [msgspec.structs.replace(other, machine="y")]) == ""


def test_what_is_remembered_is_bounded() -> None:
    """The oldest goes first."""
    alike = Alike()
    for step in range(STEPS_MAX + 1):
        alike.hear("a", [seen(step, (1.0,))])
    assert alike.hear("b", [seen(0, (2.0,))]) == ""
    assert alike.hear("b", [seen(1, (2.0,))]) != ""


def test_eyes_see_a_change_and_forget_what_was_taken_over() -> None:
    """What a step has done to a parameter is told in the next; nothing after the state came from others."""
    model = torch.nn.Linear(8, 1, bias=False)
    param = model.weight.data.zero_()
    eyes = Eyes([model])
    eyes.look(0, LIST)
    param += 2.0
    eyes.look(1, LIST)
    assert [one.change for one in eyes.seen] == [(), (2.0,) * 4]
    assert eyes.seen[0].batches == eyes.seen[1].batches == (4.0, 3.0, 1.0, 1.0, 1.0, 1.0)
    eyes.forget()
    param += 2.0
    eyes.look(2, LIST)
    assert [one.change for one in eyes.seen] == [()]


class Scaled(torch.nn.Linear):
    """Goes by a number, and counts what it is asked."""

    def __init__(self) -> None:
        super().__init__(3, 1)
        self.scale, self.calls, self.note = 1.0, 0, ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * self.scale


def test_eyes_see_what_a_script_has_told_a_module() -> None:
    """As long as it is not what it was: what the forward changes, or nobody goes by, is not meant."""
    model = torch.nn.Sequential(torch.nn.Dropout(0.1), Scaled())
    eyes = Eyes([model])
    model(LIST[1])
    model[0].p, model[1].scale, model[1].note = 0.2, 0.5, "later"
    eyes.look(0, LIST)
    model[1].scale = 1.0
    eyes.look(1, LIST)
    assert [one.told for one in eyes.seen] == [("0.p = 0.2", "1.scale = 0.5"), ("0.p = 0.2",)]
    model[0].register_forward_hook(functools.partial(print, sep=""))  # as a library does
    hung = model[0].register_forward_hook(lambda *_: None)
    eyes.look(2, LIST)
    assert eyes.seen[2].told == ("0.p = 0.2", "0 with 1 forward hook")
    hung.remove()
    eyes.look(3, LIST)
    assert eyes.seen[3].told == ("0.p = 0.2",)
    alike = Alike()
    alike.hear("a", eyes.seen)
    assert "step 1: 0.p = 0.2 in the model on a, and not on b" in alike.hear(
        "b", [msgspec.structs.replace(eyes.seen[1], told=())]
    )


def test_what_differs_in_the_first_step_has_no_seed_or_no_order() -> None:
    """Nothing was drawn or counted from step to step by then."""
    for step, words in ((0, "torch.manual_seed"), (1, "whoever joins later begins that anew")):
        alike = Alike()
        alike.hear("a", [seen(step, (1.0,))])
        assert words in alike.hear("b", [seen(step, (2.0,))])


class Annealed(torch.nn.Linear):
    """Changes in methods of its own what its forward goes by."""

    def __init__(self) -> None:
        super().__init__(3, 1)
        self.tau, self.row, self.began_s = 2.0, 0, 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / self._factor() * self.row

    def _factor(self) -> float:
        return self.tau

    def anneal(self) -> None:
        self.tau, self.began_s = self.tau / 2, time.monotonic()

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        self.row = len(x)
        return self(x).sum()

    def took_s(self) -> float:
        return time.monotonic() - self.began_s


def test_eyes_see_what_a_model_changes_behind_the_loop() -> None:
    """What it changes in the loop, and what its forward does not go by, differs between workers, and is not meant."""
    model = Annealed()
    eyes = Eyes([model])
    for step in range(2):
        eyes.look(step, LIST)
        model.loss(LIST[1])
        eyes.look_again()
        model.anneal()
    assert [one.told for one in eyes.seen] == [(), ("tau = 1.0",)]


def test_eyes_see_hooks_on_gradients() -> None:
    """Who joins later has them as the script begins with them."""
    model = torch.nn.Linear(3, 1)
    model.bias.register_hook(lambda grad: grad)
    eyes = Eyes([model])
    eyes.look(0, LIST)
    model.weight.register_hook(lambda grad: grad / 2)
    model.bias.register_post_accumulate_grad_hook(lambda param: None)
    eyes.look(1, LIST)
    told = ("weight with 1 hook on its gradient", "bias with 2 hooks on its gradient")
    assert [one.told for one in eyes.seen] == [(), told]


class Schedule:
    def __init__(self) -> None:
        self.beta, self.began_s, self.loss = 1.0, 0.0, torch.nn.MSELoss()

    def of(self, x: torch.Tensor, others: list[float]) -> torch.Tensor:
        self.began_s = time.monotonic()
        return self.loss(x, x) * self.beta * sum(others) * self.began_s


def shared(
    schedule: Schedule, others: list[float], trained: torch.nn.Module | None = None
) -> dict[str, float]:
    """What a loop over microbatches in here goes by."""

    def share(_: object) -> list[torch.Tensor]:
        frame = sys._getframe(1)
        found.append(GoneBy(model).now(Caller(frame, frame.f_lasti)))
        return []

    session, model, found = (
        SimpleNamespace(share=share),
        trained or torch.nn.Linear(1, 1),
        list[Any](),
    )
    for x in session.share([]):
        session.backward(schedule.of(model(x), others))
    return found[0]


def test_what_a_loop_goes_by_is_told_by_its_names() -> None:
    """Numbers, and which loss it is, wherever the code reads them; no times, which are others everywhere."""
    schedule = Schedule()
    before = shared(schedule, [1.0, 2.0])
    assert before["self.beta in Schedule.of"] == 1.0
    assert before["others[1]"] == 2.0
    assert not any("began_s" in name for name in before)
    schedule.beta, schedule.loss = 0.5, torch.nn.L1Loss()
    after = shared(schedule, [1.0, 3.0])
    assert {name for name in before if before[name] != after[name]} == {
        "others[1]",
        "self.beta in Schedule.of",
        "self.loss in Schedule.of",
    }


def test_what_a_loss_weighs_with_is_told() -> None:
    """The session does not know of it, so it is in no state."""
    schedule, loss = Schedule(), torch.nn.CrossEntropyLoss(weight=torch.ones(3))
    schedule.loss = loss
    before = shared(schedule, [])
    loss.weight[0], loss.label_smoothing = 3.0, 0.1
    after = shared(schedule, [])
    assert {name for name in before if before[name] != after[name]} == {
        "self.loss.label_smoothing in Schedule.of",
        "self.loss.weight[3] in Schedule.of",
    }


class Smoothed(torch.nn.Module):
    """Leaves the target that it has made, and its parts, where they can be seen."""

    def __init__(self) -> None:
        super().__init__()
        self.target, self.part, self.shrunk = None, 0.0, torch.ones(3)

    def forward(self, given: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        target = wanted.detach() * 0.9
        if wanted.sum() < 1e9:
            self.target = target
        self.part = float((given - target).square().mean())
        self.shrunk = self.shrunk * 0.9
        return (given - target).square().mean() * self.shrunk.mean() + self.part


def test_what_a_loss_leaves_of_a_microbatch_is_not_told() -> None:
    """Whoever has another microbatch has another. What a loss makes of what it was is told."""
    schedule = Schedule()
    schedule.loss = Smoothed()
    before = shared(schedule, [])
    schedule.loss(torch.ones(2), torch.ones(2))
    after = shared(schedule, [])
    changed = {name for name in before.keys() | after if before.get(name) != after.get(name)}
    assert changed == {"self.loss.shrunk[3] in Schedule.of"}


class Masked(torch.nn.Linear):
    """Goes by tensors that are not saved; of what its forward leaves there others have another."""

    def __init__(self) -> None:
        super().__init__(3, 1)
        self.mask, self.last, self.scale, self.act = torch.ones(3), torch.ones(3), None, torch.tanh
        self.register_buffer("table", torch.ones(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x * self.mask * self.table * self.last
        return super().forward(self.act(self.last) * (self.scale or 1.0))


def test_tensors_that_are_in_no_state_are_told() -> None:
    """A mask that is a plain attribute, and a buffer that is not saved."""
    model = Masked()
    before = shared(Schedule(), [], model)
    model.mask[0], model.table[0], model.last = 0.0, 0.0, torch.zeros(3)
    after = shared(Schedule(), [], model)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"mask[3]", "table[3]"}


class Patched(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def test_which_code_modules_run_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set on one of them or on their class; what is put back as it was, or is made anew of the same lines, is the same."""
    model = torch.nn.Sequential(Patched(3, 1), torch.nn.ReLU(), Patched(1, 1))
    before, first, found = shared(Schedule(), [], model), model[0].forward, list[set[str]]()

    def look() -> None:
        after = shared(Schedule(), [], model)
        assert {*after} == {*before}
        found.append({name for name in before if before[name] != after[name]})

    model[0].forward = first
    look()
    for _ in range(2):
        model[2].forward = lambda x: x
        look()
    del model[2].forward
    model[0].forward = functools.partial(first)
    look()
    del model[0].forward
    monkeypatch.setattr(torch.nn.ReLU, "forward", torch.nn.Tanh.forward)
    look()
    assert found == [
        set(),
        {"Patched.forward"},
        {"Patched.forward"},
        {"Patched.forward"},
        {"ReLU.forward"},
    ]


def test_a_forward_that_the_first_forward_has_set_is_not_told() -> None:
    """As libraries do: whoever is new has not come by yet."""
    model = torch.nn.Sequential(Patched(3, 1))
    by, caller = GoneBy(model), Caller(frame := sys._getframe(), frame.f_lasti)
    by.begin()
    model[0].forward = torch.relu
    by.look_again()
    assert {*by.now(caller)} == {"Sequential.forward"}


def test_what_modules_hand_each_other_is_not_told() -> None:
    """A mask that lies in its microbatch goes to a module by an attribute: it is that of this worker's last one."""
    model = Masked()
    by, caller = GoneBy(model), Caller(frame := sys._getframe(), frame.f_lasti)
    by.begin()
    model.mask = torch.zeros(3)  # as a module around it does before it calls it
    by.look_again()
    assert {*by.now(caller)} == {"table[3]", "Masked.forward"}
    by.begin()
    model.table[0] = 0.0
    by.look_again()
    assert {*by.now(caller)} == {"table[3]", "Masked.forward"}


def test_eyes_see_another_function_and_what_was_nothing_before() -> None:
    """By its name, and by what it is now."""
    model = Masked()
    eyes = Eyes([model])
    model.act, model.scale = torch.relu, 0.5
    eyes.look(0, LIST)
    assert sorted(eyes.seen[0].told) == ["act = _VariableFunctionsClass.relu", "scale = 0.5"]


def test_it_is_looked_at_where_somebody_may_be_new() -> None:
    """In the first step of a layout, and in every eighth; alone never, and it takes no time."""
    told = list[tuple[int, str]]()
    by = GoneBy(torch.nn.Linear(1, 1))
    beta, session = 1.0, SimpleNamespace()

    def share(where: tuple[int, int]) -> list[torch.Tensor]:
        caller = Caller(frame := sys._getframe(1), frame.f_lasti)
        step, generation = where
        told.extend([(step, "at")] * bool(by.at(caller, step, generation)))
        told.extend([(step, "entering")] * bool(by.entering(caller, generation)))
        return []

    session.share = share
    for step, generation in enumerate([-1, -1, 3, 3, 3, 4, 4, 4, 4, 4]):
        for _ in session.share((step, generation)):
            assert beta
    assert told == [(2, "entering"), (5, "entering"), (8, "at")]


def test_a_name_that_stands_for_another_object_is_no_other_number() -> None:
    """Settings that are made anew in each step: what they have in this step is told, not what those of the first step had."""
    session, found = SimpleNamespace(), list[dict[str, float]]()
    by = GoneBy(torch.nn.Linear(1, 1))

    def share(_: object) -> list[torch.Tensor]:
        frame = sys._getframe(1)
        found.append(by.now(Caller(frame, frame.f_lasti)))
        return []

    session.share = share
    for step in range(3):
        schedule = Schedule()
        schedule.beta = float(step)
        for x in session.share([]):
            session.backward(Schedule.of(schedule, x, np.ones(2)))
    assert [each["self.beta in Schedule.of"] for each in found] == [0.0, 1.0, 2.0]


def test_who_goes_by_another_number_is_told() -> None:
    """By its name, and what to do."""
    alike, eyes = Alike(), [Eyes([]), Eyes([])]
    for each in eyes:
        each.look(7, LIST)
    eyes[0].goes_by({"cfg.beta": 0.5, "cfg.one": 1.0})
    eyes[1].goes_by({"cfg.beta": 1.0, "cfg.other": 1.0})
    assert alike.hear("a", eyes[0].seen) == ""
    said = alike.hear("b", eyes[1].seen)
    assert said.startswith(
        "step 7: `cfg.beta` goes into the loop over session.share(...), and is another on b than on a."
    )


def test_eyes_see_rows_and_words() -> None:
    """Microbatches may be numbers of rows, and texts."""
    one, other, alike = Eyes([]), Eyes([]), Alike()
    one.look(0, [[1, 2], [4, 7]])
    other.look(0, [[1, 2], [7, 4]])
    one.look(1, ["a", "b"])
    other.look(1, ["a", "c"])
    for step in range(2):
        assert alike.hear("a", [one.seen[step]]) == ""
        assert f"step {step}: b has other microbatches" in alike.hear("b", [other.seen[step]])


def test_eyes_load_nothing() -> None:
    """A sequence of the script's own, which may read its microbatches when it is asked, is not asked."""

    class Lazy:
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> torch.Tensor:
            raise AssertionError("nobody needs this one")

    eyes = Eyes([])
    eyes.look(0, Lazy())
    assert eyes.seen[0].batches == ()


SCRIPT = """
import functools, itertools, sys, time, pathlib
import numpy as np
import torch
from agent import Session
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = Session(model, optimizer, microbatches=2)
class Weights:
    def __init__(self):
        self.beta = 1.0
weights = Weights()
again, streams = functools.partial(next, itertools.count(1)), [np.random.default_rng(0)]
hold = pathlib.Path(sys.argv[1])
def batches(step):
    while step == 4 and hold.exists():
        time.sleep(0.01)
    return [torch.full((2, 4), step + 1.0 + i) for i in range(2)]
for step in session.steps(9):
    count = again()
    for x in session.share(batches(step)):
        session.backward(weights.beta * model(x).square().mean() / 100)
    optimizer.step()
"""
UNLIKE = {
    "a mode": (
        "    optimizer.step()",
        "    optimizer.step()\n    if step == 2: model.eval()",
        "modules are in training mode on",
    ),
    "what a module goes by": (
        "    optimizer.step()",
        "    optimizer.step()\n    if step == 2: model[1].p = 0.5",
        "1.p = 0.5 in the model on",
    ),
    "what overhears a module": (
        "    optimizer.step()",
        "    optimizer.step()\n    if step == 2: model[1].register_forward_hook(lambda m, a, out: out * 0.5)",
        "set it anew in every step, as it depends on the step",
    ),
    "what overhears a gradient": (
        "    optimizer.step()",
        "    optimizer.step()\n    if step == 2: model[0].bias.register_hook(lambda grad: grad / 2)",
        "0.bias with 1 hook on its gradient in the model on",
    ),
    "what a module runs": (
        "    optimizer.step()",
        "    optimizer.step()\n    if step == 2: model[1].forward = torch.relu",
        "`Dropout.forward` goes into the loop",
    ),
    "what a class runs": (
        "    optimizer.step()",
        "    optimizer.step()\n    if step == 2: torch.nn.Dropout.forward = lambda self, x: x * 2",
        "`Dropout.forward` goes into the loop",
    ),
    "what an object of one's own has": (
        "    optimizer.step()",
        "    optimizer.step()\n    if step == 2: vars(weights).update(beta=0.5)",
        "set it anew in every step, as it depends on the step",
    ),
    "a stream that goes on": (
        "step + 1.0 + i) for",
        "streams[0].uniform()) for",
        "has other microbatches than",
    ),
    "a count": (
        "    optimizer.step()",
        "    optimizer.param_groups[0]['lr'] = 0.1 / count\n    optimizer.step()",
        "behind session.share(...) the model became another",
    ),
}


@pytest.mark.processes
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("case", UNLIKE)
def test_a_newcomer_that_begins_anew_is_refused(crew: Crew, case: str, depth: int) -> None:
    """What a script draws or counts from step to step is not part of the state: the job ends with what to do."""
    old, new, text = UNLIKE[case]
    hold = crew.folder / "hold"
    hold.touch()
    crew.depth = depth
    script = SCRIPT.replace(
        "torch.nn.Linear(4, 1)",
        "torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.0), torch.nn.Linear(4, 1))",
    )
    first, _ = crew.begin(2, script.replace(old, new), str(hold))
    crew.reach(4)
    (newcomer,) = crew.start(1)
    until("the newcomer", lambda: newcomer in crew.ready)
    crew.kill(first)
    until("the loss", lambda: first not in crew.ready)
    hold.unlink()
    report = until("the failure", lambda: crew.of(WorkerFailed))[0]
    assert report.kind == "refused"
    assert text in report.detail


@pytest.mark.processes
def test_who_comes_after_all_were_lost_is_compared_with_them(crew: Crew) -> None:
    """The keeper remembers what the lost ones said of the steps that newcomers go through again."""
    hold = crew.folder / "hold"
    hold.touch()
    old, new, text = UNLIKE["a stream that goes on"]
    workers = crew.begin(2, SCRIPT.replace(old, new), str(hold), backup_every_steps=3)
    crew.reach(4)
    crew.kill(*workers)
    crew.start(2)
    hold.unlink()
    report = until("the failure", lambda: crew.of(WorkerFailed))[0]
    assert text in report.detail


@pytest.mark.processes
def test_what_only_the_leader_does_to_its_model_is_refused(crew: Crew) -> None:
    """It evaluates in training mode, by which its buffers become others than everybody else's."""
    script = SCRIPT.replace(
        "Linear(4, 1)", "Sequential(torch.nn.Linear(4, 1), torch.nn.BatchNorm1d(1))"
    )
    script = script.replace("steps(9)", "steps(30)")
    only = "    optimizer.step()\n    if session.leader: model(torch.randn(8, 4))\n"
    crew.begin(2, script.replace("    optimizer.step()\n", only), str(crew.folder / "none"))
    report = until("the failure", lambda: crew.of(WorkerFailed))[0]
    assert "behind session.share(...) the model became another" in report.detail
