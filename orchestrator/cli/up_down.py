"""The commands `up` and `down`: starting the manager, and ending everything."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, NoReturn

import msgspec
import redis
import typer
from rich.text import Text

from orchestrator.cli.command import INTERRUPTED, Command, CommandError
from orchestrator.cli.status import ENDING
from orchestrator.cli.submit import ctrl_c_waits
from orchestrator.cli.watch import why_silent
from orchestrator.client import Between, Client, House, Killed, NotRunning
from orchestrator.config import environment, in_force, stale
from orchestrator.dashboard.keys import address_with_key
from orchestrator.events import ShutdownAsked
from orchestrator.formatting import plural, usd
from orchestrator.interrupts import no_interrupts
from orchestrator.paths import UP_AGAIN, Places, no_room
from orchestrator.supervisor import processes
from orchestrator.view import JobView, View

UP_S_MAX = 180.0
DOWN_S_MAX = 300.0
STOP_S_MAX = 15.0
LOOK_S = 0.1
ENDED = "orchestrator: "  # the prefix of the last line of a house that cannot go on


def up(command: Command) -> None:
    """Start the manager and all that belongs to it; it goes on in the background."""
    places = Places(command.config.state_dir)
    try:
        client = _staying(command)
    except NotRunning:
        house, was_up = _start(command, places), False
    else:
        house, was_up = client.house(), True
    address = address_with_key(house, places)
    told = Text.assemble(
        ("already up" if was_up else "up", "bold green"), f" in {places.state_dir}"
    )
    others = stale(house.settings, in_force(command.config))
    page = Text.assemble("dashboard  ", (address or "off", "bold"), no_wrap=True)
    command.answer(
        {
            "state_dir": str(places.state_dir),
            "pid": house.pid,
            "dashboard_url": address,
            "was_up": was_up,
            "not_in_force": list(others),
        },
        told,
        page,
        *(Text(said, style="yellow") for said in others.values()),
        then=("orchestrator submit SCRIPT --follow", "orchestrator down"),
    )


def _staying(command: Command) -> Client:
    """Return a client of the house, after waiting for one that `down` has asked to end."""
    client, deadline = _settled(command), time.monotonic() + DOWN_S_MAX
    if _is_ending(client):
        command.say(f"{ENDING}; it is started again after that")
    while _is_ending(client):
        if time.monotonic() > deadline:
            raise CommandError(
                f"{ENDING}, but it has not ended within {DOWN_S_MAX:.0f} s; look with: orchestrator status; end it "
                "without waiting with: orchestrator down --force"
            )
        time.sleep(LOOK_S)
        client = _settled(command)
    return client


def _is_ending(client: Client) -> bool:
    """Return whether the house ends: it has said so, or has yet to read that it was asked to."""
    with contextlib.suppress(redis.RedisError):  # the house brings Redis back, or is gone
        view = client.view()  # maybe the last one of an earlier house
        said = view is not None and view.ending and view.at_s >= client.house().started_at_s
        return said or client.is_asked_to_end()
    return False


def _start(command: Command, places: Places) -> House:
    """Start the house in a separate process; end it if we are interrupted while it starts."""
    if narrow := processes.narrow():
        raise CommandError(narrow)
    with _one_ctrl_c():
        process, begins_at = _spawn(command, places)
        try:
            with command.busy("starting Redis, Ray, the local cloud and the manager"):
                house = _wait_for_house(process, places, places.log("house"), begins_at)
        except KeyboardInterrupt:
            _end(process, places)
            raise CommandError("interrupted; what it had started is ended", INTERRUPTED) from None
        except BaseException:
            _end(process, places)
            raise
    for line in news(places.log("house"), begins_at):
        command.say(Text(line, style="yellow"))
    return house


@contextlib.contextmanager
def _one_ctrl_c() -> Iterator[None]:
    """Let only the first Ctrl-C interrupt the block, so that the clean-up completes."""

    def heard(*_: object) -> NoReturn:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, heard)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is heard:
            signal.signal(signal.SIGINT, before)


def _spawn(command: Command, places: Places, *more: str) -> tuple["subprocess.Popen[bytes]", int]:
    """Start a house; return its process, and the offset in the log where its lines begin."""
    places.make()
    # -P, because the person's own files in the current folder may have the names of modules.
    words = [sys.executable, "-P", "-m", "orchestrator.supervisor", *more]
    if command.config_path is not None:
        words += ["--config", str(command.config_path)]
    with places.log("house").open("ab") as sink:
        begins_at = sink.tell()
        process = subprocess.Popen(
            words,
            env=processes.caching({**os.environ, **environment(command.flags)}),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return process, begins_at


def _wait_for_house(
    process: "subprocess.Popen[bytes]", places: Places, log: Path, begins_at: int
) -> House:
    deadline = time.monotonic() + UP_S_MAX
    while time.monotonic() < deadline:
        house = _noted(places)
        if house and house.pid == process.pid:
            return house
        if process.poll() is not None:
            raise CommandError(_why_ended(places, log, begins_at))
        time.sleep(LOOK_S)
    raise CommandError(f"the manager was not up after {UP_S_MAX:.0f} s; see {log}")


def _noted(places: Places) -> House | None:
    """Return what a house has noted of itself; it may have ended meanwhile."""
    try:
        return msgspec.json.decode(places.house.read_bytes(), type=House)
    except (OSError, ValueError):
        return None


def _why_ended(places: Places, log: Path, begins_at: int) -> str:
    """Return why a house ended; a full disk takes no line of its log, or is behind what that says."""
    return (
        no_room(places.state_dir, UP_AGAIN)
        or last_line(log, begins_at)
        or f"the manager did not start; see {log}"
    )


def last_line(log: Path, begins_at: int) -> str:
    """Return the last line of the process, without the prefix."""
    lines = _said(log, begins_at)
    return lines[-1].removeprefix(ENDED) if lines else ""


def news(log: Path, begins_at: int) -> list[str]:
    """Return the lines of a house that lives.

    Last lines of other houses are left out: one that started at the same moment may have ended and
    left its line in the same log.
    """
    return [line for line in _said(log, begins_at) if not line.startswith(ENDED)]


def _said(log: Path, begins_at: int) -> list[str]:
    lines = log.read_bytes()[begins_at:].decode(errors="replace").splitlines()
    return [line for line in lines if line.strip()]


def _end(process: "subprocess.Popen[bytes]", places: Places) -> None:
    """Ask the house to end with all that it owns, and sweep it up if it does not.

    Nothing is swept up if another house, started before ours, holds the state directory.
    """
    with no_interrupts():
        from orchestrator.supervisor.supervisor import HouseError, sweep_up

        process.terminate()
        try:
            process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        with contextlib.suppress(HouseError):
            sweep_up(places)


def down(
    command: Command,
    force: Annotated[
        bool, typer.Option("--force", help="Do not wait for the manager; end it at once.")
    ] = False,
) -> None:
    """End the jobs with a checkpoint, give every machine back, and end the manager."""
    places, found = Places(command.config.state_dir), Found(forced=force)
    try:
        left, settled = _ended(command, places, found)
    except KeyboardInterrupt:
        raise CommandError(found.interrupted(), INTERRUPTED) from None
    _say_down(command, places, found, left, settled)


def _ended(command: Command, places: Places, found: "Found") -> tuple[list[int], list[str]]:
    """End the house and what a killed one has left; return processes and machines of that."""
    try:
        client = _settled(command, found if found.forced else None)
    except Killed:
        found.killed = True
    except NotRunning as error:
        found.words = "" if found.asked else str(error)
    else:
        found.was_up = True
        _give_back(command, places, client, found)
        found.killed = not (found.forced or places.given_back.exists())
    left = _sweep_up(places)
    settled: list[str] = []
    if found.killed:
        command.say(
            Text(
                "the manager had ended before everything was given back; "
                f"{len(left)} of its processes were left and are swept up"
            )
        )
        if not found.forced:
            settled, found.view = _settle(command, places)
    return left, settled


def _settled(command: Command, forced: "Found | None" = None) -> Client:
    """Return a client of the house, after waiting for a house that is just starting or ending.

    The `up` of a starting house may have been killed, so `down` must wait until it can be asked. By
    force it is told to end instead.
    """
    deadline = time.monotonic() + UP_S_MAX
    with command.busy("waiting for a manager that is just starting or ending"):
        while True:
            try:
                return command.client()
            except Between:
                if time.monotonic() > deadline:
                    raise
                if forced is not None and not forced.asked:
                    forced.asked = _told_to_end(Places(command.config.state_dir))
                time.sleep(LOOK_S)


def _told_to_end(places: Places) -> bool:
    """Tell a house that cannot be asked to end; return whether there is one."""
    found = processes.houses(places.lock)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    return bool(found)


class Found(msgspec.Struct, kw_only=True):
    """How `down` found the house, and what it saw last."""

    was_up: bool = False
    killed: bool = False
    forced: bool = False
    asked: bool = False
    view: View | None = None
    words: str = ""
    # By the manager's time, which may be behind the clock, where a manager could be asked.
    began_s: float = msgspec.field(default_factory=time.time)

    def interrupted(self) -> str:
        """Return what Ctrl-C has left running, because that may cost money."""
        if self.killed:
            return (
                "interrupted before all was given back that the ended manager held: its machines may still cost money; "
                "give them back with: orchestrator down"
            )
        if self.asked and not self.forced:
            return "interrupted; the manager goes on giving everything back, and ends then; look with: orchestrator status"
        if self.asked:
            return "interrupted; the manager ends all the same; look with: orchestrator status"
        return "interrupted; nothing was asked of a manager, and what runs goes on"

    def cancelled(self) -> list[JobView]:
        """Return the jobs that `down` has cancelled.

        A house may be gone before its last view is read, so jobs that had not ended in the view
        count too if the house ended in order.
        """
        orderly = self.was_up and not (self.killed or self.forced)
        return [
            job
            for job in (self.view.jobs if self.view else ())
            if (job.status == "CANCELLED" and (job.ended_at_s or 0.0) >= self.began_s)
            or (orderly and job.ended_at_s is None)
        ]


def _give_back(command: Command, places: Places, client: Client, found: Found) -> None:
    """Ask the manager to give everything back, or end the house at once; wait for its end."""
    try:
        found.view = client.view()
        if found.view is not None:
            found.began_s = found.view.at_s
        if not found.forced:
            with ctrl_c_waits():
                life = client.house().life
                client.post(ShutdownAsked(at_s=time.time(), by="orchestrator down", house=life))
                found.asked = True
    except redis.RedisError:
        if not found.forced and alive(client.house().pid):
            raise
    if found.forced:
        found.asked = True
        os.kill(client.house().pid, signal.SIGTERM)
    with command.busy("giving everything back") as shown:
        found.view = _wait_until_gone(client, places, found.view, shown)


def _sweep_up(places: Places) -> list[int]:
    """End the processes that an ended house has left, and return their pids."""
    from orchestrator.supervisor.supervisor import HouseError, sweep_up

    deadline = time.monotonic() + STOP_S_MAX
    while places.state_dir.exists() or processes.marked(places.identity):
        try:
            return sweep_up(places)
        except (
            HouseError
        ):  # the lock is held, by a house or by another `down` that sweeps up, or by
            # a killed house, which lets go of it a moment after its pid is that of a zombie
            noted = _noted(places)
            if (noted and alive(noted.pid)) or time.monotonic() > deadline:
                raise CommandError(
                    f"another manager has started in {places.state_dir} meanwhile; look with: orchestrator status"
                ) from None
            time.sleep(LOOK_S)
    return []


def _settle(command: Command, places: Places) -> tuple[list[str], View | None]:
    """Start a manager that gives back what a killed one held; return machines and view.

    Only the journal and the clouds know what the killed manager held.
    """
    began_s, deadline, view = time.time(), time.monotonic() + UP_S_MAX + DOWN_S_MAX, None
    with _one_ctrl_c():
        process, begins_at = _spawn(command, places, "--give-back")
        try:
            with command.busy("starting again, to see what it held"):
                while process.poll() is None and time.monotonic() < deadline:
                    with contextlib.suppress(NotRunning, redis.RedisError):
                        view = Client.connect(places.state_dir).view() or view
                    time.sleep(LOOK_S)
        finally:
            _end(process, places)
    if process.returncode != 0 or not places.given_back.exists():
        said = last_line(places.log("house"), begins_at) or "it ended and printed nothing"
        raise CommandError(f"not everything was given back: {said}; try again: orchestrator down")
    # The manager may be gone before its last view is read. What it held in the last view that was
    # read, it has given back by now.
    held = [
        one
        for one in (view.machines if view is not None else ())
        if one.ended_at_s is None or one.ended_at_s >= began_s
    ]
    return [one.id for one in held], view


def _wait_until_gone(
    client: Client, places: Places, view: View | None, shown: Callable[[str], None]
) -> View | None:
    """Wait until the house has ended, and show meanwhile what it still holds."""
    pid, deadline = client.house().pid, time.monotonic() + DOWN_S_MAX
    while alive(pid):
        if time.monotonic() > deadline:
            silent = why_silent(view, places)
            said = f"The manager: {silent}" if silent else _of_places(view)
            because = f" {said}." if said else ""
            raise CommandError(
                f"not everything was given back within {DOWN_S_MAX:.0f} s.{because} Look with: orchestrator "
                "status; end it without waiting with: orchestrator down --force"
            )
        if places.house.exists():  # the first thing that an ending house removes
            with contextlib.suppress(redis.RedisError):
                view = client.view() or view
            silent = why_silent(view, places)
            if silent:
                shown(f"the manager: {silent}")
            elif view is not None:
                shown(_of_places(view) or f"giving back {plural(view.cost.machines, 'machine')}")
        else:
            shown("ending Ray, the local cloud and Redis")
        time.sleep(LOOK_S)
    return view


def _of_places(view: View | None) -> str:
    return "; ".join(view.costly) if view is not None else ""


def alive(pid: int) -> bool:
    """Return whether the process still runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _say_down(
    command: Command, places: Places, found: Found, left: list[int], settled: list[str]
) -> None:
    from orchestrator.cli import left_behind

    view = found.view
    held = [one.id for one in view.machines if one.ended_at_s is None] if view else []
    cost = view.cost if view else None
    with command.busy("looking where the newest steps are"):
        left_there = left_behind.found(command.config, places, view)
    texts = []
    if settled:
        texts.append(Text(f"found and given back: {', '.join(settled)}"))
    elif found.killed and view is not None:
        texts.append(Text("asked the clouds: no machine of it is left"))
    elif left and not found.killed:
        was = "was left and is" if len(left) == 1 else "were left and are"
        texts.append(Text(f"{plural(len(left), 'process')} of an ended manager {was} swept up"))
    if found.words and not left:
        texts.append(Text(found.words))
    else:
        texts.append(Text.assemble(("down", "bold green"), f" in {places.state_dir}"))
    cancelled = found.cancelled()
    for job in cancelled:
        of_all = f" of {job.steps_total:,}" if job.steps_total else ""
        texts.append(Text(f"cancelled {job.id} at step {job.step:,}{of_all}"))
    texts += [Text(said, style="yellow") for said in left_there.texts(command.config)]
    if cost:
        texts.append(Text(f"spent {usd(cost.spent_usd)}, saved {usd(cost.saved_usd)}"))
    command.answer(
        {
            "was_up": found.was_up,
            "killed": found.killed,
            "cost": cost,
            "machines_last_seen": held,
            "processes_swept": len(left),
            "machines_settled": settled,
            "kept_in_memory": [str(folder) for folder in left_there.in_memory],
            "cancelled": [job.id for job in cancelled],
            "not_copied": [one.job for one in left_there.uncopied],
            "lost": left_there.lost,
        },
        *texts,
        then=("orchestrator tools gc --dry-run",)
        if found.words and not left
        else ("orchestrator up", *(f"orchestrator resume {job.id}" for job in cancelled)),
    )
