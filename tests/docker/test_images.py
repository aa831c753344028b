"""The image definitions are minimal, pinned and hold no secret, and what they copy is there."""

import re
import shlex
import stat
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docker"
IMAGES = sorted(FOLDER.glob("*.Dockerfile"))
SCRIPTS = [*sorted(FOLDER.glob("*.sh")), ROOT / "cloud" / "boot.sh"]

Instruction = tuple[str, str]

images = pytest.mark.parametrize("image", IMAGES, ids=lambda path: path.name)
scripts = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)


def instructions(image: Path) -> list[Instruction]:
    """Every instruction with its arguments, comments left out and lines joined."""
    lines = [line for line in image.read_text().splitlines() if not line.strip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    split = [line.split(maxsplit=1) for line in joined.splitlines() if line.strip()]
    return [(word.upper(), rest) for word, rest in split]


def arguments(image: Path, name: str) -> list[str]:
    return [rest for word, rest in instructions(image) if word == name]


def copied(image: Path) -> list[str]:
    return [source for rest in arguments(image, "COPY") for source in shlex.split(rest)[:-1]]


def test_there_is_an_image_for_the_manager_and_one_for_instances():
    """Two definitions, each with its own list of what the builder may see."""
    assert [image.name for image in IMAGES] == ["instance.Dockerfile", "manager.Dockerfile"]
    assert all(Path(f"{image}.dockerignore").exists() for image in IMAGES)


@images
def test_the_base_is_pinned(image):
    """A full version of the base, and never `latest`."""
    for base in arguments(image, "FROM"):
        assert re.fullmatch(r"[a-z/]+:\d+\.\d+\.\d+-[a-z-]+", base), base


@images
def test_nothing_is_fetched_from_an_address(image):
    """No ADD, no curl, no wget: what is not a package is in the project."""
    for word, rest in instructions(image):
        assert word != "ADD"
        assert not re.search(r"https?://|\bcurl\b|\bwget\b|git clone", rest), rest


@images
def test_package_lists_are_removed(image):
    """Whoever installs with apt removes the lists in the same layer."""
    for rest in arguments(image, "RUN"):
        assert "apt" not in rest or "rm -rf /var/lib/apt/lists" in rest


@images
def test_it_does_not_run_as_root(image):
    """The last user is a named one that the image makes, and the program starts under it."""
    words = [word for word, _ in instructions(image)]
    user = arguments(image, "USER")[-1]
    assert user not in ("root", "0")
    assert any(
        f"useradd --uid 10001 --create-home {user}" in run for run in arguments(image, "RUN")
    )
    assert words.index("USER") < words.index("ENTRYPOINT")
    assert not {"RUN", "COPY"} & set(words[words.index("USER") :])


@images
def test_it_holds_no_secret(image):
    """Nothing that looks like one is set, neither when it is built nor for its whole life."""
    for word, rest in instructions(image):
        if word in ("ENV", "ARG", "LABEL"):
            assert not re.search(r"TOKEN|SECRET|PASSWORD|CREDENTIAL|_KEY", rest, re.IGNORECASE)
    assert not [source for source in copied(image) if source in (".", "./") or "*" in source]


@images
def test_its_program_gets_the_signals(image):
    """ENTRYPOINT and CMD are lists, so that no shell stands between the program and SIGTERM."""
    for name in ("ENTRYPOINT", "CMD"):
        assert all(rest.startswith("[") for rest in arguments(image, name))
    assert arguments(image, "ENTRYPOINT")


@images
def test_what_it_copies_exists_and_reaches_the_builder(image):
    """Every source is in the project and is let through by the image's own list."""
    let_through = [
        line[1:]
        for line in Path(f"{image}.dockerignore").read_text().splitlines()
        if line[:1] == "!"
    ]
    for source in copied(image):
        assert (ROOT / source).exists(), source
        assert any(fnmatch(source, name) or source.startswith(f"{name}/") for name in let_through)


@images
def test_the_scripts_that_it_starts_are_programs(image):
    """What ENTRYPOINT names was copied from a file that may be executed."""
    targets = {shlex.split(rest)[-1]: shlex.split(rest)[0] for rest in arguments(image, "COPY")}
    (entry,) = arguments(image, "ENTRYPOINT")
    program = ROOT / targets[entry.strip('[]"')]
    assert program.stat().st_mode & stat.S_IXUSR


@scripts
def test_a_script_is_strict(script):
    """POSIX sh, ends on the first error and on every name that is not set, says what it is for."""
    lines = script.read_text().splitlines()
    assert lines[0] == "#!/bin/sh"
    assert lines[1].startswith("# ")
    assert "set -eu" in lines
    assert not re.search(r"\[\[|^\s*(function|local|source)\b|<<<", code(script), re.M)


@scripts
def test_a_script_quotes_its_variables(script):
    """No word of a command is an unquoted expansion: a blank in a value changes nothing."""
    bare = re.sub(r"'[^']*'", "", code(script))
    quoted = re.compile(r'"(?:\\.|\$\([^()]*(?:\([^()]*\)[^()]*)*\)|[^"\\])*"')
    left = quoted.sub("", bare)
    assert "$" not in left, [line for line in left.splitlines() if "$" in line]


def code(script: Path) -> str:
    """Without the comments."""
    lines = script.read_text().splitlines()
    return "\n".join(line for line in lines if not line.lstrip().startswith("#"))
