"""Profiles and plans for any machines: no market, no manager, and one line for whatever cannot be answered."""

from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from test_plan import SVG, measured
from test_watch import JOB

from agent.profile import parse, render
from orchestrator.cli.tools.trace import unmeasured
from orchestrator.formatting import duration


@pytest.fixture
def known(shell):
    """Four equal sections that need 1600 bytes, and a slower machine with less memory."""
    fast = measured(memory=2000.0)
    slow = [
        msgspec.structs.replace(s, forward_s=(2e-3,), backward_s=(4e-3,)) for s in fast.sections
    ]
    (shell.folder / "fast.json").write_text(render(fast))
    (shell.folder / "slow.json").write_text(
        render(msgspec.structs.replace(fast, sections=tuple(slow), memory_bytes=900.0))
    )
    return shell


@pytest.mark.parametrize(("on", "workers"), [("1", 1), ("4x2", 8), ("10000", 10_000)])
def test_any_footprint_has_a_layout(known, on, workers):
    """One machine, machines of several accelerators, ten thousand: the best layout and what else was compared."""
    answer = known("plan", "fast.json", "--on", on, "--batch", "64", "--json")
    assert (answer.code, answer.err) == (0, "")
    plan = answer.json["plan"]
    assert plan["workers"] == workers
    assert sum(plan["shares"]) == 64
    chosen, *others = answer.json["compared"]
    assert all(other["step_s"] >= chosen["step_s"] for other in others)
    assert answer.json["steps_s"] is None
    text = known("plan", "fast.json", "--on", on, "--batch", "64", "--steps", "1000000").out
    assert f"on {workers:,} worker" in text
    assert "\ntake " in text
    lasts = duration(1e6 * answer.json["plan"]["cost"]["step_s"])
    assert f"1,000,000 steps: {lasts}, if no machine is lost" in text


def test_machines_of_one_kind_and_several_sizes_are_as_many_as_they_are(known):
    """Two machines of four and three of eight, in either order: thirty-two workers, and plans use no more."""
    for on in (("2x4", "3x8"), ("3x8", "2x4")):
        plan = known("plan", "fast.json", "--on", on[0], "--on", on[1], "--batch", "256", "--json")
        assert plan.json["plan"]["workers"] == 32
        assert sum(map(len, plan.json["chains"])) <= 32


def test_unlike_machines_share_by_pace(known):
    """A slow machine in another zone gets fewer; its memory bounds what it does; the step can be drawn."""
    words = ("plan", "fast.json", "--on", "2", "--on", "1:slow.json@b", "--batch", "64")
    answer = known(*words, "--gantt", "step.svg", "--json")
    assert (answer.code, answer.err) == (0, "")
    names = {name for chain in answer.json["chains"] for name in chain}
    assert names <= {"fast.json", "slow.json"}
    bars = list(ElementTree.fromstring((known.folder / "step.svg").read_text()).iter(f"{SVG}title"))
    assert len(bars) > 2
    both = known("plan", "slow.json", "--on", "2", "--on", "2:fast.json", "--batch", "64").out
    assert " on fast.json" in both


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("fast.json", "--on", "0", "--batch", "8"), 1, "there are no workers"),
        (("fast.json", "--batch", "8"), 2, "say what it shall train on, e.g. --on 16"),
        (("fast.json", "--on", "4"), 2, "say how many samples a step has, e.g. --batch 256"),
        (("fast.json", "--on", "4", "--batch", "0"), 2, "global batch 0"),
        (("fast.json", "--on", "four", "--batch", "8"), 2, "--on four: write INSTANCES[x"),
        (("fast.json", "--on", "20001", "--batch", "8"), 2, "at most 20,000"),
        (("fast.json", "--on", "2:none.json", "--batch", "8"), 2, "none.json: there is no such"),
        (
            ("none.json", "--on", "4", "--batch", "8"),
            2,
            "orchestrator tools profile JOB --out FILE",
        ),
        (("torn.json", "--on", "4", "--batch", "8"), 2, "torn.json: no usable profile"),
        (("old.json", "--on", "4", "--batch", "8"), 2, "written in format 0, this is format 1"),
        (("odd.json", "--on", "4", "--batch", "10"), 2, "the nearest that are: 8, 12"),
        (("odd.json", "--on", "4", "--on", "2:fast.json", "--batch", "8"), 2, "none in common"),
        (("still.json", "--on", "4", "--batch", "8"), 2, "takes no time in any section"),
        (
            ("tiny.json", "--on", "4", "--batch", "8"),
            1,
            "into 100 bytes per accelerator; the least",
        ),
        (("fast.json", "--on", "4", "--batch", "8", "--sharding", "offload"), 2, "host memory"),
        (("fast.json", "--on", "4", "--batch", "8", "--gantt", "no/a.svg"), 2, "No such file"),
        (
            ("fast.json", "--budget", "0"),
            2,
            "--budget: belongs to the plan of a script; without that,",
        ),
        (("fast.json", "--on", "4", "--batch", "8", "--", "--lr", "1"), 2, "-- ARGS: belongs to"),
        (("train.py", "--batch", "8"), 2, "--batch: belongs to a plan with --on"),
    ],
)
def test_what_cannot_be_planned_is_one_line(known, words, code, said):
    """No machines, no batch, a profile that is missing, torn or old, a batch that does not divide, too little memory."""
    text = (known.folder / "fast.json").read_text()
    (known.folder / "torn.json").write_text(text[:200])
    (known.folder / "old.json").write_text(text.replace('"version": 1', '"version": 0'))
    fast = parse(text)
    odd = msgspec.structs.replace(fast, microbatch_sizes=(4,))
    (known.folder / "odd.json").write_text(render(odd))
    (known.folder / "tiny.json").write_text(
        render(msgspec.structs.replace(fast, memory_bytes=100.0))
    )
    still = text.replace("0.001", "0.0").replace("0.002", "0.0")
    (known.folder / "still.json").write_text(still)
    refused = known("plan", *words)
    assert refused.code == code
    assert said in refused.line


def test_a_profile_is_shown_and_written(known):
    """What a file holds, section by section; a copy of it can be planned with."""
    answer = known("tools", "profile", "fast.json", "--out", "copy.json")
    assert (answer.code, answer.err) == (0, "")
    assert "block" in answer.out
    assert answer.out.splitlines()[-1].startswith("Next: orchestrator plan copy.json --on 4")
    assert parse((known.folder / "copy.json").read_text()) == measured(memory=2000.0)
    assert known("tools", "profile", "copy.json", "--json").json["profile"]["model"] == "deep.py"
    assert "there is no such profile" in known("tools", "profile", str(Path("no") / "a.json")).line


def test_without_a_manager_a_jobs_profile_is_not_there(shell):
    """The default is the newest job's, and jobs are with the manager."""
    assert shell("tools", "profile").code == 3


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"step": 0}, "in its first step"),
        ({"uncuttable": "train.py:9: float(loss)"}, "train.py:9"),
        ({"uncuttable": ""}, "orchestrator logs gpt-1"),
    ],
)
def test_a_job_that_was_not_measured_says_why(told, why):
    """It has not begun, it cannot be cut, or measuring failed: a job that trains is not promised its first step."""
    assert why in unmeasured(msgspec.structs.replace(JOB, **told))
