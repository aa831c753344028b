"""The commands with which docs/real-cloud.md begins, typed as they stand there."""

import re
import shlex
import time

from test_check_clouds import ec2
from test_cli_docs import ROOT
from test_gc_clouds import GPU, bought

from cloud.clock import VirtualClock

assert ec2  # a fixture
# A terminal would be asked; `up` starts a house, which other tests do; keys of a drill are its own.
ANSWERS = ("--region", "us-east-1", "--types", "g5.*", "--bucket", "states")
MORE = {
    "orchestrator init --cloud aws": ANSWERS,
    "orchestrator init --cloud aws --region us-west-2": ANSWERS[-2:],
    "orchestrator tools drill --cloud aws": (
        "--yes",
        "--set",
        "aws.drill_role=arn:aws:iam::111122223333:role/drill",
    ),
    "orchestrator tools gc --all": ("--yes",),
}
LEFT_OUT = ("orchestrator up", "orchestrator down")


def test_every_line_of_the_first_time_works(shell, ec2):
    """On an account that is whole, with a machine for the drill to take."""
    text = (ROOT / "docs/real-cloud.md").read_text()
    every = re.findall(r"`(orchestrator [^`]*)`", text)
    lines = [line for line in dict.fromkeys(every) if not line.startswith(LEFT_OUT)]
    assert len(lines) >= 8
    shell.script("train.py")
    ec2.clock = VirtualClock(time.time() - 3600)
    bought(shell, "t-1", GPU)
    ec2.clock.advance_to(time.time() - 1800)
    before = (shell.folder / "orchestrator.toml").read_text()
    for line in lines:
        answer = shell(*shlex.split(line)[1:], *MORE.get(line, ()))
        held = line == "orchestrator check"  # by a manager of our name, as it says
        assert answer.code == (1 if held else 0), f"{line}: {answer.err or answer.out}"
        shell.script("orchestrator.toml", before)
    assert not [x for x in ec2.account.instances.values() if not x.done]
