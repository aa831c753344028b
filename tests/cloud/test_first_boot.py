"""The first-boot script: one text for all machines of a recipe, without a secret."""

import subprocess
from pathlib import Path

import pytest

from cloud.first_boot import ENDS, user_data

GIVEN = {
    "door": "10.0.0.4:7443",
    "fingerprint": "ab" * 32,
    "deployment": "default",
    "cloud": "aws",
    "silent_after_s": 600.0,
}
USER_DATA_MAX = 16_384  # on EC2, before base64


@pytest.mark.parametrize("cloud", sorted(ENDS))
def test_it_is_one_small_script_that_a_plain_shell_understands(cloud: str):
    """It begins as cloud-init wants it, `sh -n` reads it, and the same values give the same text."""
    text = user_data(**{**GIVEN, "cloud": cloud})
    read = subprocess.run(["sh", "-n"], input=text, capture_output=True, text=True)
    assert (read.returncode, read.stderr) == (0, "")
    assert text.startswith("#!/bin/sh\n")
    assert len(text.encode()) < USER_DATA_MAX
    assert text == user_data(**{**GIVEN, "cloud": cloud})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("door", "10.0.0.4"),
        ("door", "10.0.0.4:0"),
        ("door", "10.0.0.4:70000"),
        ("door", "$(reboot):7443"),
        ("door", "[fe80::1%$(reboot)]:7443"),
        ("door", "manager.example:7443"),
        ("fingerprint", "AB" * 32),
        ("fingerprint", "ab" * 31 + "; "),
        ("fingerprint", "ab" * 32 + "\n"),
        ("deployment", "ours; reboot"),
        ("deployment", "ours\n"),
        ("deployment", ""),
        ("cloud", "gcp"),
        ("silent_after_s", 0.0),
        ("silent_after_s", float("nan")),
        ("silent_after_s", float("inf")),
    ],
)
def test_what_is_no_value_does_not_reach_the_shell(name: str, value: object):
    """The text is run as root, so each value has its form and nothing else."""
    with pytest.raises(ValueError):
        user_data(**{**GIVEN, name: value})


@pytest.mark.parametrize("cloud", ["aws", "azure"])
def test_a_machine_that_is_rebooted_runs_it_again(cloud: str, tmp_path: Path):
    """cloud-init runs user data once, and what it finds in `per-boot` at every boot."""
    made, said = tmp_path / "cloud", tmp_path / "said"
    first = made / "instance" / "scripts" / "part-001"
    first.parent.mkdir(parents=True)
    first.write_text(user_data(**{**GIVEN, "cloud": cloud}))
    tools = tmp_path / "bin"
    tools.mkdir()
    # What ends the machine's bill also ends this script, as it ends everything on the machine.
    for name, text in (
        ("python", 'echo "$@" >> "$SAID"; case "$*" in *own_end) kill $PPID;; esac'),
        ("shutdown", 'echo shutdown >> "$SAID"; kill $PPID'),
    ):
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o700)
    env = {
        "PATH": f"{tools}:/usr/bin:/bin",
        "SAID": str(said),
        "SPOT_PYTHON": str(tools / "python"),
        "SPOT_CLOUD_INIT": str(made),
    }
    again = made / "scripts" / "per-boot" / "spot-orchestrator"
    for script in (first, again, again):
        subprocess.run(["sh", script], env=env, timeout=60, check=False)
    join, end, *more = said.read_text().splitlines()
    assert join.startswith("-P -m agent.machine.join --door 10.0.0.4:7443")
    assert end == ("shutdown" if cloud == "aws" else "-P -m cloud.azure.own_end")
    assert more == 2 * [join, end]
    assert [path.name for path in again.parent.iterdir()] == ["spot-orchestrator"]
    assert again.stat().st_mode & 0o777 == 0o700
