"""`tools gc` on real clouds: one list, asked about once, and nothing foreign in it."""

import asyncio
import contextlib
import os
import pty
import signal
import subprocess
import sys
import time

import pytest
from cloudfake.arm import MANAGER
from test_check_clouds import arm, ec2, ec2_beside

from cloud.clock import VirtualClock
from cloud.model import DEPLOYMENT_TAG, LaunchRequest, Place, Pool, Ref
from orchestrator.cli.command import Command
from orchestrator.cli.tools.gc import Found, Held, Leftover, _end, known_state, unclaimed
from orchestrator.clouds import provider
from orchestrator.config import load
from orchestrator.state import State

assert ec2, arm  # fixtures
GPU = Pool(cloud="aws", region="us-east-1", zone="us-east-1a", type="g5.xlarge")
T4 = Pool(cloud="azure", region="eastus", zone="eastus-1", type="Standard_NC4as_T4_v3")
OURS = "default"


def bought(shell, token: str, pool: Pool, deployment: str = OURS) -> str:
    """A machine that nobody's journal knows."""
    config = load(shell.folder / "orchestrator.toml", os.environ)

    async def buy() -> str:
        cloud = provider(config, pool.cloud)
        request = LaunchRequest(
            token=token,
            pool=pool,
            market="spot",
            bid_usd_per_h=None,
            tags={DEPLOYMENT_TAG: deployment},
        )
        try:
            return (await cloud.launch(request))[0].id
        finally:
            await cloud.close()

    return asyncio.run(buy())


@pytest.fixture
def held(shell, ec2) -> dict[str, str]:
    """An hour ago: a machine of ours, what outlived one, one of another deployment, one by hand."""
    ec2.clock = VirtualClock(time.time() - 3600)
    ids = {"ours": bought(shell, "t-1", GPU), "gone": bought(shell, "t-2", GPU)}
    ids["theirs"] = bought(shell, "t-3", GPU, "theirs")
    account = ec2.account
    by_hand = bought(shell, "t-4", GPU)
    account.instances[by_hand].token = "by-hand"  # copied from one of ours
    gone = account.instances[ids["gone"]]
    ids["disk"] = next(iter(gone.volumes.values()))
    account.volumes[ids["disk"]].goes_along = False
    account.end(gone, ec2.clock.now_s(), "Client.UserInitiatedShutdown", "user")
    ec2.clock.advance_to(time.time() - 1800)
    return ids


def listed(answer) -> set[tuple[str, str]]:
    return {(one["kind"], one["id"]) for one in answer.json["leftovers"] if one["kind"] != "link"}


def test_what_is_listed_is_what_is_ended(shell, ec2, held):
    """With --yes exactly the dry run's list goes; other deployments and copies by hand stay."""
    wanted = {("machine", held["ours"]), ("disk", held["disk"])}
    assert listed(shell("tools", "gc", "--all", "--dry-run", "--json")) == wanted
    assert ec2.account.instances[held["ours"]].state != "shutting-down"
    assert listed(shell("tools", "gc", "--all", "--yes", "--json")) == wanted
    assert ec2.account.instances[held["ours"]].done
    assert ec2.account.volumes[held["disk"]].gone
    assert not ec2.account.instances[held["theirs"]].done
    assert listed(shell("tools", "gc", "--all", "--dry-run", "--json")) == set()
    assert not ec2.account.books.touched(OURS)


def test_without_a_manager_nothing_is_ended_and_what_is_held_is_said(shell, ec2, held):
    """The manager that owns it may run elsewhere, or come back."""
    answer = shell("tools", "gc", "--yes")
    assert answer.code == 0
    assert "2 things with our tag on real clouds, and no manager runs here" in answer.out
    assert not ec2.account.instances[held["ours"]].done


def test_without_a_yes_a_program_ends_nothing(shell, ec2, held):
    """There is nobody to ask."""
    answer = shell("tools", "gc", "--all")
    assert (answer.code, "--yes" in answer.line) == (2, True)
    assert not ec2.account.instances[held["ours"]].done


def test_when_no_manager_comes_back_a_young_machine_goes_too(shell, ec2):
    """No launch waits for its answer then, so nothing has to be spared."""
    young = bought(shell, "t-1", GPU)
    assert listed(shell("tools", "gc", "--all", "--yes", "--json")) == {("machine", young)}
    assert ec2.account.instances[young].done


def test_what_could_not_be_ended_is_said_and_counts_as_not_removed(shell, ec2, held):
    """A place that throttles the end keeps what it has, and the command fails."""
    ec2.fault = lambda action, nth: "throttle" if action == "TerminateInstances" else None
    answer = shell("tools", "gc", "--all", "--yes")
    assert answer.code == 1
    assert "could not be ended" in answer.out
    assert "is not known" not in answer.out
    assert "things removed" not in answer.out
    assert not ec2.account.instances[held["ours"]].done
    answer = shell("tools", "gc", "--all", "--yes", "--json")
    assert (listed(answer), len(answer.json["not_ended"])) == (set(), 1)


@pytest.mark.parametrize(
    ("said", "code"), [("n\n", 1), ("y\n", 0), ("\x04", 130), (signal.SIGINT, 130)]
)
def test_a_person_is_shown_the_list_and_asked(shell, ec2, held, said, code):
    """Whoever says no, or nothing, ends nothing."""
    leader, terminal = pty.openpty()
    program = subprocess.Popen(
        [sys.executable, "-m", "orchestrator", "tools", "gc", "--all"],
        cwd=shell.folder,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        close_fds=True,
    )
    os.close(terminal)
    shown = b""
    while b"End 2 things on real clouds?" not in shown:
        shown += os.read(leader, 4096)
    assert held["disk"].encode()[:8] in shown
    if isinstance(said, str):
        os.write(leader, said.encode())
    else:
        # Python may see it only with the next one, if it was not waiting for an answer yet.
        while program.poll() is None:
            program.send_signal(said)
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.wait(5.0)
    assert program.wait(60) == code
    shown = os.read(leader, 4096)
    os.close(leader)
    assert (b"interrupted" in shown) == (code == 130)
    assert b"Traceback" not in shown
    assert ec2.account.instances[held["ours"]].done == (code == 0)


def test_a_region_that_does_not_answer_is_said_and_fails(shell, ec2, held):
    """Silence is not "nothing is left": the exit code says so."""
    ec2.silent.add("us-east-1")
    answer = shell("tools", "gc", "--all", "--dry-run")
    assert answer.code == 1
    assert "aws/us-east-1: AWS, us-east-1, describe_instances" in answer.out
    assert "what is there is not known" in answer.out
    assert "nothing is left over" not in answer.out


def test_disks_and_interfaces_of_azure_are_listed_and_deleted(shell, arm):
    """A failed creation left them; a machine of another deployment stays."""
    arm.clock = VirtualClock(time.time() - 3600)
    arm._tokens.clear()
    assert arm.speaker == MANAGER
    arm.dials = type(arm.dials)(failed=1.0, stranded=1.0, delete_s=(1, 1))
    bought(shell, "t-1", T4)
    arm.clock.advance_to(time.time() - 1800)
    kinds = {kind for kind, _ in listed(shell("tools", "gc", "--all", "--dry-run", "--json"))}
    assert kinds == {"machine"}
    shell("tools", "gc", "--all", "--yes")
    arm.clock.advance_to(time.time() - 900)
    kinds = {kind for kind, _ in listed(shell("tools", "gc", "--all", "--yes", "--json"))}
    assert kinds == {"disk", "nic"}
    assert not arm.books.alive(OURS)
    assert not arm.books.touched(OURS)


def test_what_a_namesake_holds_is_counted_and_not_listed():
    """The manager has seen it launched by another one; a token that no manager made is nobody's."""
    known = State(namesakes={"00000000000a": None})
    tokens = ("ours-00000000000a-1-1", "ours-00000000000b-1-1", "by-hand")
    held = [Held(Ref(Place("aws", "us-east-1"), token), token, "machine") for token in tokens]
    assert unclaimed(held, known) == (held[1:], 1)


@pytest.mark.processes
def test_what_a_lease_claims_is_never_listed(own_house, until, monkeypatch):
    """A machine with the token of a lease stays; one whose token nobody knows is listed."""
    own_house.script("wait.py", "x = 'wait'\n")
    assert own_house("submit", "wait.py").code == 0
    url = own_house.client().house().redis_url

    def at_work() -> list[str]:
        """Tokens of machines that are here: a launch that takes its time is given up."""
        known = asyncio.run(known_state(url)).leases
        return sorted(token for token, lease in known.items() if lease.workers)

    until(at_work)
    claimed = at_work()[0]
    with ec2_beside(own_house, monkeypatch) as door:
        door.clock = VirtualClock(time.time() - 3600)
        ours, strange = bought(own_house, claimed, GPU), bought(own_house, "t-1", GPU)
        assert listed(own_house("tools", "gc", "--dry-run", "--json")) == {("machine", strange)}
        assert listed(own_house("tools", "gc", "--yes", "--json")) == {("machine", strange)}
        assert not door.account.instances[ours].done
        ref = Ref(Place("aws", "us-east-1"), ours)
        thing = Leftover(kind="machine", id=ours, why="claimed while a person was asked")
        found = Found(things={ref: thing}, held={ref: Held(ref, claimed, "machine")})
        with contextlib.chdir(own_house.folder):
            asyncio.run(_end(Command(None, {}, json=True), found))
        assert (found.things, found.claimed) == ({}, 1)
        assert not door.account.instances[ours].done
