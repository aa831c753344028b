"""The hazards are whole scripts, and what is written down of them is what they do."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from snippets import GONE, SNIPPETS

HERE = Path(__file__).parent
# One of each outcome: harmless, other weights after a loss, also where a step is shared, and refused alone.
SAMPLE = (
    "beside: an average that is given",
    "beside: a count of a class",
    "within: what a model counts and goes by",
    "scripts: a loader",
)


def test_snippets_are_scripts_of_the_contract() -> None:
    """Each makes one session, names what it registers, and says in one line what it keeps."""
    for name, snippet in SNIPPETS.items():
        ast.parse(snippet.script, filename=name)
        assert "session.share" not in snippet.script, name
        assert snippet.because, name
        assert "\n" not in snippet.because, name


def test_what_is_gone_is_no_snippet() -> None:
    assert not GONE.keys() & SNIPPETS.keys()


def test_the_truth_is_known_of_each() -> None:
    """In their order, so that the table is written anew where a snippet is."""
    assert [each["name"] for each in _truth()] == [*SNIPPETS]


@pytest.mark.processes
def test_a_sample_does_what_is_written_down() -> None:
    """To the bit."""
    command = [sys.executable, str(HERE / "judge.py"), *SAMPLE]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    known = {each["name"]: each for each in _truth()}
    found = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [*map(_outcome, found)] == [_outcome(known[name]) for name in SAMPLE]


def _outcome(verdict: dict[str, object]) -> dict[str, object]:
    """Without the words of a refusal."""
    return {**verdict, "alone": bool(verdict["alone"])}


def _truth() -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads((HERE / "truth.json").read_text())
    return found
