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
    "CONTRIBUTING.md",
    "CHANGELOG.md",
]
COMMAND = re.compile(r"orchestrator ([a-z]+)((?: [^`\n#|]*)?)")


def commands(text: str) -> list[tuple[str, list[str]]]:
    """(command, options) of every line in a block and every `...` that runs the program."""
    fenced = re.findall(r"(?ms)^```(\w*)\n(.*?)^```", text)
    blocks = [block for language, block in fenced if not language]
    typed = [
        line for block in blocks for line in block.splitlines() if line.startswith("orchestrator ")
    ]
    typed += re.findall(r"`(orchestrator [^`]*)`", text)
    found = []
    for line in typed:
        words = re.split(r" -- | #", line)[0].split()
        if len(words) > 1:
            found.append((words[1], [word for word in words[2:] if word.startswith("-")]))
    return found


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_command_in_a_document_is_there_with_its_options(shell, document):
    """Typed as written, the program would understand it."""
    listed = shell("--help").out
    for name, options in commands((ROOT / document).read_text()):
        assert f"\n  {name} " in listed, name
        text = shell(name, "--help").out
        for option in options:
            assert re.search(rf"(?<![\w-]){re.escape(option)}\b", text), (name, option)


def test_the_documents_name_every_command(shell):
    """A command that no document mentions would not be found."""
    named = {name for document in DOCUMENTS for name, _ in commands((ROOT / document).read_text())}
    changes = (ROOT / "CHANGELOG.md").read_text()
    listed = shell("--help").out.split("Commands:\n")[1].split("\n\n")[0]
    for name in re.findall(r"(?m)^  (\S+)", listed):
        assert name in named or f"`{name}`" in changes


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_setting_in_a_document_is_there(document):
    """`section.key` is a setting, or no section of ours."""
    sections = {section for section, _ in keys()}
    text = (ROOT / document).read_text()
    for section, key in re.findall(r"\b([a-z]+)\.([a-z_]+)\b(?!\.|\()", text):
        if section in sections and f"{section}.{key}" not in FILES:
            assert (section, key) in set(keys()), f"{section}.{key}"


FILES = {"manager.log", "manager.py", "ray.log", "dashboard.png", "job.py", "local.small"}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_link_leads_somewhere(document):
    """To a file of the project."""
    place = ROOT / document
    for target in re.findall(r"\]\(([^)#]+)", place.read_text()):
        assert (place.parent / target).exists(), target


def test_the_script_of_the_tutorial_runs_alone(shell, tmp_path):
    """As a person would run it: plain Python, no manager anywhere."""
    import subprocess
    import sys

    text = (ROOT / "docs/tutorial.md").read_text()
    (script,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "train.py").write_text(script.replace("steps(300)", "steps(51)"))
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120
    )  # fmt: skip
    losses = [float(line.rpartition(" ")[2]) for line in done.stdout.splitlines()]
    assert len(losses) == 2
    assert losses[1] < losses[0]
