"""No hazard ends with other weights and no word: a drawn sample is run, and the whole table is written down."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from limits import LIMITS, RIGHTLY, table
from snippets import SNIPPETS

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "script.md"
SEEDS = range(10)
WAYS = ("lost 1", "lost 3", "lost 5", "join 1", "join 3", "join 5")
SILENT = ("other", "EOFError", "BrokenPipeError", "ConnectionResetError", "took longer")


def written(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((HERE / name).read_text())
    return found


def test_a_drawn_hazard_never_ends_with_other_weights_and_no_word() -> None:
    """Whenever others join, or all are lost at once; and what keeps nothing passes."""
    hazards = [each["name"] for each in written("truth.json") if each["reaches"]]
    hazards = [name for name in hazards if name not in LIMITS]
    harmless = [n for n, each in SNIPPETS.items() if each.kind == "allowed"]
    harmless = [name for name in harmless if name not in {*LIMITS, *RIGHTLY}]
    asked = []
    for seed in SEEDS:
        drawn = random.Random(seed)
        asked.append(f"{drawn.choice(hazards)} @ {drawn.choice(WAYS)}")
        asked.append(f"{drawn.choice(harmless)} @ {drawn.choice(WAYS)}")
    command = [sys.executable, str(HERE / "trial.py"), *asked]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    trials = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(trials) == len(asked)
    for place, trial in enumerate(trials):
        said = [words for words in trial["ways"].values() if words]
        assert not [words for words in said if words.startswith(SILENT)], asked[place]
        assert not (place % 2 and said), asked[place]


def test_the_table_has_all_hazards() -> None:
    """In their order, so that it is written anew where a hazard is."""
    assert [each["name"] for each in written("proof.json")] == [*SNIPPETS]


def test_what_reaches_a_weight_is_caught_or_named() -> None:
    truth = {each["name"]: each for each in written("truth.json")}
    proof = written("proof.json")
    assert {each["name"] for each in proof if each["fate"] == "not caught"} == {*LIMITS}
    silent = [each["name"] for each in proof if each["fate"] == "harmless"]
    # A job whose workers have left a loop by their own count ends where the first of them has.
    assert not [name for name in silent if truth[name]["reaches"]]


def test_what_is_allowed_passes() -> None:
    """But for what is named."""
    loud = {each["name"] for each in written("proof.json") if each["fate"] != "harmless"}
    allowed = {name for name, each in SNIPPETS.items() if each.kind == "allowed"}
    assert allowed & loud - {*LIMITS} == {*RIGHTLY}


@pytest.mark.parametrize("line", table(written("proof.json")))
def test_the_page_has_the_table(line: str) -> None:
    assert line in PAGE.read_text().splitlines()
