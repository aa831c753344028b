"""Machines of the local cloud are real processes, and none of them outlives its machine."""

import asyncio
import os
import resource
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from running_cloud import POOLS, QUIET, SLEEPING, RunningCloud, alive_on, request, until

from cloud.clock import SystemClock
from cloud.errors import NotAllowed, Refused, Throttled, TokenSpent, Unknown
from cloud.local import processes, service
from cloud.local.__main__ import arguments, service_of
from cloud.local.provider import LocalProvider
from cloud.local.short_path import SHORT, leads
from cloud.model import Machine
from cloud.provider import all_machines

pytestmark = pytest.mark.processes

NewCloud = Callable[..., RunningCloud]

DETACHING = """#!/bin/sh
setsid sh -c '(sleep 601 & : > detached; exec sleep 602) &'
setsid env -i PATH="$PATH" sh -c '(: > unmarked; exec sleep 603) &'
while ! [ -e detached ] || ! [ -e unmarked ]; do sleep 0.01; done
: > ready
exec sleep 600
"""
POLITE = """#!/bin/sh
trap ': > asked; exit 0' TERM
: > ready
while :; do sleep 0.05; done
"""
DEAF = """#!/bin/sh
trap '' TERM
: > ready
while :; do sleep 0.05; done
"""


def ask(
    cloud: RunningCloud,
    what: Callable[[LocalProvider], Awaitable[object]],
    deployment: str = "ours",
) -> object:
    async def asked() -> object:
        provider = cloud.provider(deployment)
        try:
            return await what(provider)
        finally:
            await provider.close()

    return asyncio.run(asked())


def launch(cloud: RunningCloud, token: str = "t-1") -> Machine:
    return ask(cloud, lambda provider: provider.launch(request(token)))[0]


def machine(cloud: RunningCloud, machine_id: str) -> Machine:
    listed = ask(cloud, all_machines)
    return next(machine for machine in listed if machine.id == machine_id)


def disk(cloud: RunningCloud, of: Machine) -> Path:
    return cloud.directory / "machines" / of.id


def booted(cloud: RunningCloud, token: str = "t-1", sign: str = "ready") -> Machine:
    """A machine whose first-boot script has left its sign on the disk."""
    given = launch(cloud, token)
    until("the first-boot script to have run", (disk(cloud, given) / sign).exists)
    return given


def tree_of(cloud: RunningCloud, of: Machine) -> set[int]:
    """Every process below the machine's init, and init: also those that carry no mark."""
    found = {until("the init", lambda: cloud.init_of(of.id))}
    while True:
        lists = [Path(f"/proc/{pid}/task/{pid}/children").read_text().split() for pid in found]
        grown = found | {int(child) for children in lists for child in children}
        if grown == found:
            return found
        found = grown


def gone(pids: set[int]) -> Callable[[], bool]:
    return lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids)


# The end of a machine


def test_what_detaches_dies_with_its_machine(new_cloud: NewCloud):
    """Double forks, new sessions and an emptied environment do not save a process from an eviction."""
    cloud = new_cloud(boot=DETACHING).start()
    pids = tree_of(cloud, booted(cloud))
    assert len(pids) >= 5
    ask(cloud, lambda provider: provider.drill(warning_s=0, nodes="all"))
    until("every process to be gone", gone(pids))


def test_other_machines_are_left_alone(new_cloud: NewCloud):
    """A drill for one takes the oldest one, wholly, and no process of another."""
    cloud = new_cloud(boot=DETACHING).start()
    first, second = booted(cloud, "t-1"), booted(cloud, "t-2")
    taken, kept = tree_of(cloud, first), tree_of(cloud, second)
    assert ask(cloud, lambda provider: provider.drill(warning_s=0, nodes=1)) == [first.id]
    until("the first machine to be gone", gone(taken))
    assert all(Path(f"/proc/{pid}").exists() for pid in kept)
    assert machine(cloud, second.id).state == "running"


def test_one_that_is_going_anyway_is_taken_last(new_cloud: NewCloud):
    """The loss of a machine that has a notice, and whose work is elsewhere already, is none."""
    cloud = new_cloud(boot=DETACHING).start()
    first, second = booted(cloud, "t-1"), booted(cloud, "t-2")
    assert ask(cloud, lambda provider: provider.drill(warning_s=600, nodes=1)) == [first.id]
    for expected in (second.id, first.id):
        assert ask(cloud, lambda provider: provider.drill(warning_s=0, nodes=1)) == [expected]


def test_a_warned_machine_lives_until_its_deadline(new_cloud: NewCloud):
    """Its processes run while the warning does, and are killed when it is over."""
    cloud = new_cloud(boot=DETACHING).start()
    given = booted(cloud)
    pids = tree_of(cloud, given)
    asked_s = time.time()
    ask(cloud, lambda provider: provider.drill(warning_s=1, nodes="all"))
    until("every process to be gone", gone(pids))
    ended = machine(cloud, given.id)
    assert (ended.state, ended.ended_by) == ("terminated", "provider")
    assert ended.ended_at_s is not None
    assert ended.ended_at_s >= asked_s + 1


def test_a_terminated_machine_is_asked_before_it_is_killed(new_cloud: NewCloud):
    """Terminate is the power button: the script may end by itself."""
    cloud = new_cloud(boot=POLITE).start()
    given = booted(cloud)
    pids = tree_of(cloud, given)
    ask(cloud, lambda provider: provider.end([given.ref]))
    until("every process to be gone", gone(pids))
    assert (disk(cloud, given) / "asked").exists()


def test_a_machine_that_does_not_listen_is_killed(new_cloud: NewCloud):
    """A script that ignores SIGTERM ends a few seconds later all the same."""
    cloud = new_cloud(boot=DEAF).start()
    given = booted(cloud)
    pids = tree_of(cloud, given)
    ask(cloud, lambda provider: provider.end([given.ref]))
    until("every process to be gone", gone(pids))


def test_a_machine_that_dies_slowly_takes_no_other_along(tmp_path: Path, monkeypatch):
    """No time to kill one in, as on a busy computer: the cloud goes on, and kills it when there is some."""
    boot = tmp_path / "boot.sh"
    boot.write_text(SLEEPING)
    boot.chmod(0o700)
    words = ["--dir", str(tmp_path), "--boot-script", str(boot), *QUIET]
    monkeypatch.setattr(processes, "PATIENCE_S", 0.0)
    monkeypatch.setattr(service, "INSIST_S", 0.0)
    monkeypatch.setattr(service, "SHUTDOWN_S", 0.02)

    async def play() -> None:
        clock = SystemClock()
        cloud = service_of(arguments().parse_args(words), clock)
        running = asyncio.create_task(cloud.run())
        slow, other = (cloud.core.launch(request(token), clock.now_s()) for token in ("a", "b"))
        cloud.nudge()
        async with asyncio.timeout(30):
            while set(cloud._hosts) != {slow.id, other.id}:
                await asyncio.sleep(0.02)
            pid = cloud._hosts[slow.id].init.pid
            cloud.core.revoke([slow.id], clock.now_s(), 0.0)
            cloud.nudge()
            while str(pid) not in tmp_path.joinpath("said").read_text():
                await asyncio.sleep(0.02)
            assert set(cloud._hosts) == {slow.id, other.id}
            monkeypatch.undo()
            while slow.id in cloud._hosts:
                await asyncio.sleep(0.02)
        assert set(cloud._hosts) == {other.id}
        assert not running.done()
        running.cancel()
        await cloud.stop()

    with (tmp_path / "said").open("w") as said:
        monkeypatch.setattr(service.sys, "stderr", said)
        asyncio.run(play())


def test_a_machine_whose_script_ends_is_switched_off(new_cloud: NewCloud):
    """A failed first boot costs no more money; what it said is on its console."""
    cloud = new_cloud(boot="#!/bin/sh\necho no head to join >&2\nexit 3\n").start()
    given = launch(cloud)
    until("it to be off", lambda: machine(cloud, given.id).state == "terminated")
    assert machine(cloud, given.id).ended_by == "user"
    assert "no head to join" in (disk(cloud, given) / "console.log").read_text()


def test_what_machines_print_and_leave_is_bounded(new_cloud: NewCloud):
    """The console of one that lives is cut, and of the disks of those that are gone the newest are kept."""
    cloud = new_cloud(boot="#!/bin/sh\nhead -c 6000000 /dev/zero\nexec sleep 600\n")
    for number in range(20):
        (gone := cloud.directory / "machines" / f"gone-{number}").mkdir(parents=True)
        os.utime(gone, (number, number))
    cloud.start()
    given = launch(cloud)
    console = disk(cloud, given) / "console.log"
    until("what it printed to be aside", console.with_name("console.log.old").exists)
    until("the console to be cut", lambda: console.stat().st_size < 4_000_000)
    left = {path.name for path in console.parent.parent.iterdir()} - {given.id}
    assert left == {f"gone-{number}" for number in range(12, 20)}


def test_a_script_that_cannot_run_is_one_line(new_cloud: NewCloud):
    """A first-boot script that is no program ends the machine, with the reason on its console."""
    cloud = new_cloud()
    cloud.boot_script.write_text("#!/no/such/interpreter\n")
    cloud.start()
    given = launch(cloud)
    until("it to be off", lambda: machine(cloud, given.id).state == "terminated")
    said = (disk(cloud, given) / "console.log").read_text()
    assert said.startswith(f"{cloud.boot_script} cannot run: ")
    assert said.count("\n") == 1


# The end of the cloud


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_the_cloud(new_cloud: NewCloud, number: signal.Signals):
    """Killed with -9 or asked to end, the cloud takes every process of every machine along."""
    cloud = new_cloud(boot=DETACHING).start()
    machines = [booted(cloud, f"t-{nth}") for nth in range(2)]
    pids = set[int]().union(*(tree_of(cloud, given) for given in machines))
    cloud.stop(number)
    until("every process to be gone", gone(pids))
    assert not alive_on({given.id for given in machines})


def test_a_killed_cloud_finds_its_books_again(new_cloud: NewCloud):
    """The bill survives, machines have ended, spent tokens stay spent, and ids do not come again."""
    cloud = new_cloud().start()
    given, kept = launch(cloud, "t-1"), launch(cloud, "t-2")
    until("it to run", lambda: machine(cloud, kept.id).state == "running")
    ask(cloud, lambda provider: provider.end([given.ref]))
    before = ask(cloud, lambda provider: provider.bill())
    until("a bill above nothing", lambda: ask(cloud, lambda p: p.bill())[kept.id] > 0)
    cloud.stop(signal.SIGKILL)
    cloud.start()
    after = ask(cloud, lambda provider: provider.bill())
    assert after[given.id] == pytest.approx(before[given.id])
    assert set(after) == {given.id, kept.id}
    assert [machine(cloud, given.id).ended_by, machine(cloud, kept.id).ended_by] == [
        "user",
        "provider",
    ]
    with pytest.raises(TokenSpent):
        launch(cloud, "t-2")
    assert launch(cloud, "t-3").id not in after


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_cloud_that_comes_back_is_where_it_was(new_cloud: NewCloud, number: signal.Signals):
    """A customer knows one address; the next cloud of the directory answers there."""
    cloud = new_cloud().start()
    known = cloud.provider()
    cloud.stop(number)
    cloud.start()

    async def look() -> object:
        try:
            return await known.quotes(POOLS["ec2"].place)
        finally:
            await known.close()

    assert asyncio.run(look())


def test_a_launch_is_in_the_books_before_it_is_answered(new_cloud: NewCloud):
    """A cloud that is killed right after its answer still knows the machine."""
    cloud = new_cloud().start()
    given = launch(cloud)
    cloud.stop(signal.SIGKILL)
    cloud.start()
    assert machine(cloud, given.id).state == "terminated"


def test_an_end_that_was_told_is_in_the_books(new_cloud: NewCloud):
    """A cloud that is killed right after it says when a machine ended says the same later."""
    cloud = new_cloud().start()
    given = launch(cloud)
    os.kill(until("the init", lambda: cloud.init_of(given.id)), signal.SIGKILL)
    until("its end to be told", lambda: machine(cloud, given.id).gone)
    told = machine(cloud, given.id)
    cloud.stop(signal.SIGKILL)
    cloud.start()
    assert machine(cloud, given.id) == told


def test_a_market_goes_on_where_it_was(new_cloud: NewCloud):
    """Quotes after a restart are those of the same market, not of a new one."""
    cloud = new_cloud().start("--tempo", "1")
    before = ask(cloud, lambda provider: provider.quotes(POOLS["ec2"].place))
    launch(cloud)
    cloud.stop(signal.SIGKILL)
    cloud.start("--tempo", "1")
    assert ask(cloud, lambda provider: provider.quotes(POOLS["ec2"].place)) == before


# Bad days


def test_a_full_disk_sells_nothing_and_takes_nothing(new_cloud: NewCloud):
    """Launches are refused by name while nothing can be written, not even what is wrong; running machines go on, and
    can be given back.
    """
    cloud = new_cloud(boot=DETACHING).start()
    given, other = booted(cloud), booted(cloud, "t-0")
    assert cloud.process is not None
    _, hard = resource.prlimit(cloud.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(cloud.process.pid, resource.RLIMIT_FSIZE, (0, hard))
    with pytest.raises(Refused, match="books cannot be written"):
        launch(cloud, "t-2")
    ask(cloud, lambda provider: provider.end([other.ref]))
    assert machine(cloud, other.id).state == "terminated"
    assert machine(cloud, given.id).state == "running"
    resource.prlimit(cloud.process.pid, resource.RLIMIT_FSIZE, (hard, hard))
    launch(cloud, "t-3")
    assert machine(cloud, given.id).state == "running"


def test_a_second_cloud_on_the_same_directory_is_refused(new_cloud: NewCloud):
    """One line says why, and the first one goes on."""
    cloud = new_cloud().start()
    second = RunningCloud(cloud.directory)
    second.console = cloud.directory.parent / "second.log"
    assert second.begin().wait(30) == 1
    assert second.console.read_text() == f"another local cloud uses {cloud.directory}\n"
    launch(cloud)


@pytest.mark.parametrize(
    ("name", "content", "mode", "words", "said"),
    [
        ("env", "A=1\n", 0o644, ("--boot-env",), "chmod 600"),
        ("env", "A=1\nno equals\n", 0o600, ("--boot-env",), "line 2: expected NAME=VALUE"),
        ("prices.json", "[]", 0o600, ("--prices",), "describe-spot-price-history"),
        ("prices.json", '{"SpotPriceHistory": []}', 0o600, ("--prices",), "no usable row"),
    ],
)
def test_a_bad_file_is_one_line(  # noqa: PLR0917
    new_cloud: NewCloud, tmp_path: Path, name: str, content: str, mode: int, words, said: str
):
    """What is wrong, where, and what to do; never a traceback."""
    path = tmp_path / name
    path.write_text(content)
    path.chmod(mode)
    cloud = new_cloud()
    assert cloud.begin(*words, str(path)).wait(30) == 1
    told = cloud.console.read_text()
    assert said in told
    assert str(path) in told
    assert told.count("\n") == 1


def test_a_torn_ledger_is_not_guessed_at(new_cloud: NewCloud):
    """Books that cannot be read stop the start with one line that says what to do."""
    cloud = new_cloud()
    cloud.directory.mkdir(mode=0o700)
    (cloud.directory / "ledger.json").write_text('{"market": ')
    assert cloud.begin().wait(30) == 1
    told = cloud.console.read_text()
    assert "move it away" in told
    assert told.count("\n") == 1


# The door


def fault(cloud: RunningCloud, **faults: object) -> None:
    ask(cloud, lambda provider: provider._call("POST", "/faults", object, faults))


def test_without_the_token_nobody_is_served(new_cloud: NewCloud):
    """A wrong bearer token is refused on every call, and closes the cloud with one sentence."""
    cloud = new_cloud().start()
    (cloud.directory / "token").write_text("guess")
    place = POOLS["ec2"].place
    for call in (lambda p: p.list(place), lambda p: p.sold(place), LocalProvider.bill):
        with pytest.raises(NotAllowed):
            ask(cloud, call)
    (closed,) = ask(cloud, LocalProvider.places)
    assert "bearer token" in closed.because
    assert cloud.directory.stat().st_mode & 0o077 == 0


def test_an_answer_that_is_lost_loses_no_machine(new_cloud: NewCloud):
    """The call fails, the machine is listed under its token, and asking again gives the same one."""
    cloud = new_cloud().start()
    fault(cloud, lose_launch_answers=1)
    with pytest.raises(Unknown):
        launch(cloud)
    (listed,) = ask(cloud, all_machines)
    assert listed.token == "t-1"
    assert launch(cloud).id == listed.id


def test_a_throttled_call_says_so(new_cloud: NewCloud):
    """Slowing down is an error of its own, and over when the cloud says so."""
    cloud = new_cloud().start()
    fault(cloud, throttle_calls=1)
    with pytest.raises(Throttled):
        launch(cloud)
    launch(cloud)


def test_a_listing_may_lag_behind(new_cloud: NewCloud):
    """With a lag, a new machine is not listed yet, and its token still finds it."""
    cloud = new_cloud().start()
    fault(cloud, listing_lag_s=3600)
    given = launch(cloud)
    assert ask(cloud, all_machines) == []
    assert launch(cloud).id == given.id


def test_a_cloud_that_does_not_answer_is_unreachable(new_cloud: NewCloud):
    """A time-out is an error of ours, within the time that the caller gave."""
    cloud = new_cloud().start()
    fault(cloud, answer_delay_s=600)

    async def impatient() -> None:
        provider = cloud.provider(timeout_s=0.2)
        with pytest.raises(Unknown, match="/places"):
            await all_machines(provider)
        await provider.close()

    asyncio.run(impatient())


def test_what_makes_no_sense_is_refused_by_name(new_cloud: NewCloud):
    """A launch without a token, and a drill for nobody, are refusals with the reason."""
    cloud = new_cloud().start()
    for path, body, said in (
        ("/launch", {**msgspec.to_builtins(request("t-1")), "token": ""}, "1..60 characters"),
        ("/launch", {"token": "t-1"}, "pool"),
        ("/launch", [1, 2], "object"),
        ("/drill", {"warning_s": -1, "nodes": 1, "deployment": "ours"}, "warning_s"),
        ("/drill", {"warning_s": 1, "nodes": 0, "deployment": "ours"}, "nodes"),
    ):
        with pytest.raises(Exception, match=said):
            ask(cloud, lambda provider, p=path, b=body: provider._call("POST", p, object, b))


def test_on_demand_machines_are_not_drilled(new_cloud: NewCloud):
    """Only spot machines are taken, as on a real market."""
    cloud = new_cloud(boot=SLEEPING).start()
    wanted = replace(request("t-1"), market="on_demand")
    (given,) = ask(cloud, lambda provider: provider.launch(wanted))
    until("it to run", lambda: machine(cloud, given.id).state == "running")
    assert ask(cloud, lambda provider: provider.drill(warning_s=0, nodes="all")) == []


def test_any_name_of_a_deployment_is_one_name(new_cloud: NewCloud):
    """Blanks and signs in a name neither hide its machines nor show those of others."""
    cloud = new_cloud().start()
    odd = "a b&deployment=ours#?é"
    (given,) = ask(cloud, lambda provider: provider.launch(request("t-1", deployment=odd)))
    listed = ask(cloud, all_machines, odd)
    assert [machine.id for machine in listed] == [given.id]
    assert set(ask(cloud, lambda provider: provider.bill(), odd)) == {given.id}
    assert ask(cloud, all_machines) == []


def test_two_clouds_on_one_computer_do_not_meet(new_cloud: NewCloud):
    """Every cloud takes a port that is free, so none can be in use; each knows its own machines only."""
    one, other = new_cloud("one").start(), new_cloud("other").start()
    given = launch(one)
    assert ask(other, all_machines) == []
    pids = tree_of(one, given)
    other.stop()
    assert all(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_short_way_that_is_gone_comes_back(new_cloud: NewCloud):
    """Somebody has cleared up in /tmp, and a machine has made a folder of the path that it was told: it is a link again, also
    for a cloud that starts there, and goes away with it."""
    cloud = new_cloud("cloud" * 10).start()
    disks = cloud.directory / "machines"
    (link,) = (path for path in SHORT.glob("sc-*") if leads(path, disks))
    link.unlink()
    until("the link to be back", lambda: leads(link, disks))
    cloud.stop(signal.SIGKILL)
    link.unlink()
    (link / "i-1").mkdir(parents=True)
    cloud.start()
    assert leads(link, disks)
    cloud.stop()
    assert not link.is_symlink()
