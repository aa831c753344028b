"""A whole product and one bad day after the other: real processes, real kills, the same weights."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from houses import RunningHouse, command_line, drill, is_worker, orchestrator, until
from redis import RedisError

from agent.keeper.storage.memory_log import kept, root_of
from agent.store.archive import Archive
from agent.store.places.sinks import DiskSink
from orchestrator.cli.up_down import news
from orchestrator.client import NotRunning
from orchestrator.supervisor import processes
from orchestrator.supervisor.redis_server import find_server

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

TOY = (Path(__file__).parent / "killable.py").read_text()
PAUSE = "0.02"
STEPS = {30, 60, 120, 260}
HEAD = "orchestrator.supervisor.ray_head"
COPIES = "copies"


# Behind the loss: in it, calibration would not miss it.
DRIFTS_S = 0.1
DRIFTS = TOY.replace("    time.sleep(pause_s)\n", "").replace(
    "    optimizer.step()\n", "    time.sleep(pause_s)\n    optimizer.step()\n"
)
DRIFTED = re.compile(
    r"drifts note: steps take ([\d.]+) times what was predicted, and microbatches [\d.]+ times"
)
PREDICTED = re.compile(r"drifts layout .*: 1x1 on 1 worker: predicted (\d+) ms a step")


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Iterator[RunningHouse]:
    """One state directory for all of these, because a start of a house takes ten seconds."""
    folder = tmp_path_factory.mktemp("shared")
    url = (folder / COPIES).as_uri()
    house = RunningHouse(folder, f'[storage]\ncheckpoint_url = "{url}"\n')
    yield house
    house.close()


@pytest.fixture
def house(shared) -> Iterator[RunningHouse]:
    """The shared house, running, once it holds no machine of an earlier test."""
    if shared.process is None or shared.process.poll() is not None:
        shared.start()
    until("all machines to be given back", lambda: not held(shared))
    yield shared
    with contextlib.suppress(NotRunning):
        for job in shared.client().view().jobs:
            if job.ended_at_s is None:
                orchestrator("cancel", job.id, "--config", str(shared.config))


def held(house: RunningHouse) -> set[str]:
    return {one.id for one in house.client().view().machines if one.ended_at_s is None}


def weights(path: Path) -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=True)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Callable[[int], dict[str, torch.Tensor]]:
    """The weights of the same script on its own after so many steps, of one run for all tests."""
    script, out = tmp_path_factory.mktemp("alone") / "alone.py", "alone.pt"
    kept = (
        f"    if step + 1 in {STEPS}:\n        torch.save(model.state_dict(), f'{{step + 1}}.pt')\n"
    )
    script.write_text(TOY.replace("if session.leader:", f"{kept}if session.leader:"))
    words = [sys.executable, str(script), str(max(STEPS)), "0", out]
    subprocess.run(words, cwd=script.parent, check=True, timeout=120)
    return lambda steps: weights(script.with_name(f"{steps}.pt"))


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


def pid_of(house: RunningHouse, words: str) -> int:
    """The one process of the house whose command line contains the words."""
    found = [pid for pid in processes.marked(house.places.identity) if words in command_line(pid)]
    assert len(found) == 1, f"{words}: {found}"
    return found[0]


def kill_keeper(house: RunningHouse) -> None:
    """SIGKILL, and wait until the next keeper holds a backup of its own."""
    keeper = pid_of(house, "ray::KeeperActor")
    os.kill(keeper, signal.SIGKILL)
    until("the next keeper", lambda: keeper_of(house) not in {0, keeper})
    step = int(house.store().hget(f"orch:commit:{house.job().id}", "step"))
    until("the next keeper's backup", lambda: house.job().backup_step > step)


def keeper_of(house: RunningHouse) -> int:
    try:
        return pid_of(house, "ray::KeeperActor")
    except (AssertionError, OSError):
        return 0


def machines_working(house: RunningHouse, count: int) -> bool:
    job = house.job()
    return job is not None and job.workers >= count


HELD = """
class Held:
    def state_dict(self):
        while session.replica.version == steps and os.path.exists(out + ".hold"):
            time.sleep(0.05)
        return {}

    def load_state_dict(self, state):
        pass


session = Session(model, optimizer, Held(), microbatches=6)
"""


def test_job_whose_workers_die_after_its_last_step_ends_with_its_model(
    house, tmp_path, undisturbed
):
    """All steps are committed, and the last state is on nobody's disk yet when all who have it die: others come for it,
    and the job is done."""
    steps, out = 30, tmp_path / "ours.pt"
    (hold := tmp_path / "ours.pt.hold").touch()
    begun = "session = Session(model, optimizer, microbatches=6)\n"
    script, argv = "import os\n" + TOY.replace(begun, HELD), (str(steps), "0.01", str(out))
    house.submit(script, "held", argv=argv, slots_min=2, slots_max=2)
    house.reached(steps)
    workers = [pid for pid in processes.marked(house.places.identity) if is_worker(pid)]
    assert len(workers) == 2
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    hold.unlink()
    assert house.ended().status == "SUCCEEDED"
    assert same(weights(out), undisturbed(steps))


def test_plan_book_of_a_slower_script_follows_its_steps(house):
    """The script waits beside its model, which calibration cannot see: after some steps that is said, the profile is
    refitted, and the next layout is predicted to take what steps have taken.
    """
    house.submit(DRIFTS, job="drifts", argv=("100000", str(DRIFTS_S), "out"), slots_max=1)
    house._telling(until, "the drift", lambda: DRIFTED.search(house.told()), 120.0)
    assert float(DRIFTED.search(house.told())[1]) > 2
    said, slowest_s = len(PREDICTED.findall(house.told())), 0.0
    drill(house, 0.0, 1)

    def next_layout() -> bool:
        nonlocal slowest_s
        slowest_s = max(slowest_s, house.job().step_s)
        return len(PREDICTED.findall(house.told())) > said

    house._telling(until, "the next layout", next_layout, 120.0)
    predicted_s = float(PREDICTED.findall(house.told())[-1]) / 1e3
    assert DRIFTS_S < predicted_s < 3 * slowest_s


def test_job_whose_every_process_is_killed_ends_with_the_same_weights(house, tmp_path, undisturbed):
    """Manager, Redis, keeper, the cloud's machines one by one and all: no step lost, same weights, and the
    journal of it all, decided again, says the same."""
    steps, out = 260, tmp_path / "ours.pt"
    argv, epoch = (str(steps), PAUSE, str(out)), house.client().view().epoch
    house.submit(TOY, "everyone", argv=argv, slots_max=2, backup_every_steps=5)
    house.reached(5)
    until("two workers", lambda: machines_working(house, 2), 60)

    manager, keeper = (pid_of(house, name) for name in ("ray::Manager", "ray::KeeperActor"))
    for pid in (manager, keeper):  # all others wait for them, whatever else this machine does
        assert os.getpriority(os.PRIO_PROCESS, pid) == os.getpriority(os.PRIO_PROCESS, 0)
    os.kill(manager, signal.SIGKILL)
    until("the next manager", lambda: house.client().view().epoch == epoch + 1)
    step = house.job().step
    house.places.run.unlink()  # somebody clears up in /tmp
    os.kill(pid_of(house, Path(find_server()).name), signal.SIGKILL)
    house.reached(step + 5)
    kill_keeper(house)
    until("a machine to kill", lambda: drill(house, 0.0, 1))
    step = house.reached(step + 15).step
    until("a machine to give notice to", lambda: drill(house, 4.0, 1))
    step = house.reached(step + 30).step
    until("machines to kill", lambda: drill(house, 0.0, "all"))

    job = house.ended(150)
    assert job.status == "SUCCEEDED", job.because
    assert (job.step, job.steps_lost) == (steps, 0), house.told()
    assert same(weights(out), undisturbed(steps))
    replayed = orchestrator("tools", "replay", "--config", str(house.config))
    assert replayed.returncode == 0, replayed.stderr
    assert "every decision is the same" in replayed.stdout


def test_head_that_is_killed_costs_no_machine(house, tmp_path, undisturbed):
    """Its machines join the next one with new nodes: none is given back, none is bought. What is left in memory is the newest step."""
    steps, out = 120, tmp_path / "ours.pt"
    house.submit(TOY, "headless", argv=(str(steps), PAUSE, str(out)), slots_max=2)
    until("two workers", lambda: machines_working(house, 2), 60)
    step, machines, bought = (
        house.reached(10).step,
        held(house),
        len(house.client().view().machines),
    )
    store = pid_of(house, "gcs_server")
    os.kill(store, signal.SIGKILL)
    until("the next store of names", lambda: running(house, "gcs_server") - {store})
    house.reached(step + 20)
    assert held(house) == machines
    job = house.ended(150)
    assert job.status == "SUCCEEDED", job.because
    assert (job.step, job.steps_lost) == (steps, 0), house.told()
    assert len(house.client().view().machines) == bought, house.told()
    assert same(weights(out), undisturbed(steps))


def test_house_whose_redis_dies_with_its_head_lives_on(house):
    """So may its store of names. The manager that was to begin with it cannot: both are started once more, and the house lives on. Asked to end while
    machines are being bought and booted, it leaves none, and none is billed on.
    """
    redis, before = pid_of(house, Path(find_server()).name), running(house, HEAD)
    epoch = house.client().view().epoch
    store = pid_of(house, "gcs_server")
    os.kill(store, signal.SIGKILL)
    before |= until("the next head", lambda: running(house, HEAD) - before)
    (store,) = until("its store of names", lambda: running(house, "gcs_server") - {store})
    os.kill(store, signal.SIGKILL)  # it waits for no actors that can never answer
    until("the head after it", lambda: running(house, HEAD) - before)
    os.kill(redis, signal.SIGKILL)

    def goes_on() -> bool:
        assert house.process.poll() is None, house.log.read_text()
        with contextlib.suppress(NotRunning, RedisError):
            view = house.client().view()
            return view is not None and view.epoch > epoch
        return False

    until("the next manager", goes_on, 120)
    house.submit(TOY, "bought", argv=("500", PAUSE, "nowhere"), slots_max=4)
    until("the first purchase", lambda: held(house), 30)
    assert house.down() == 0
    assert processes.marked(house.places.identity) == []


def test_house_whose_files_are_removed_is_found_and_goes_on(house):
    """By whoever cleans up: nobody could ask it or end it any more, and no next manager could begin without its secrets."""
    house.submit(TOY, "found", argv=("2000", PAUSE, "nowhere"), slots_max=1)
    step, epoch = house.reached(3).step, house.client().view().epoch
    secrets = {file: file.read_bytes() for file in house.places.state_dir.glob("*.token")}
    del secrets[house.places.secret("dashboard")]
    for file in (house.places.house, house.places.door, *secrets):
        file.unlink()
    until("its note", house.places.house.exists, 30)
    house.places.house.write_text("{")
    house.places.redis_socket.unlink()
    until("its socket", house.places.redis_socket.exists, 30)
    assert {file: file.read_bytes() for file in secrets} == secrets
    os.kill(pid_of(house, "ray::ManagerActor"), signal.SIGKILL)
    until("the next manager", lambda: house.client().view().epoch > epoch, 60)
    assert house.reached(step + 20).steps_lost == 0


def running(house: RunningHouse, words: str) -> set[int]:
    return {pid for pid in processes.marked(house.places.identity) if words in command_line(pid)}


def test_killed_house_takes_everything_along_and_the_next_resumes(house, tmp_path, undisturbed):
    """SIGKILL of the house: nothing runs on; the next house goes on from what the keeper left in memory, and loses no
    step, also behind a write that was torn with it, and says so."""
    steps, out = 120, tmp_path / "ours.pt"
    argv = (str(steps), PAUSE, str(out))
    house.submit(TOY, "killed", argv=argv, slots_max=2, checkpoint_every_s=1.0)
    until("a checkpoint", lambda: (job := house.job()) and job.checkpoint_step > 0, 90)
    house.reached(house.job().checkpoint_step + 3)
    saved = house.job().checkpoint_step
    manifest = msgspec.json.decode(house.store().lindex("orch:manifest:killed", 0))
    assert Path(manifest["uri"].removeprefix("file://")).exists()
    house.process.kill()
    house.process.wait()
    until("everything to end", lambda: not processes.marked(house.places.identity), 60)
    (file,) = house.places.redis_dir.rglob("*.incr.aof")
    with file.open("ab") as torn:
        torn.write(bytes(4096))
    begins_at = house.log.stat().st_size
    house.start()
    (said,) = news(house.log, begins_at)  # `up` shows it
    assert "4,096 bytes that nobody had an answer to" in said
    assert house.reached(saved).step >= saved
    job = house.ended(150)
    assert job.status == "SUCCEEDED", job.because
    assert job.steps_lost == 0, house.told()
    assert same(weights(out), undisturbed(steps))


def test_down_of_a_house_killed_meanwhile_gives_everything_back(house):
    """SIGKILL of the house while the cloud does not answer: `down` sweeps up what is left, has another
    manager look what is held, and says what it found."""
    house.submit(TOY, "swept", argv=("5000", PAUSE, "nowhere"), slots_max=2)
    house.reached(3)
    were_held = held(house)
    cloud = msgspec.json.decode((house.places.cloud_dir / "cloud.json").read_bytes())
    os.kill(cloud["pid"], signal.SIGSTOP)
    program = Path(sys.executable).with_name("orchestrator")
    down = subprocess.Popen(
        [str(program), "down", "--json", "--config", str(house.config)],
        stdout=subprocess.PIPE,
        text=True,
    )
    until("the job to end", lambda: (job := house.job()) and job.ended_at_s is not None)
    house.process.kill()
    house.process.wait()
    out, _ = down.communicate(timeout=180)
    said = msgspec.json.decode(out)
    assert down.returncode == 0, said
    assert said["killed"]
    assert said["processes_swept"] > 0
    assert were_held <= set(said["machines_settled"])
    assert processes.marked(house.places.identity) == []
    again = orchestrator("down", "--json", "--config", str(house.config))
    assert not msgspec.json.decode(again.stdout)["killed"]


def down_of(house: RunningHouse, *words: str) -> str:
    """What `orchestrator down` says, on one line."""
    down = orchestrator("down", *words, "--config", str(house.config))
    assert down.returncode == 0, down.stderr
    assert house.process.wait(60) == 0
    return " ".join((down.stdout + down.stderr).split())


def test_down_with_a_full_disk_or_no_copies_says_whose_steps_are_where(
    house, tmp_path, undisturbed
):
    """Of one job the disk refuses the newest steps: they stay in memory, and the next `up` puts them on the disk. Of the
    other the copies fail: what lies on the manager's machine only is gone with it. `down` says whose, where, and what to
    do; both are resumed and lose nothing, and in the end all is in its place and nothing is left in memory."""
    steps, out, copies = 60, tmp_path / "ours.pt", house.folder / COPIES
    folder, root = house.places.checkpoints / "kept", root_of(house.places.checkpoints)
    argv = ("100000", "0.01", str(tmp_path / "endless.pt"))
    house.submit(TOY, "copied", argv=argv, slots_max=1, checkpoint_every_s=5.0)
    house.reached(50)
    until("a copy", lambda: [*copies.rglob("copied/manifests/*.json")])
    house.submit(TOY, "kept", argv=(str(steps), "0.1", str(out)), slots_max=2)
    house.reached(20)
    folder.write_bytes(b"")  # where its folder would be
    copies.rename(tmp_path / "moved")
    copies.write_bytes(b"")
    said = down_of(house)
    assert f"the newest steps of kept are not in {folder.parent} yet" in said
    assert f"in {root / 'kept'}, " in said
    assert f"is not in {copies.as_uri()} (" in said
    assert f"it is in {folder.parent / 'copied'} on this machine only" in said
    assert "are lost" not in said
    again = orchestrator("down", "--json", "--config", str(house.config))
    assert msgspec.json.decode(again.stdout)["kept_in_memory"] == [str(root / "kept")]

    folder.unlink()
    copies.unlink()
    (tmp_path / "moved").rename(copies)
    house.start()
    until("it to be on the disk", lambda: not kept(root))
    for job in ("copied", "kept"):
        assert orchestrator("resume", job, "--config", str(house.config)).returncode == 0
        house.follow(job)
        until("it to go on", lambda: house.job().ended_at_s is None)
    job = house.ended(150)
    assert (job.status, job.steps_lost) == ("SUCCEEDED", 0), house.told()
    assert same(weights(out), undisturbed(steps))
    house.follow("copied")
    before = house.job().step
    house.reached(before + 50)
    assert msgspec.json.decode(down_of(house, "--json"))["not_copied"] == []
    newest = [Archive(DiskSink(at / "copied"), "copied").newest() for at in (folder.parent, copies)]
    assert newest[1].version > before
    # A copy is a state and the sums by which a worker proves that it goes on from it.
    bases = [manifest.version - manifest.redo for manifest in newest]
    assert bases[0] == bases[1]
    assert not root.exists()
