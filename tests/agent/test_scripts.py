"""What a script can do wrong, and what its author then reads."""

import os
import signal
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crews import Crew, until

from agent.errors import Misuse, NotFinite
from agent.keeper import roster
from agent.messages import (
    BackupHeld,
    FailureKind,
    JobCompleted,
    Regrouped,
    WorkerFailed,
    WorkerLost,
)

pytestmark = pytest.mark.processes

START = """
import torch
from orchestrator import Session
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = Session(model, optimizer, microbatches=2)
x = torch.ones(2, 4)
"""
STEP = """
for step in session.steps(4):
    session.backward(lambda b: model(b).sum(), [x, x])
    optimizer.step()
"""

ATTACK = """
def attack(x):
    delta = torch.zeros_like(x, requires_grad=True)
    model(x + delta).sum().backward()
    return x + delta.grad.sign()
"""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is alone has nobody to go on without it: a busy machine may keep a worker from its core for a second."""
    monkeypatch.setattr(roster, "SILENT_S", roster.SILENT_EARLY_S)


def failed(crew: Crew, script: str) -> WorkerFailed:
    crew.begin(1, script)
    return until("the failure", lambda: crew.of(WorkerFailed))[0]


def test_a_name_that_a_worker_of_a_later_step_lacks(crew: Crew) -> None:
    """Nobody knows if an earlier step sets it: a name that nothing sets was said to be kept in the wrong place."""
    script = START + STEP.rstrip() + "\n    if step == 1: nothing\n"
    first = failed(crew, script)
    crew.start(1)
    second = until("its failure, too", lambda: crew.of(WorkerFailed)[1:])[0]
    assert (first.kind, second.kind) == ("exception", "refused")
    assert second.detail.splitlines()[-1] == (
        "name 'nothing' is not defined, and this worker came in a later step: if an earlier step or epoch sets nothing, "
        'it belongs into session.state["nothing"], or is set before the loop'
    )


@pytest.mark.parametrize(
    "line", ['os.environ["LOCAL_RANK"]', 'dist.init_process_group("gloo")', "dist.get_rank()"]
)
def test_a_script_that_asks_for_its_rank_hears_that_there_is_none(crew: Crew, line: str) -> None:
    """As a script for torchrun does, which names a variable of the environment."""
    report = failed(crew, f"import os\nimport torch.distributed as dist\n{line}\n")
    assert report.kind == "refused"
    assert "leave out init_process_group" in report.detail.splitlines()[-1]


@pytest.mark.parametrize("line", ['{}["RANK"]', 'raise ValueError("RANK has to be even")'])
def test_a_script_that_calls_something_of_its_own_a_rank_hears_nothing_of_torchrun(
    crew: Crew, line: str
) -> None:
    """As the rank of an adapter in its settings."""
    report = failed(crew, f"{line}\n")
    assert report.kind == "exception"
    assert "torchrun" not in report.detail


def test_a_script_that_raises(crew: Crew) -> None:
    """Its own traceback arrives, and ends its log: its file by the name that was submitted, no frame of ours."""
    script = START + textwrap.dedent(
        """
        print("before")
        def broken(x):
            return x / nothing
        for step in session.steps(3):
            session.backward(broken, [x, x])
        """
    )
    report = failed(crew, script)
    assert (report.kind, report.step) == ("exception", 0)
    assert report.detail.endswith("NameError: name 'nothing' is not defined")
    assert report.detail.count("File ") == 2
    assert 'File "train.py"' in report.detail
    assert "return x / nothing" in report.detail
    wanted = ["before", *report.detail.splitlines()]
    assert (
        until("its output", lambda: crew.printed()[len(wanted) - 1 :] and crew.printed()) == wanted
    )
    assert crew.of(WorkerLost) == []


def test_code_that_is_compiled_for_too_many_shapes_is_refused_with_what_to_do(crew: Crew) -> None:
    script = START + textwrap.dedent(
        """
        double = torch.compile(lambda x: x * 2, backend="eager")
        def loss_of(x):
            for length in range(2, 80):
                double(torch.ones(length))
            return model(x).sum()
        for step in session.steps(3):
            session.backward(loss_of, [x, x])
        """
    )
    report = failed(crew, script)
    assert report.kind == "refused"
    assert 'File "train.py"' in report.detail
    assert "dynamic=True" in report.detail.splitlines()[-1]


def test_a_failure_says_its_step_as_the_loop_counts(crew: Crew) -> None:
    """Behind its commit it is still the step that the script is in; outside of the loop there is none."""
    report = failed(crew, START + STEP.replace("steps(4)", "steps(9)") + "    assert step < 7\n")
    assert (report.kind, report.step) == ("exception", 7)


CASES: dict[str, tuple[str, FailureKind, str]] = {
    "no session": ("print('done')", "no_session", "without a session"),
    "no loop": (START, "refused", "never looped over session.steps"),
    "no steps": (START + STEP.replace("4", "0"), "refused", "has no step to do"),
    "no steps, and microbatches that nobody knows": (
        START.replace(", microbatches=2", "") + STEP.replace("4", "0"),
        "refused",
        "has no step to do",
    ),
    "epochs of no steps": (
        START + "for epoch in session.epochs(3, []): pass",
        "refused",
        "has no step to do",
    ),
    "exit": ("import sys; sys.exit('no data')", "exit", "ended itself with 1: no data"),
    "exit past Python": (
        "import os\nprint('no data')\nos._exit(1)",
        "exit",
        "ended itself with 1",
    ),
    "exit past Python, as if all were well": ("import os; os._exit(0)", "no_session", "a session"),
    "a name that is no UTF-8": ("raise OSError('no /none/\\udcff')", "exception", r"/none/\udcff"),
    "syntax": ("for", "exception", "SyntaxError"),
    "a loader": (
        START
        + "loader = torch.utils.data.DataLoader(torch.ones(4, 4), batch_size=2)\n"
        + "for step in session.steps(2): session.backward(lambda b: model(b).sum(), loader)\n",
        "refused",
        "a DataLoader cannot be asked for one of its microbatches",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_how_a_script_ends_is_one_clear_line(crew: Crew, case: str) -> None:
    """The last line says what was wrong, and what to do."""
    script, kind, text = CASES[case]
    report = failed(crew, script)
    assert report.kind == kind
    assert text in report.detail.splitlines()[-1]
    assert "/agent/" not in report.detail


MISUSE = {
    "no backward": (START + "for step in session.steps(2): pass", "session.backward"),
    "pairs": (
        START
        + "for step in session.steps(2): session.backward(lambda b: model(*b).sum(), zip([x, x]))\n",
        "a zip cannot be asked for one of its microbatches",
    ),
    "wrong count": (
        START + "for step in session.steps(2): session.backward(lambda b: model(b).sum(), [x])\n",
        "1 microbatches in step 0, where 2 are expected",
    ),
    "another count later": (
        START.replace(", microbatches=2", "") + "for step in session.steps(3):\n"
        "    session.backward(lambda b: model(b).sum(), [x] * (2 + step))\n    optimizer.step()\n",
        "3 microbatches in step 1, where 2 are expected",
    ),
    "no loss": (
        START + "for step in session.steps(2): session.backward(lambda b: None, [x, x])\n",
        "loss_of",
    ),
    "a loss of several numbers": (
        START + "for step in session.steps(2): session.backward(lambda b: model(b), [x, x])\n",
        "one number",
    ),
    "a loss without gradients": (
        START
        + "for step in session.steps(2): session.backward(lambda b: model(b).sum().detach(), [x, x])\n",
        "loss_of",
    ),
    "gradients switched off": (
        START
        + "for step in session.steps(2):\n    with torch.no_grad():\n"
        + "        session.backward(lambda b: model(b).sum(), [x, x])\n",
        "is called under torch.no_grad()",
    ),
    "an autocast around all of it": (
        START
        + "for step in session.steps(2):\n    with torch.autocast('cpu', torch.bfloat16):\n"
        + "        session.backward(lambda b: model(b).sum(), [x, x])\n",
        "is called under an autocast",
    ),
    "no function": (
        START + "for step in session.steps(2): session.backward(model(x).sum(), [x, x])\n",
        "loss_of is a Tensor",
    ),
    "a backward in the loss": (
        START
        + "def loss_of(b): return session.backward(loss_of, [b, b])\n"
        + "for step in session.steps(2): session.backward(loss_of, [x, x])\n",
        "was called by loss_of itself",
    ),
    "a backward outside of the loop": (
        START + "session.backward(lambda b: model(b).sum(), [x, x])\n",
        "belongs into the loop over session.steps(...)",
    ),
    "two loops": (
        START + STEP + STEP,
        "say how many steps all of them have together",
    ),
    "metrics that are not those of the others": (
        START
        + "def loss_of(pair): return model(pair[1]).sum(), {pair[0]: 1.0}\n"
        + "for step in session.steps(2): session.backward(loss_of, [('a', x), ('b', x)])\n",
        "'b'",
    ),
    "a model that is changed in the loss": (
        START
        + "def loss_of(b):\n    with torch.no_grad(): model.weight.mul_(1.0)\n    return model(b).sum()\n"
        + "for step in session.steps(2): session.backward(loss_of, [x, x])\n",
        "loss_of writes to the parameter 'weight'",
    ),
    "gradients that the loss makes by itself": (
        START
        + ATTACK
        + "for step in session.steps(2): session.backward(lambda b: model(attack(b)).sum(), [x, x])\n",
        "step 0: loss_of called backward() and left a gradient in 'weight'",
    ),
    "a weight of the loss that is in no model": (
        START.replace(
            "session = ",
            "weight = torch.nn.Parameter(torch.zeros(2))\n"
            "optimizer.add_param_group({'params': [weight]})\nsession = ",
        )
        + STEP,
        "SGD trains a parameter of shape [2] that is in no model that Session(...) was given",
    ),
    "optimizer not given": (
        START
        + "other = torch.optim.SGD(model.parameters(), lr=0.1)\nfor step in session.steps(2):\n"
        + "    session.backward(lambda b: model(b).sum(), [x, x])\n"
        + "    other.step()\n",
        "SGD trains parameters of the session, which was not given this optimizer",
    ),
    "schedule not given": (
        START
        + "schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)\n"
        + "for step in session.steps(2):\n"
        + "    session.backward(lambda b: model(b).sum(), [x, x])\n",
        "SGD has a schedule that Session(...) was not given",
    ),
    "replaced later": (
        START
        + STEP
        + "    model.weight = torch.nn.Parameter(torch.zeros(1, 4))\n"
        + "    optimizer.param_groups[0]['params'][0] = model.weight\n",
        "the parameter 'weight' is not the same object as when Session(...) was made",
    ),
    "a buffer that grows": (
        START.replace("session = ", "model.register_buffer('seen', torch.zeros(0))\nsession = ")
        + STEP
        + "    model.seen = torch.cat([model.seen, torch.ones(1)])\n",
        "the buffer 'seen' is torch.float32 [1], but was torch.float32 [0] when Session(...) was made",
    ),
    "a buffer that nothing is known to add up": (
        START.replace(
            "session = ",
            "model.register_buffer('seen', torch.zeros(1, dtype=torch.uint8))\n"
            "model.register_forward_hook(lambda *_: (model.seen.fill_(1), None)[1])\nsession = ",
        )
        + STEP,
        "step 0: loss_of writes to the buffer 'seen' of torch.uint8",
    ),
    "gradients of several steps": (
        START + STEP.replace("optimizer.step()", "if step % 2: optimizer.step()"),
        "step 1: the gradients of step 0 are still there, and no optimizer has used them",
    ),
    "a buffer of another size in the forward": (
        START.replace(
            "session = ",
            "model.register_buffer('seen', torch.zeros(0))\n"
            "model.register_forward_hook(lambda *_: (model.seen.resize_(1), None)[1])\nsession = ",
        )
        + STEP,
        "the forward has made the buffer 'seen' [1], which was [0]",
    ),
    "a scripted module": (
        START.replace("session = ", "model = torch.jit.script(model)\nsession = "),
        "'the model' is a scripted module",
    ),
    "who leads, asked once": (
        START + "leads = session.leader\n" + STEP,
        "session.leader is asked before the loop over session.steps(...)",
    ),
    "changed too early": (
        START
        + "for step in session.steps(2):\n    torch.nn.init.zeros_(model.weight)\n"
        + "    session.backward(lambda b: model(b).sum(), [x, x])\n",
        "changed before session.backward",
    ),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is:DeprecationWarning")
@pytest.mark.parametrize("case", MISUSE)
def test_misuse_is_one_clear_line(by_hand: Callable[[str], None], case: str) -> None:
    """Said alone as in a job, in which a line that is raised so is the last of the report."""
    script, text = MISUSE[case]
    with pytest.raises(Misuse) as refused:
        by_hand(script)
    assert text in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_step_may_be_left_out(by_hand: Callable[[str], None]) -> None:
    """Gradients that the script has set to nothing are not taken for forgotten ones, and so may a buffer be that is
    computed anew by everyone."""
    script = START.replace(
        "session = ", "model.register_buffer('mask', torch.zeros(0), persistent=False)\nsession = "
    ) + STEP.replace("optimizer.step()", "optimizer.zero_grad(set_to_none=step % 4 > 0)")
    by_hand(script + "    model.mask = torch.ones(step)\n")


def test_a_loss_may_make_gradients_that_it_clears(by_hand: Callable[[str], None]) -> None:
    """To nothing or to zero, for each microbatch."""
    clearing = """
def loss_of(b):
    x = attack(b[0])
    optimizer.zero_grad(set_to_none=b[1])
    return model(x).sum()
for step in session.steps(4):
    session.backward(loss_of, [(x, True), (x, False)])
    assert {*model.weight.grad[0].tolist()} <= {0.0, 4.0}
    optimizer.step()
"""
    by_hand(START + ATTACK + clearing)


def test_whatever_a_script_prints_its_lines_arrive(crew: Crew) -> None:
    """Bytes, a name that is no UTF-8, and what asks for the number of its file, or for the buffering that it has anyway."""
    crew.begin(
        1,
        "import faulthandler, sys\nfaulthandler.enable()\nsys.stdout.reconfigure(line_buffering=True)\n"
        + START
        + "\nfor _ in session.steps(1): session.backward(lambda b: model(b).sum(), [x, x])\n"
        + "print('/none/\\udcff')\nsys.stdout.buffer.write(b'\\xff bytes\\n')\nprint('done')\n",
    )
    crew.completed()
    assert crew.printed() == [r"/none/\udcff", "\N{REPLACEMENT CHARACTER} bytes", "done"]


NAN = """
for step in session.steps(6):
    weight = float("nan") if step == 3 else 1.0
    result = session.backward(lambda b: weight * model(b).square().mean(), [x, x])
    optimizer.step()
    if session.leader:
        print(step, result.loss)
"""


def test_not_a_number_fails_the_job_before_the_commit(crew: Crew) -> None:
    """Policy `fail`: the step that is not finite is not committed."""
    report = failed(crew, START + NAN)
    assert report.kind == "nan"
    assert report.detail.startswith("step 3: the loss is nan")
    assert crew.step == 3


NOTHING_LEFT = """
targets = torch.tensor([[1, 0], [0, 0]])
def loss_of(at):
    scores = torch.cat([model(x), -model(x)], 1)
    return torch.nn.functional.cross_entropy(scores, targets[at], ignore_index=0)
for step in session.steps(2):
    session.backward(loss_of, [0, 1])
    optimizer.step()
"""


def test_a_mean_over_nothing_is_told_from_other_numbers_that_are_none(
    by_hand: Callable[[str], None],
) -> None:
    """A microbatch may have none of what the whole batch has enough of."""
    said = r"step 0: the loss is nan, and all gradients are finite.*ignore_index"
    with pytest.raises(NotFinite, match=said):
        by_hand(START + NOTHING_LEFT)


def test_not_a_number_can_be_skipped(crew: Crew) -> None:
    """Policy `skip`: the step is committed and changes nothing; training goes on, finite."""
    crew.begin(2, START + NAN, nan="skip")
    done = crew.completed()
    assert done.step == 6
    assert done.loss == done.loss
    assert [line.split()[0] for line in crew.printed()] == ["0", "1", "2", "3", "4", "5"]


@pytest.mark.parametrize("last", ["sys.exit(3)", "1 / 0"])
def test_what_a_script_forks_is_no_worker(crew: Crew, last: str) -> None:
    """However it ends, the job has nothing of it."""
    forking = "\n    if not (pid := os.fork()): " + last + "\n    os.waitpid(pid, 0)\n"
    crew.begin(1, "import os, sys\n" + START + STEP + forking)
    assert crew.completed().step == 4
    assert crew.of(WorkerFailed) == []


MAKES_ONE = """
import multiprocessing
def main():
{}
child = multiprocessing.get_context("fork").Process(target=main)
child.start()
child.join()
""".format(textwrap.indent(START + STEP, "    "))
ENDLESS = STEP.replace("4", "1000000")


@pytest.mark.parametrize(
    "script",
    [
        START + "import os\nif pid := os.fork(): os.waitpid(pid, 0)\n" + STEP,
        START + "import os\nos.fork()\n" + ENDLESS,
        START + "import os\n" + ENDLESS + "    if step == 1: os.fork()\n",
        MAKES_ONE,
    ],
    ids=["is waited for", "trains as well", "in a step", "makes the session"],
)
def test_a_forked_process_that_trains_is_refused(crew: Crew, script: str) -> None:
    """It would wait for ever for what only the worker hears, and a worker that waits for it as well."""
    report = failed(crew, script)
    assert report.kind == "refused"
    assert "a process that the script forked" in report.detail


def test_what_a_script_forks_before_it_computes_may_compute(crew: Crew) -> None:
    """A pool that prepares data: the worker has not started the threads of OpenMP, of which a copy would have none."""
    forking = (
        "import multiprocessing, torch\n"
        "def prepared(i): return torch.ones(8, 8).triu().sum().item() + i\n"
        "torch.set_num_threads(2)\n"
        "with multiprocessing.get_context('fork').Pool(1) as pool: print(pool.map(prepared, [0, 1]))\n"
    )
    crew.begin(1, forking + START + STEP)
    assert crew.completed().step == 4
    assert crew.printed() == ["[36.0, 37.0]"]


def test_what_a_script_forks_holds_no_connection(crew: Crew, tmp_path: Path) -> None:
    """That its worker is dead is seen at once, whatever still runs."""
    noted = tmp_path / "pid"
    forking = (
        "\n    if step == 0 and (pid := os.fork()):"
        f" open({str(noted)!r}, 'w').write(str(pid))"
        "\n    elif step == 0: time.sleep(600)"
        "\n    time.sleep(0.1)\n"
    )
    crew.begin(1, "import os, time\n" + START + STEP.replace("4", "400") + forking)
    crew.reach(2)
    crew.kill(*crew.ready)
    try:
        assert until("the loss", lambda: crew.of(WorkerLost))[0].cause == "connection"
    finally:
        os.kill(int(noted.read_text()), signal.SIGKILL)


def test_a_loop_that_only_one_leaves_is_refused(crew: Crew) -> None:
    """The others would wait for it for ever, in a step that it will not do."""
    leaves = STEP + "    if session.leader and step == 1: break\n"
    crew.begin(2, START + leaves)
    report = until("the failure", lambda: crew.of(WorkerFailed))[0]
    assert report.kind == "refused"
    assert "step 2: the scripts of others have left their loop" in report.detail.splitlines()[-1]


def backed_up(crew: Crew, first: Path) -> None:
    """The script waits in step 1 until there is a state by which a newcomer can prove itself."""
    until("a backup", lambda: [held for held in crew.of(BackupHeld) if held.step == 1])
    first.unlink()


LEAVES = """
import os, pathlib, sys, time
hold = pathlib.Path(sys.argv[1])
for step in session.steps(8):
    hold.with_name(f"{step}.{os.getpid()}").touch()
    while step == 1 and hold.with_name("first").exists():
        time.sleep(0.01)
    session.backward(lambda b: model(b).square().mean(), [x, x, x])
    optimizer.step()
    while step == 3 and hold.exists():
        time.sleep(0.01)
    if step == 3: break
if session.leader: print("behind the loop")
"""


@pytest.mark.parametrize("others", [2, 0])
def test_who_comes_where_the_others_have_left_their_loop_leaves_it_too(
    crew: Crew, others: int
) -> None:
    """It has the state of the end, and not been in the step that ended it: it would begin one more. It may lead now, or be
    all that is in the layout: what is behind the loop is done once, by who led there."""
    hold = crew.folder / "hold"
    hold.touch()
    (first := hold.with_name("first")).touch()
    crew.begin(2, START.replace("=2", "=3") + LEAVES, str(hold), backup_every_steps=1)
    backed_up(crew, first)
    crew.reach(4)
    (newcomer,) = crew.start(1)
    until("the newcomer", lambda: newcomer in crew.ready)
    with crew._lock:
        crew.ready[:] = [newcomer, *crew.ready[:others]]
        crew.regroup("now")
    job = crew.keeper._jobs["job"]
    until("the new layout", lambda: job.roster.layout.generation == crew.generation)
    hold.unlink()
    assert crew.completed().step == 4
    assert crew.printed() == ["behind the loop"]
    assert hold.with_name(f"4.{crew.pids[newcomer]}").exists()


SETS = """
import pathlib, sys
hold = pathlib.Path(sys.argv[1])
def main():
    <global>
    for step in session.steps(1000000):
        if step == 0: length = 4
        session.backward(lambda b: model(b).square().mean(), [x, x])
        optimizer.step()
        if not hold.exists(): print(length)
main()
"""


@pytest.mark.parametrize("kind", ["variable of a function", "global"])
def test_a_name_that_an_earlier_step_has_set_is_missing_by_name(crew: Crew, kind: str) -> None:
    """The traceback alone would speak of a line that is right on the worker that was there from the beginning."""
    hold = crew.folder / "hold"
    hold.touch()
    sets = SETS.replace("<global>", "global length" if kind == "global" else "pass")
    crew.begin(1, START + sets, str(hold))
    crew.reach(4)
    (newcomer,) = crew.start(1)
    until("the newcomer", lambda: newcomer in crew.ready)
    hold.unlink()
    report = until("the failure", lambda: crew.of(WorkerFailed))[0]
    assert (report.worker, report.kind) == (newcomer, "refused")
    assert "Error: " in report.detail
    assert 'session.state["length"]' in report.detail.splitlines()[-1]


def test_what_is_set_before_the_gradients_is_set_once(crew: Crew) -> None:
    """A newcomer that takes the state in the middle of a step does not take half a step with it."""
    made = "scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)\nsession = "
    given = START.replace("session = ", made).replace(
        "(model, optimizer,", "(model, optimizer, scheduler,"
    )
    script = given + textwrap.dedent(
        """
        import pathlib, sys, time
        hold = pathlib.Path(sys.argv[1])
        def loss_of(batch):
            while step == 4 and hold.exists():
                time.sleep(0.01)
            return model(batch).square().mean()
        for step in session.steps(8):
            while step == 1 and hold.with_name("first").exists():
                time.sleep(0.01)
            scheduler.last_epoch += 1
            session.backward(loss_of, [x, x])
            optimizer.step()
        print("counted", scheduler.last_epoch)
        """
    )
    hold = crew.folder / "hold"
    hold.touch()
    (begun := hold.with_name("first")).touch()
    first, second = crew.begin(2, script, str(hold), backup_every_steps=1)
    backed_up(crew, begun)
    crew.reach(4)
    (newcomer,) = crew.start(1)
    with crew.on_hold():
        until("the newcomer", lambda: newcomer in crew.ready)
        crew.kill(first)
        until("the loss", lambda: first not in crew.ready)
    hold.unlink()
    crew.completed()
    assert crew.printed() == ["counted 8"]
    assert second in crew.ready


def _kinds(reports: list[Any]) -> list[str]:
    return [type(report).__name__ for report in reports]


def test_reports_come_in_order(crew: Crew) -> None:
    """Progress is folded, and still never behind what comes after it."""
    script = START + textwrap.dedent(
        """
        for step in session.steps(40):
            session.backward(lambda b: model(b).square().mean(), [x, x])
            optimizer.step()
        """
    )
    crew.begin(1, script)
    crew.completed()
    kinds = _kinds(crew.reports)
    assert kinds[0] == "WorkerReady"
    assert kinds[-1] == "JobCompleted"
    steps = [report.step for report in crew.reports if isinstance(report, Regrouped | JobCompleted)]
    assert steps == sorted(steps)
    assert steps[-1] == 40
    assert kinds.count("Progress") < 40


ASTRAY = """
import os, pathlib, sys, time
def loss_of(batch):
    pathlib.Path(sys.argv[1], f"{step}.{os.getpid()}").touch()
    while pathlib.Path(sys.argv[1], str(step)).exists():
        time.sleep(0.01)
    return model(batch).sum()
for step in session.steps(8):
    session.backward(loss_of, [x, x])
    if not model.weight.grad.any():
        what_nobody_meant(step)
    optimizer.step()
"""


@pytest.mark.parametrize("what", ["1 / 0", "sys.exit(3)", "break"])
def test_what_fails_in_a_step_that_is_over_is_no_failure_of_the_script(
    crew: Crew, what: str
) -> None:
    """Whoever is left out in the middle of a step runs the rest of the body on zeros: if that fails or
    ends the loop, a worker is lost, and the job neither fails nor ends by it."""
    for step in ("4", "6"):
        (crew.folder / step).touch()
    script = START + ASTRAY.replace("what_nobody_meant(step)", what)
    first, second = crew.begin(2, script, str(crew.folder))
    # Left out before it has begun with the step, it would wait at the boundary, and nothing would fail.
    begun = crew.folder / f"4.{crew.pids[second]}"
    until("the middle of the step", begun.exists)
    with crew._lock:
        crew.ready.remove(second)
        crew.regroup("now")
    until("the new layout", lambda: crew.generation > 1 and crew.keeper._jobs["job"].roster.started)
    (crew.folder / "4").unlink()
    until("the loss", lambda: second in [lost.worker for lost in crew.of(WorkerLost)])
    (crew.folder / "6").unlink()
    assert crew.completed().step == 8
    assert crew.of(WorkerFailed) == []
    assert first in crew.ready


def test_a_rehearsal_that_is_over_before_a_later_loop_says_why_its_code_has_nothing(
    crew: Crew,
) -> None:
    """A worker that joins behind that loop would have nothing either."""
    script = START.replace("microbatches=2", "microbatches=2, steps=16") + textwrap.dedent(
        """
        def train():
            for epoch in session.epochs(2, 4):
                for _ in session.each(4):
                    loss = session.backward(lambda b: model(b).sum(), [x, x])
                    optimizer.step()
            print(loss)
        train()
        train()
        """
    )
    crew.begin(1, script, stop_at=8)
    report = until("the failure", lambda: crew.of(WorkerFailed))[0]
    assert "local variable 'loss'" in report.detail
    assert "belongs into session.state, or has a value before the loop" in report.detail
