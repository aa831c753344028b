"""`orchestrator demo`: the whole product at work on this machine, within three minutes.

It takes that long on two cores. The demo starts a separate house in a separate folder, with a spot
market drawn from a seed. It trains the example script on machines that are then taken away: one
with a notice, one without, and all at once. Meanwhile the same script runs undisturbed, at the
lowest priority, to compare the two.
"""

import asyncio
import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from cloud.errors import CloudError
from cloud.local.provider import Nodes
from orchestrator.cli.command import INTERRUPTED, Command, CommandError, Screen
from orchestrator.cli.logs import read_logs
from orchestrator.cli.money import mailed
from orchestrator.cli.watch import ViewSource, follow
from orchestrator.client import Client, NotRunning, local_cloud
from orchestrator.dashboard.keys import address_with_key
from orchestrator.errors import OrchestratorError
from orchestrator.events import JobSpec, JobSubmitted, ShutdownAsked
from orchestrator.formatting import nth, pause, plural
from orchestrator.history.reader import History
from orchestrator.interrupts import no_interrupts
from orchestrator.paths import Places
from orchestrator.supervisor import processes
from orchestrator.view import JobView, View

FOLDER = Path(".demo")
UNMADE = "cannot be made ({}): run the demo in a folder of the project that you may write to"
PAGE = Path("demo.html")
SCRIPT = Path("examples/gpt.py")
TABLES = Path("examples/paramserver/demo.py")
STEPS = 200
MACHINES = 3
UP_S_MAX = 180.0
DOWN_S_MAX = 40.0
STILL_S_MAX = 300.0  # without a new step
LOOK_S = 0.5
PATIENCE_S = 5.0
STEPS_WAITED = 0.1  # a part of all
FINAL = re.compile(r"final .*loss +(?P<loss>[0-9.]+)")

CONFIG = """\
[manager]
state_dir = "state"
deployment = "demo"
control_period_s = 1.0

[budget]
total_usd = 5.0

[job]
slots_max = {machines}

"""
LOCAL = """\
[local]
seed = 83
tempo = 20.0
"""


class DemoFailed(OrchestratorError):  # noqa: N818 - it says what happened
    """The demo could not be shown; the message says where to look."""


class Drill(NamedTuple):
    """One loss of machines, due at a share of the run."""

    name: str
    share: float
    warning_s: float
    nodes: Nodes


class Taken(NamedTuple):
    """What a drill took, and how many pauses there had been before it."""

    drill: Drill
    machines: int
    pauses_before: int


DRILLS = (
    Drill("one machine, with a notice of 8 s", 0.10, 8.0, 1),
    Drill("one machine, SIGKILL without notice", 0.35, 0.0, 1),
    Drill("all machines at once, SIGKILL", 0.60, 0.0, "all"),
)


class Stage:
    """The cloud that the demo is played on: this one is the local cloud of its house."""

    def __init__(
        self, steps: int = STEPS, machines: int = MACHINES, drills: Sequence[Drill] = DRILLS
    ) -> None:
        self.steps, self.machines, self.drills = steps, machines, drills
        self.environment: dict[str, str] = {}

    @contextlib.contextmanager
    def open(self, folder: Path) -> Iterator[None]:  # noqa: ARG002 - another stage has files there
        """Keep the cloud open; the house starts and ends within."""
        yield

    def settings(self) -> str:
        """Return the cloud's part of the settings."""
        return LOCAL

    def take(self, client: Client, drill: Drill) -> list[str]:
        """Take machines away, and return which."""
        return asyncio.run(_take_away(client, drill))

    def last_view(self, client: Client) -> View:
        """Return the view that the summary is about."""
        view = client.view()
        assert view is not None
        return view

    def settled(self, view: View, console: Console) -> bool:  # noqa: ARG002 - see `open`
        """Return whether the cloud's own books agree, once the house has ended."""
        return True


class Director:
    """Takes machines away once the run is far enough and has recovered from the last loss."""

    def __init__(
        self,
        client: Client,
        console: Console,
        now_s: Callable[[], float] = time.monotonic,
        stage: Stage | None = None,
    ) -> None:
        self._client = client
        self._stage = stage or Stage()
        self._console = console
        self._now_s = now_s
        self._left = list(self._stage.drills)
        self._due_at_s: float | None = None
        self._step, self._stepped_at_s = 0, now_s()
        self.done: list[Taken] = []

    def watch(self, job: JobView) -> bool:
        """Handle a new view of the job; return True to end the watching."""
        if job.ended_at_s is not None:
            return True
        self._expect_progress(job)
        if self._left and job.steps_total and job.step >= self._left[0].share * job.steps_total:
            self._consider(job)
        return False

    def _expect_progress(self, job: JobView) -> None:
        """Raise `DemoFailed` if no step was committed for `STILL_S_MAX`.

        Slow progress is no failure, because this machine may be busy with something else.
        """
        if job.step != self._step:
            self._step, self._stepped_at_s = job.step, self._now_s()
        elif self._now_s() > self._stepped_at_s + STILL_S_MAX:
            raise DemoFailed(
                f"nothing was committed after step {job.step} of {job.steps_total or '?'} for {STILL_S_MAX:.0f} s; "
                f"the job is {job.status}: {job.because}"
            )

    def _consider(self, job: JobView) -> None:
        """Run the next drill if the job can show its effect.

        The loss of one worker shows best with several, so the drill waits for a second worker, but
        only for `PATIENCE_S`, and for a tenth of the steps.
        """
        now_s, drill = self._now_s(), self._left[0]
        self._due_at_s = self._due_at_s or now_s
        late = now_s - self._due_at_s > PATIENCE_S
        late |= job.step > (drill.share + STEPS_WAITED) * self._stage.steps
        if job.status == "RUNNING" and (job.workers >= 2 or late):
            taken = self._stage.take(self._client, drill)
            if not taken:
                return  # the market itself has just taken all machines
            self._left.pop(0)
            self._due_at_s = None
            self.done.append(Taken(drill, len(taken), len(job.recoveries_s)))
            self._console.print(
                f"[bold red]drill[/] at step {job.step}: {drill.name} ({', '.join(taken)})"
            )


class Passing:
    """The view without the trained model's address, because the demo deletes the model."""

    def __init__(self, source: ViewSource) -> None:
        self._source = source
        self.house = source.house

    def view(self) -> View | None:
        view = self._source.view()
        if view is None:
            return None
        jobs = tuple(msgspec.structs.replace(job, export_uri="") for job in view.jobs)
        return msgspec.structs.replace(view, jobs=jobs)


async def _take_away(client: Client, drill: Drill) -> list[str]:
    try:
        async with local_cloud(client.house()) as cloud:
            return await cloud.drill(warning_s=drill.warning_s, nodes=drill.nodes)
    except CloudError as error:
        raise DemoFailed(f"the local cloud refused the drill: {error}") from error


def demo(
    _: Command,
    tables: Annotated[
        bool,
        typer.Option(
            "--tables",
            help="Show a parameter server instead: reliable and transient processes, a straggler, losses.",
        ),
    ] = False,
) -> None:
    """Show the whole product on this machine, with its own market, within three minutes."""
    console, root = Screen(), Path.cwd()
    raise typer.Exit(play_tables(console, root) if tables else play(console, root, Stage()))


def play_tables(console: Console, root: Path) -> int:
    """Show a factorisation whose tables are served, with the plot of its clocks."""
    script = root / TABLES
    if not script.exists():
        console.print(f"{script} was not found: run the demo in the project's folder")
        return 2
    return subprocess.run([sys.executable, str(script)], check=False).returncode


def play(console: Console, root: Path, stage: Stage) -> int:
    """Show the demo from start to end, and end all that it started, even after an error."""
    if not (root / SCRIPT).exists():
        console.print(f"{root / SCRIPT} was not found: run the demo in the project's folder")
        return 2
    began_s = time.monotonic()
    try:
        with _folder(root) as folder, stage.open(folder):
            settings = CONFIG.format(machines=stage.machines) + stage.settings()
            (folder / "orchestrator.toml").write_text(settings)
            with _house(folder, console, stage.environment) as client:
                code, view = _show(client, folder, root, console, stage)
            if not stage.settled(view, console):
                console.print("[bold red]not as it should be:[/] the account has other books")
                code = 1
            _mail(view, folder, root / PAGE, console)
    except DemoFailed as error:
        console.print(f"[bold red]the demo failed:[/] {error}", highlight=False)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; everything was given back")
        return INTERRUPTED
    console.print(f"Everything is gone again. {time.monotonic() - began_s:.0f} s in all.")
    return code


def _show(
    client: Client, folder: Path, root: Path, console: Console, stage: Stage
) -> tuple[int, View]:
    address = address_with_key(client.house(), Places(folder / "state"))
    console.print(f"Dashboard: {address}", highlight=False, soft_wrap=True)
    argv = ("--steps", str(stage.steps))
    with _undisturbed(root, folder, argv) as alone:
        job_id = _submit(client, root, argv, stage.machines)
        director = Director(client, console, stage=stage)
        job = follow(Passing(client), job_id, director.watch, console)
        console.print("Waiting for the undisturbed run of the same script ...")
        lonely = _final_loss(alone.wait_for_text())
    view = stage.last_view(client)
    ours = _final_loss("\n".join(line for _, _, line in read_logs(client, job_id)))
    _summary(console, view, job, director, (ours, lonely))
    good = job.status == "SUCCEEDED" and job.steps_lost == 0 and ours is not None and ours == lonely
    if not good:
        console.print(f"[bold red]not as it should be:[/] {job.status}: {job.because}")
    return 0 if good else 1, view


def _submit(client: Client, root: Path, argv: tuple[str, ...], machines: int) -> str:
    sha = client.put_script((root / SCRIPT).read_bytes())
    spec = JobSpec(
        job="gpt",
        script=str(SCRIPT),
        script_sha=sha,
        argv=argv,
        slots_max=machines,
        haste=1000.0,  # the more machines are seen, the better
        checkpoint_every_s=20.0,
    )
    client.post(JobSubmitted(at_s=time.time(), spec=spec))
    return spec.job


# --- the house -----------------------------------------------------------------------------------


@contextlib.contextmanager
def _folder(root: Path) -> Iterator[Path]:
    """Make a fresh folder, and remove it afterwards.

    After a failure the folder is kept, because its logs may be wanted.
    """
    folder = root / FOLDER
    _end_what_is_left(folder)
    _remove(folder)
    try:
        folder.mkdir()
    except OSError as error:
        raise CommandError(f"{folder} {UNMADE.format(error.strerror)}") from error
    try:
        yield folder
    except DemoFailed as error:
        raise DemoFailed(f"{error} (logs: {folder / 'state' / 'logs'})") from error
    except KeyboardInterrupt:
        _remove(folder)
        raise
    else:
        _remove(folder)


def _remove(folder: Path) -> None:
    """Remove the folder, and the states that the keeper has kept in this machine's memory."""
    from agent.keeper.storage.memory_log import root_of

    with no_interrupts():
        shutil.rmtree(root_of(Places(folder / "state").checkpoints), ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)


def _end_what_is_left(folder: Path) -> None:
    """Wait for the house of a killed demo to end, and sweep up its processes."""
    places = Places(folder / "state")
    if not places.state_dir.exists():
        return
    deadline_s = time.monotonic() + DOWN_S_MAX
    while not _lock_is_free(places):
        if time.monotonic() > deadline_s:
            raise DemoFailed(f"another demo runs in {folder}: wait for it, or end it with Ctrl-C")
        time.sleep(0.2)
    processes.sweep(places.identity, DOWN_S_MAX)
    places.remove_links()


def _lock_is_free(places: Places) -> bool:
    from orchestrator.supervisor.supervisor import (  # it takes longer than all other imports
        HouseError,
        only_one,
    )

    try:
        with only_one(places):
            return True
    except HouseError:
        return False


@contextlib.contextmanager
def _house(folder: Path, console: Console, more: Mapping[str, str]) -> Iterator[Client]:
    places = Places(folder / "state")
    environment = {**os.environ, **more, processes.MARK: places.identity}
    arguments = [sys.executable, "-P", "-m", "orchestrator.supervisor"]
    arguments += ["--config", str(folder / "orchestrator.toml")]
    house = processes.start(arguments, env=environment, log=folder / "house.log")
    try:
        with console.status("Starting Redis, the Ray head, the local cloud and the manager ..."):
            client = _wait_for_house(places, house, folder / "house.log")
        yield client
        with console.status("Giving everything back ..."):
            client.post(ShutdownAsked(at_s=time.time(), by="the demo"))
            with contextlib.suppress(subprocess.TimeoutExpired):
                house.wait(DOWN_S_MAX)
    finally:
        with no_interrupts():
            processes.end(house, DOWN_S_MAX)
            left = processes.marked(places.identity)
            processes.sweep(places.identity)
            places.remove_links()
    if left:
        raise DemoFailed(f"{len(left)} processes had to be swept up: {left}")


def _wait_for_house(places: Places, house: "subprocess.Popen[bytes]", log: Path) -> Client:
    deadline_s = time.monotonic() + UP_S_MAX
    while time.monotonic() < deadline_s and house.poll() is None:
        with contextlib.suppress(NotRunning):
            client = Client.connect(places.state_dir)
            if client.view() is not None:
                return client
        time.sleep(0.1)
    lines = log.read_text().strip().splitlines()
    raise DemoFailed(lines[-1] if lines else f"nothing answered within {UP_S_MAX:.0f} s")


# --- the same script, undisturbed ----------------------------------------------------------------


class Undisturbed:
    """The script as a plain process, in the idle time of this machine."""

    def __init__(self, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self.process = process
        self._log = log

    def wait_for_text(self, still_s_max: float = STILL_S_MAX) -> str:
        """Wait until the script has ended, and return its output.

        It prints a line every few steps, so a run without output for `still_s_max` has failed.
        """
        said, said_at_s = "", time.monotonic()
        while self.process.poll() is None:
            if (text := self._log.read_text()) != said:
                said, said_at_s = text, time.monotonic()
            elif time.monotonic() > said_at_s + still_s_max:
                last = said.strip().splitlines()[-1:] or ["nothing"]
                raise DemoFailed(
                    f"the undisturbed run has come no further for {still_s_max:.0f} s; it said last: {last[0]}"
                )
            time.sleep(LOOK_S)
        return self._log.read_text()


@contextlib.contextmanager
def _undisturbed(root: Path, folder: Path, argv: tuple[str, ...]) -> Iterator[Undisturbed]:
    log = folder / "undisturbed.log"
    process = processes.start(
        ["nice", "-n", "19", sys.executable, str(SCRIPT), *argv],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        log=log,
        cwd=root,
    )
    try:
        yield Undisturbed(process, log)
    finally:
        processes.end(process)


def _final_loss(text: str) -> str | None:
    """Return the final loss as printed, so that equal means equal to the last digit shown."""
    found = FINAL.findall(text)
    return found[-1] if found else None


def _mail(view: View, folder: Path, file: Path, console: Console) -> None:
    """Write the page as one file that stays, though everything else of the demo goes."""
    file.write_text(mailed.page_of(view, History.open(Places(folder / "state"))))
    console.print(
        f"The page of it, as one file that can be mailed: {file.name}",
        highlight=False,
        soft_wrap=True,
    )


# --- the summary ---------------------------------------------------------------------------------


def _summary(
    console: Console,
    view: View,
    job: JobView,
    director: Director,
    losses: tuple[str | None, str | None],
) -> None:
    table = Table(title="What happened", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    for row in _losses(director.done, job):
        table.add_row(*row)
    cost = view.cost
    saved = cost.saved_usd / cost.on_demand_usd if cost.on_demand_usd else 0.0
    table.add_row("steps committed", f"{job.step} of {job.steps_total}")
    table.add_row("steps lost", str(job.steps_lost))
    table.add_row("machines bought", str(len(view.machines)))
    table.add_row("spent", f"${cost.spent_usd:.5f}")
    table.add_row(
        "the same machine time on demand", f"${cost.on_demand_usd:.5f} (saved {saved:.0%})"
    )
    table.add_row("final held-out loss", losses[0] or "-")
    table.add_row("the same, undisturbed", losses[1] or "-")
    console.print(table)


def _losses(done: Sequence[Taken], job: JobView) -> Iterator[tuple[str, str]]:
    """Yield a row for each loss, with the pauses between it and the next."""
    if not done:
        yield "losses", "none; the job was over before a machine was taken"
    bounds = [*(taken.pauses_before for taken in done), len(job.recoveries_s)]
    for number, (taken, end) in enumerate(zip(done, bounds[1:], strict=True), start=1):
        pauses = ", ".join(map(pause, job.recoveries_s[taken.pauses_before : end]))
        calm = "none, it left between two steps" if taken.drill.warning_s else "none"
        of_all = f" ({plural(taken.machines, 'machine')})" if taken.drill.nodes == "all" else ""
        yield f"{nth(number)} loss", f"{taken.drill.name}{of_all}; pause: {pauses or calm}"
    more = job.preemptions - sum(taken.machines for taken in done)
    if more > 0:
        yield "the market took", f"{plural(more, 'machine')} more, whose pauses are among these"
