"""A person's mistakes: one line that says what, where and what to do; never a traceback."""

import errno
import json
import os
import resource
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from shells import PROGRAM, Answer
from test_cli_docs import listed

from orchestrator.__main__ import main as start
from orchestrator.cli import main
from orchestrator.cli.command import INTERRUPTED
from orchestrator.client import Client
from orchestrator.supervisor import processes
from orchestrator.supervisor.supervisor import only_one

MISTAKES = [  # what is typed, how it ends, and what is said
    ("nope", 2, "No such command 'nope'"),
    ("submit ok.py --buget 5", 2, "--buget"),
    ("submit", 2, "script"),
    ("submit ok.py --budget much", 2, "valid number"),
    ("submit ok.py --budget=-1", 2, "--budget -1.0: an amount in US dollars"),
    ("submit none.py", 2, "none.py: no such file"),
    ("submit folder", 2, "folder: a directory; name the script in it"),
    (
        "up --set manager.state_dir=ok.py",
        1,
        "ok.py cannot be the state directory (File exists); set manager.state_dir",
    ),
    ("submit queue", 2, "queue: not a file"),
    ("status --config queue", 2, "queue: cannot be read: not a file"),
    ("plan ok.py --set local.prices=queue", 2, "local.prices: "),
    ("plan queue --on 2", 2, "queue: cannot be read ("),
    ("init --cloud aws --config queue", 2, "queue: cannot be read: not a file"),
    ("init --cloud aws --outputs queue", 2, "--outputs queue: not a file"),
    (
        "init --cloud azure --ssh-key queue --region eastus --types D2 --subscription 00000000-0000-0000-0000-000000000000",
        2,
        "queue: holds no public key",
    ),
    ("tools replay queue", 2, "queue: cannot be read: not a file"),
    ("tools replay folder", 2, "folder: cannot be read: Is a directory"),
    ("submit ok.py/x.py", 2, "ok.py/x.py: cannot be read: Not a directory"),
    ("submit /proc/self/mem", 2, "/proc/self/mem: cannot be read"),
    ("submit words.txt", 2, "words.txt: not a Python script; name one that ends in .py"),
    ("submit empty.py", 2, "empty.py: nothing in it would run; name the script that trains"),
    ("submit remarks.py", 2, "remarks.py: nothing in it would run"),
    ("submit binary.py", 2, "binary.py:1: not Python: "),
    ("submit null.py", 2, "null.py: not Python"),
    ("submit wrong.py", 2, "wrong.py:2: not Python: "),
    ("submit imports.py", 2, "mymodel.py:2: not Python: "),
    ("plan nested.py", 2, "package/model.py:1: not Python: "),
    (
        "submit clouded.py",
        2,
        "clouded.py:1: imports cloud.py, which lies beside the script and has the name",
    ),
    ("submit named.py", 2, "named.py:2: imports code.py, which lies beside"),
    ("submit ok.py --with ''", 2, "--with: the name is empty; for this whole folder, --with ."),
    ("submit ok.py --with '*.yaml'", 2, "--with *.yaml: no such file"),
    ("submit ok.py --with '~nosuch/x'", 2, "--with ~nosuch/x: ~nosuch is nobody's home"),
    (f"submit ok.py --with {'x' * 5000}", 2, "File name too long"),
    ("submit ok.py --with queue", 2, "--with queue: queue: not a file"),
    ("submit ok.py --with /etc/hostname", 2, "/etc/hostname: lies outside of "),
    ("submit ok.py --with .orchestrator", 2, "what the manager keeps for itself"),
    (
        "submit ok.py --with bulk",
        2,
        "put data into object storage, and let the script fetch it from there; the largest: bulk/much.bin 67,108,864",
    ),
    ("submit large.py", 2, "large.py: larger than 1,048,576 bytes"),
    (
        "submit huge.py --set limits.script_bytes=67108864",
        2,
        "huge.py: larger than 16,777,216 bytes",
    ),
    ("submit ok.py --deadline soon", 2, "--deadline soon: write 90m"),
    ("submit ok.py --deadline 999999999999999d", 2, "at most 3,650 days from now"),
    ("submit ok.py --deadline 9999-01-01", 2, "at most 3,650 days from now"),
    ("submit ok.py --slots-min -1", 2, "option --slots-min: job.slots_min: found -1"),
    ("submit ok.py --max-failures -1", 2, "option --max-failures: "),
    ("status --set job.nan", 2, "--set job.nan: write it as KEY=VALUE"),
    ("status --set job.naan=1", 2, "did you mean job.nan?"),
    ("submit ok.py --slots-min 9", 2, "slots_min = 9 is above slots_max = 4"),
    ("status --config no.toml", 2, "no.toml: no such file"),
    ("up --config wrong.toml", 2, 'wrong.toml:2: job.slots_max: found "x"'),
    ("submit ok.py", 3, "start it with: orchestrator up"),
    ("status", 3, "nothing is running in "),
    ("logs", 3, "nothing is running in "),
    ("events", 3, "nothing is running in "),
    ("cost", 3, "nothing is running in "),
    ("cancel", 3, "nothing is running in "),
    ("resume", 3, "nothing is running in "),
    ("tools drill", 3, "nothing is running in "),
    ("tools dashboard", 3, "nothing is running in "),
    ("tools drill --warning -1", 2, "--warning -1: seconds from 0"),
    ("tools drill --nodes 0", 2, "--nodes 0: a number from 1 to 10000, or all"),
    ("tools simulate --days 0", 2, "--days 0: above 0"),
    ("tools simulate --days 0.01 --journal folder", 1, "folder"),
    ("tools replay ok.py", 2, "ok.py:1: not a journal entry"),
    ("tools replay none.jsonl", 2, "none.jsonl: no such file"),
    ("tools replay", 3, "nothing is running in "),
    ("tools backtest --billing free", 2, "--billing 'free' is not one of"),
    ("tools backtest --strategy luck", 2, "--strategy 'luck' is not one of"),
    ("tools backtest --data none", 2, "--data none: no such folder"),
    ("plan ok.py --step-s 0", 2, "--step-s 0: seconds above 0"),
    ("plan ok.py --set local.prices=none.json", 2, "local.prices: "),
    ("up --set local.enabled=false", 1, "no cloud is enabled"),
    ("plan ok.py --set local.enabled=false", 2, "no cloud is enabled"),
]


@pytest.fixture
def desk(shell, monkeypatch):
    """A folder with everything that can be wrong with a script, where no other test's manager is seen."""
    monkeypatch.setattr(processes, "homes", list)
    shell.script("ok.py")
    shell.script("wrong.py", "x = 1\ndef (:\n")
    shell.script("words.txt", "words\n")
    shell.script("empty.py", "")
    shell.script("remarks.py", '# some\n"""and more"""\n')
    shell.script("mymodel.py", "import json\nclass Net(:\n")
    (shell.folder / "package").mkdir()
    shell.script("package/__init__.py", "")
    shell.script("package/model.py", "def (")
    shell.script("cloud.py")
    shell.script("code.py")
    shell.script("imports.py", "import json\nfrom mymodel import Net\n")
    shell.script("nested.py", "def main():\n    import package.model\n")
    shell.script("clouded.py", "import cloud\n")
    shell.script("named.py", "import agent\nimport code\n")
    (shell.folder / ".orchestrator").mkdir()
    (shell.folder / "bulk").mkdir()
    os.truncate(shell.folder / shell.script("bulk/much.bin"), 64 << 20)
    shell.script("wrong.toml", '[job]\nslots_max = "x"\n')
    (shell.folder / "folder").mkdir()
    os.mkfifo(shell.folder / "queue")
    (shell.folder / "binary.py").write_bytes(b"\x7fELF\xff\xfe" * 100)
    (shell.folder / "null.py").write_bytes(b"x = 1\x00\n")
    (shell.folder / "large.py").write_bytes(b"#" * (1_048_576 + 1))
    (shell.folder / "huge.py").write_bytes(b"#" * (16 * 1024 * 1024 + 1))
    return shell


@pytest.mark.parametrize(("typed", "code", "part"), MISTAKES, ids=[row[0][:60] for row in MISTAKES])
def test_a_mistake_is_one_line_and_an_exit_code(desk, typed, code, part):
    """With --json the same line is in a document on the standard output."""
    words = shlex.split(typed)
    plain, document = desk(*words), desk(*words, "--json")
    assert part in plain.line
    assert (plain.code, plain.out) == (code, "")
    assert document.json == {"error": plain.line, "exit_code": code}
    assert document.code == code


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"\xff\xfe", b"[]", b'{"pid": "x"}', b'{"pid": 1}', b"null"],
    ids=["empty", "cut off", "not text", "a list", "a word", "half of it", "null"],
)
def test_a_garbled_note_of_the_house_is_no_house(shell, text):
    """What cannot be read means that nothing is running, and the remedy is to start it."""
    shell.places.make()
    shell.places.house.write_bytes(text)
    answer = shell("status")
    assert answer.code == 3
    assert "start it with: orchestrator up" in answer.line


def test_a_house_that_starts_is_told_from_one_that_never_was(shell):
    """Its lock is held, its note is not there yet."""
    with only_one(shell.places):
        answer = shell("status")
    assert (answer.code, "is just starting or ending" in answer.line) == (3, True)


@pytest.mark.processes
def test_a_house_is_not_begun_under_limits_that_it_cannot_live_with(shell):
    """Ray would wait for minutes, and not say for what."""

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    program = Path(sys.executable).with_name("orchestrator")
    ran = subprocess.run(
        [program, "up"], cwd=shell.folder, capture_output=True, text=True, preexec_fn=limit
    )
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.startswith(
        "orchestrator: files may have 1,048,576 bytes at most here (ulimit -f)"
    )


@pytest.mark.parametrize("command", ["submit", "rehearse"])
@pytest.mark.parametrize("place", ["script", "argument", "missing", "beside"])
def test_a_name_that_is_no_text_is_refused_in_a_line(shell, place, command):
    """A folder of an old machine has names in Latin-1; they came as a traceback, after the upload."""
    name = "tr\udcff.py"
    shell.script("ok.py")
    if place in ("script", "beside"):
        shell.script(name)
    words = ["ok.py", "--", name] if place == "argument" else [name]
    if place == "beside":
        words = ["--with", name, "ok.py"]
    said = "no such file" if place == "missing" else "a name or an argument that is not UTF-8"
    answer = shell(command, "--json", *words)
    assert (answer.code, answer.line.startswith(f"tr\\udcff.py: {said}")) == (2, True)
    assert answer.json["error"] == answer.line


@pytest.mark.parametrize(
    "words", [["status"], ["up"], ["check"], ["output"], ["cost", "--by", "cause"]]
)
def test_a_folder_that_is_no_text_is_refused_in_a_line(tmp_path, words):
    """It came as a traceback, from every command."""
    folder = tmp_path / "caf\udce9"
    folder.mkdir()
    asked = [PROGRAM, *words]
    answer = subprocess.run(asked, cwd=folder, capture_output=True, text=True, check=False)
    refusal = "caf\\udce9/.orchestrator cannot be the state directory (its path is not UTF-8); set manager.state_dir"
    assert refusal in Answer(answer.returncode, answer.stdout, answer.stderr).line


def test_a_house_that_was_killed_is_told_from_one_that_never_was(shell):
    """Its note is there, its process is not; the line names the process."""
    shell.places.make()
    ended = os.spawnlp(os.P_WAIT, "true", "true")
    assert ended == 0
    note = {
        "pid": 2**22 - 1,
        "redis_url": "unix:///nowhere",
        "dashboard_url": "",
        "ray_address": "",
        "local_cloud": "",
        "deployment": "default",
        "started_at_s": 0.0,
    }
    for pid in (note["pid"], os.getpid()):  # after a restart of the machine it is another's
        shell.places.house.write_text(json.dumps(note | {"pid": pid}))
        answer = shell("status")
        assert (answer.code, "has ended without saying so" in answer.line) == (3, True)
        assert shell("down", "--force").code == 0


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_whoever_has_closed_an_output_gets_the_exit_code(shell, monkeypatch, closed):
    """`orchestrator status >&-`: Python has no stream there then."""
    monkeypatch.chdir(shell.folder)
    monkeypatch.setattr(sys, closed, None)
    assert main(["status"]) == 3


def test_the_installed_program_ends_with_the_same_codes(shell):
    """What the entry point returns reaches the shell, and the help names every command."""
    assert shell.ended(shell.start("status")).code == 3
    helped = shell.ended(shell.start("--help"))
    assert helped.code == 0
    for name in ("init", "demo", "up", "submit", "status", "down", "tools"):
        assert f"\n  {name} " in helped.out


def test_without_a_command_there_is_the_help_as_it_is(shell):
    helped = shell()
    assert (helped.code, helped.err) == (2, "")
    assert helped.out == shell("--help").out
    assert shell("tools").out == shell("tools", "--help").out


def test_the_version_is_the_installed_one(shell):
    with (Path(__file__).parents[2] / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    assert shell("--version").out == f"orchestrator {project['version']}\n"


def test_every_command_has_a_short_help(shell):
    """A screen at most, and the three options that every command has."""
    for name in listed(shell):
        if name != "tools":
            text = shell(*name.split(), "--help").out
            assert len(text.splitlines()) <= 40, name
            assert all(option in text for option in ("--config", "--set", "--json")), name


def test_an_output_that_takes_nothing_is_one_line(tmp_path):
    """Also for a program, which hears of it by the code."""
    words = [
        sys.executable,
        "-c",
        "import sys; from orchestrator.cli import main; sys.exit(main())",
    ]
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(
            [*words, "status", "--json"],
            cwd=tmp_path,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert (ran.returncode, ran.stderr.count("\n")) == (3, 1), ran.stderr


def test_what_the_system_refuses_comes_with_the_place(monkeypatch, capsys):
    """Its own words name no file, and there is nothing else to go by."""

    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(Client, "connect", refused)
    assert main(["status"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(
        "orchestrator: the system said: Invalid argument (test_cli_errors.py, line "
    )
    assert said.endswith(", refused); look with: orchestrator check\n")


def test_ctrl_c_while_the_command_is_imported_is_no_traceback(monkeypatch):
    """It takes half a second, and a person may have changed their mind by then."""

    class Impatient:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "orchestrator.cli":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "orchestrator.cli")
    monkeypatch.setattr(sys, "meta_path", [Impatient(), *sys.meta_path])
    assert start() == INTERRUPTED
