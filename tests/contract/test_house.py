"""The house seen from above: its rooms are small, and documents speak of files that are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("orchestrator", "bidding", "agent", "cloud")
PLACES = (*ROOMS, "tests", "benchmarks", "docker", "examples")
FILES_MAX, LINES_MAX = 12, 2_500
DOCUMENTS = sorted([*ROOT.glob("docs/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
OF_A_PERSON = {"cloud.py", "json.py"}  # files of a script, in examples


def too_large(folder: Path) -> str:
    """What is wrong with a room that has no rooms inside; empty if nothing is."""
    if any(path.is_dir() and any(path.glob("*.py")) for path in folder.iterdir()):
        return ""
    files = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
    lines = sum(len(path.read_text().splitlines()) for path in files)
    if len(files) <= FILES_MAX and lines <= LINES_MAX:
        return ""
    return f"{folder.relative_to(ROOT)}: {len(files)} files, {lines} lines"


def test_a_room_without_rooms_inside_is_small():
    """So that a stranger can read the names of what is in it at one glance."""
    rooms = {path.parent for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    assert len(rooms) > 50
    assert [words for room in sorted(rooms) if (words := too_large(room))] == []


def test_who_expects_damage_expects_text_that_is_none():
    """msgspec raises `UnicodeDecodeError` for it, which is a ValueError and none of its own errors."""
    texts = [path.read_text() for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    lines = [line for text in texts for line in text.splitlines()]
    words = re.compile(r"(except|suppress).*msgspec\.(Decode|Msgspec)Error")
    caught = [line for line in lines if words.search(line)]
    assert [line for line in caught if "UnicodeDecodeError" not in line] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_a_module_that_a_document_names_is_there(document):
    """By its whole path, or by the last parts of it."""
    there = [
        f"/{path.relative_to(ROOT)}" for place in PLACES for path in (ROOT / place).rglob("*.py")
    ]
    named = set(re.findall(r"`([\w./-]+\.py)(?:::\w+)?`", document.read_text())) - OF_A_PERSON
    assert [
        name for name in sorted(named) if not any(path.endswith(f"/{name}") for path in there)
    ] == []


def test_a_page_is_short_enough_to_be_read():
    """Kilobytes of text; the contract of a script has its table of hazards besides."""
    longest = {"script.md": 20.5, "operations.md": 25.0}
    sizes = {path.name: path.stat().st_size / 1000 for path in DOCUMENTS}
    assert {name: size for name, size in sizes.items() if size > longest.get(name, 18.0)} == {}


def test_a_release_has_few_entries_in_the_changelog():
    """A reader looks for what changes for them, not for each mend."""
    releases = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1:]
    assert [
        release[:5] for release in releases if len(re.findall(r"^- ", release, re.M)) > 30
    ] == []
