"""What is compared, how near is near, and what a worker is asked to reproduce."""

import msgspec
import pytest

from agent.keeper import proofs
from agent.keeper.proofs import SESSION_STATE, VERSIONS_MAX, Proofs, Question, judge
from agent.messages import JobOrder
from agent.protocol import Arrived, Computed, Digest, Prepared, Proved, Reached
from agent.store.encoding.format import REST

ORDER = JobOrder(job="job", script="train.py", script_sha="1")


def computed(version: int, loss: float = 0.5, **changes: object) -> Computed:
    found = Computed(
        version=version,
        microbatch=0,
        batch=Digest("batch", 1, (2.0,)),
        loss=loss,
        gradients=(Digest("l", 5, (1.0, 4.0)),),
        machine="m",
    )
    return msgspec.structs.replace(found, **changes)


def reached(version: int, bits: int = 9, *, name: str = "l", norm: float = 3.0) -> Reached:
    return Reached(version=version, layers=(Digest(name, bits, (norm,)),), machine="m")


def prepared(version: int, *, phases: int = 1, **changes: object) -> Prepared:
    phase = version % phases
    found = Prepared(
        generation=1,
        step=version,
        loss=0.5,
        present=b"",
        script_step=version // phases,
        phase=phase,
        computed=(computed(version),),
        reached=reached(version) if phase == 0 else None,
    )
    return msgspec.structs.replace(found, **changes)


def heard(*versions: int, phases: int = 1) -> Proofs:
    known = Proofs()
    for version in versions:
        assert known.hear("a", prepared(version, phases=phases)) == ""
    return known


def said(**changes: object) -> str:
    return heard(*range(6)).hear("b", prepared(5, **changes))


def test_the_same_is_alike() -> None:
    assert said() == ""
    assert said(computed=(), reached=None) == ""


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"computed": (computed(5, batch=Digest("batch", 2)),)}, "step 5, microbatch 0: the batch"),
        ({"computed": (computed(5, loss=0.5 + 1e-16 + 1e-15),)}, "step 5, microbatch 0: the loss"),
        ({"computed": (computed(5, gradients=(Digest("l", 6),)),)}, "the gradient of layer l"),
        ({"reached": reached(5, 8)}, "step 4: the state of layer l"),
        ({"phase": 1}, "commit 5 is backward call 0 of step 5 on a and call 1 of step 5 on b"),
    ],
)
def test_what_differs_is_said_in_a_line(changes: dict[str, object], says: str) -> None:
    line = said(**changes)
    assert says in line and "\n" not in line and line.count("a") and "on b" in line


def test_a_count_that_begins_anew_in_the_middle_of_an_epoch_is_told_how_it_goes_on() -> None:
    """Rates and rows of a table go by `enumerate(loader)` in many scripts."""
    assert "session.step % len(data), in each step" in said(reached=reached(5, 8))
    batch = (computed(5, batch=Digest("batch", 2)),)
    assert "session.step % len(data), in each step" in said(computed=batch)


def test_what_a_script_keeps_in_its_state_is_named_so() -> None:
    known = Proofs()
    known.hear("a", prepared(5, reached=reached(5, name=SESSION_STATE)))
    line = known.hear("b", prepared(5, reached=reached(5, 1, name=SESSION_STATE)))
    assert line.startswith("step 4: session.state is another on b than on a.")


def test_tensors_of_no_layer_are_told_by_where_they_may_be() -> None:
    """As a cache that is filled where `session.leader` generates."""
    known = Proofs()
    known.hear("a", prepared(5, reached=reached(5, name=REST)))
    line = known.hear("b", prepared(5, reached=reached(5, 1, name=REST)))
    assert line.startswith("step 4: a tensor of no layer (a buffer with persistent=False, or")
    assert "not `if session.leader:`" in line and "tensor.clone()" in line
    assert "\n" not in line and REST not in line and proofs.REST == REST


def test_the_same_worker_is_compared_with_itself() -> None:
    known = heard(5)
    assert "than before" in known.hear("a", prepared(5, computed=(computed(5, loss=0.7),)))


@pytest.mark.parametrize("machine", ["", "n"])
def test_machines_of_another_kind_may_round_otherwise(machine: str) -> None:
    """Within what is stated: a norm of what is nothing but rounding is compared to the largest beside it."""
    near = computed(
        5,
        loss=0.5 * (1 + 1e-4),
        machine=machine,
        batch=Digest("batch", 7, (2.0 + 1e-4,)),
        gradients=(Digest("l", 6, (1.001, 4.001)),),
    )
    assert said(computed=(near,)) == ""
    for far in (
        {"loss": 0.502},
        {"batch": Digest("batch", 7, (2.01,))},
        {"gradients": (Digest("l", 6, (1.0, 4.2)),)},
    ):
        assert said(computed=(msgspec.structs.replace(near, **far),)) != ""
    known = heard(4)
    tiny = computed(5, gradients=(Digest("l", 1, (1e-9, 4.0)),))
    known.hear("a", prepared(5, computed=(tiny,)))
    other = computed(5, machine=machine, gradients=(Digest("l", 2, (7e-9, 4.0)),))
    assert known.hear("b", prepared(5, computed=(other,))) == ""


def test_what_is_no_number_is_alike() -> None:
    lost = computed(5, loss=float("nan"), machine="", gradients=(Digest("l", 1, (float("inf"),)),))
    known = heard(4)
    assert known.hear("a", prepared(5, computed=(lost,))) == ""
    assert known.hear("b", prepared(5, computed=(lost,))) == ""


def test_what_is_remembered_is_bounded() -> None:
    known = heard(*range(VERSIONS_MAX + 1))
    assert known.question(0, 1) is None
    assert known.question(1, 2) is not None


# --- questions --------------------------------------------------------------------------------------


def test_a_step_is_asked_about_when_its_end_is_known() -> None:
    known = heard(3)
    assert known.question(3, 4) == msgspec.structs.replace(known.question(3, 4), complete=False)
    arrived = Arrived(generation=1, script_step=4, reached=reached(4))
    assert known.arrive("a", arrived) == ""
    found = known.question(3, 4)
    assert found is not None and found.complete
    assert (found.version, found.script_step, found.commits) == (3, 3, 1)
    assert known.question(2, 4) is None


def test_a_step_of_several_commits_is_asked_about_as_one() -> None:
    known = heard(*range(7), phases=3)
    found = known.question(3, 6)
    assert found is not None and found.complete
    assert (found.script_step, found.commits, found.microbatches) == (1, 3, (0, 0, 0))
    assert known.question(4, 6) is None, "a script does not begin in the middle of a step"
    part = known.question(3, 5)
    assert part is not None and not part.complete and part.commits == 2


def test_without_the_sum_what_is_computed_can_be_asked_all_the_same() -> None:
    found = heard(3).question(3, 3)
    assert found is not None
    assert (found.commits, found.microbatches, found.complete) == (0, (0,), False)


def test_what_was_done_again_is_not_compared_with_what_it_was() -> None:
    known = heard(*range(6))
    known.forget(3)
    assert known.hear("b", prepared(4, computed=(computed(4, loss=9.0),))) == ""
    assert "the state" in known.hear("b", prepared(3, reached=reached(3, 1)))


def answer(question: Question, **changes: object) -> Proved:
    found = Proved(
        version=question.version,
        computed=(computed(question.version),),
        reached=(reached(question.version), reached(question.version + 1)),
    )
    return msgspec.structs.replace(found, **changes)


def asked() -> Question:
    found = heard(*range(6)).question(4, 5)
    assert found is not None and found.complete
    return found


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, ""),
        ({"computed": (computed(4, loss=0.4),)}, "step 4, microbatch 0: the loss"),
        ({"computed": ()}, "step 4: b was asked to compute microbatch 0 and did not"),
        ({"reached": (reached(4, 1), reached(5))}, "step 4, as it begins: the state of layer l"),
        ({"reached": (reached(4), reached(5, 1))}, "step 4: the state of layer l"),
        (
            {"reached": (reached(4), reached(6))},
            "step 4: the job calls session.backward(...) once, and b does",
        ),
    ],
)
def test_an_answer_is_judged(changes: dict[str, object], says: str) -> None:
    question = asked()
    line = judge("b", question, answer(question, **changes))
    assert line.startswith(says) and bool(line) == bool(says)


def test_on_another_machine_a_state_is_as_near_as_the_step_has_changed_it() -> None:
    """What doubles a rate of learning changes little of a weight, and much of the change."""
    known = heard(4)
    known.hear("a", prepared(5, reached=reached(5, norm=3.01)))
    question = known.question(4, 5)
    assert question is not None
    for norm, alike in ((3.0101, True), (3.02, False)):
        after = msgspec.structs.replace(reached(5, 2, norm=norm), machine="n")
        before = msgspec.structs.replace(reached(4), machine="n")
        line = judge("b", question, answer(question, reached=(before, after)))
        assert (line == "") == alike


def test_records_are_of_one_job_script_and_arguments() -> None:
    question = asked()
    records = proofs.encode(question, ORDER)
    assert proofs.decode(records, ORDER) == question
    for other in ({"job": "other"}, {"script_sha": "2"}, {"argv": ("1",)}):
        assert proofs.decode(records, msgspec.structs.replace(ORDER, **other)) is None
    for damaged in (b"", b"\x00", records[:-3]):
        assert proofs.decode(damaged, ORDER) is None
