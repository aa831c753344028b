"""What the documents say is so: their commands, options, settings and links are there."""

import re
from pathlib import Path

import pytest

from orchestrator.config import keys

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    "README.md",
    "docs/tutorial.md",
    "docs/operations.md",
    "docs/page.md",
    "docs/programs.md",
    "docs/history.md",
    "docs/real-cloud.md",
    "docs/aws.md",
    "docs/azure.md",
    "docs/security.md",
    "docs/faults.md",
    "docs/bidding.md",
    "docs/market.md",
    "docs/compared.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
]


def typed_in_blocks(text: str) -> list[str]:
    """The lines of blocks that run the program."""
    parts = re.split(r"(?m)^ *```.*$", text)  # every other part is a block
    return [
        line
        for block in parts[1::2]
        for line in block.splitlines()
        if line.startswith("orchestrator ")
    ]


def commands(text: str) -> list[tuple[str, list[str]]]:
    """(command, options) of every line in a block and every `...` that runs the program; a tool's is `tools drill`."""
    typed = typed_in_blocks(text)
    typed += re.findall(r"`(orchestrator [^`]*)`", text)
    found = []
    for line in typed:
        words = re.split(r" -- | #", line)[0].split()
        if len(words) > 1:
            name = " ".join(words[1 : 3 if words[1] == "tools" else 2])
            found.append((name, [word for word in words[2:] if word.startswith("-")]))
    return found


def listed(shell) -> list[str]:
    """Every command that the help names, the tools among them."""
    found = []
    for group in ((), ("tools",)):
        names = re.findall(r"(?m)^  (\S+)  ", shell(*group, "--help").out.split("Commands:\n")[1])
        found += [" ".join((*group, name)) for name in names]
    return found


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_command_in_a_document_is_there_with_its_options(shell, document):
    """Typed as written, the program would understand it."""
    known = listed(shell)
    for name, options in commands((ROOT / document).read_text()):
        assert name in known or name == "tools COMMAND", name
        text = shell(*name.split(), "--help").out if name in known else ""
        for option in options:
            assert re.search(rf"(?<![\w-]){re.escape(option)}\b", text), (name, option)


def test_the_documents_name_every_command(shell):
    """A command that no document mentions would not be found."""
    named = {name for document in DOCUMENTS for name, _ in commands((ROOT / document).read_text())}
    changes = (ROOT / "CHANGELOG.md").read_text()
    for name in listed(shell):
        assert name in named or name == "tools" or f"`{name}`" in changes, name


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_setting_in_a_document_is_there(document):
    """`section.key` is a setting, or no section of ours."""
    sections = {section for section, _ in keys()}
    text = (ROOT / document).read_text()
    for section, key in re.findall(r"\b([a-z]+)\.([a-z_]+)\b(?!\.|\()", text):
        if section in sections and f"{section}.{key}" not in FILES:
            assert (section, key) in set(keys()), f"{section}.{key}"


FILES = {
    "hooks.token",
    "aws.md",
    "azure.md",
    "dashboard.token",
    "ray.token",
    "manager.py",
    "ray.log",
    "azure.own_end",
    "dashboard.log",
    "dashboard.png",
    "job.py",
    "local.small",
}


def headings(text: str) -> set[str]:
    """The names by which a link reaches the headings of a document."""
    lines = re.findall(r"(?m)^#+ (.*)$", text)
    return {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in lines}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_link_leads_somewhere(document):
    """To a file of the project, and to a heading of it."""
    place = ROOT / document
    links = re.findall(r"\]\((?!https:)([^)#]*)#?([^)]*)\)", place.read_text())
    for target, heading in links:
        there = place.parent / target if target else place
        assert there.exists(), target
        assert not heading or heading in headings(there.read_text()), (target, heading)


@pytest.mark.parametrize("document", ["docs/clouds.md", "docs/faults.md"])
def test_every_test_that_a_document_names_is_there(document):
    """Names of files come once in the tree; a name of a test without a file is of the file before it."""
    files = {path.name: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    said = (ROOT / document).read_text()
    named = re.findall(r"`(?=[\w/]*test_|::)(?:[\w/]*?(test_\w+\.py))?(?:::(\w+))?`", said)
    assert len(named) > 20
    text = ""
    for file, test in named:
        text = files[file] if file else text
        assert not test or f"def {test}(" in text, (file, test)
    for test in re.findall(r"`(test_\w+)`", said):
        assert any(f"def {test}(" in text for text in files.values()), test


def test_the_script_of_the_tutorial_runs_alone(shell, tmp_path):
    """As a person would run it: plain Python, no manager anywhere."""
    import subprocess
    import sys

    text = (ROOT / "docs/tutorial.md").read_text()
    (script,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "train.py").write_text(script.replace("steps(300)", "steps(51)"))
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    losses = [float(line.rpartition(" ")[2]) for line in done.stdout.splitlines()]
    assert len(losses) == 2
    assert losses[1] < losses[0]
