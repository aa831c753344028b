"""The command `rehearse`, which tries a script before any money is spent."""

import shlex
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from agent.messages import JobOrder
from orchestrator.cli.command import ERROR, Command, CommandError
from orchestrator.cli.pack import AsModule, Packed, Start, With, pack, start_of
from orchestrator.formatting import duration, pause, plural
from orchestrator.paths import Places, StateDirError

if TYPE_CHECKING:
    from orchestrator.rehearsal.scenes import Scene, SceneVerdict

STEPS, STEPS_MIN = 10, 8
TAIL_S = 30.0  # a long test of the model after the loop would be repeated in three scenes
NAME_WIDTH = 36
TRACEBACK_LINES = 60
NOT_TRIED = (
    "Only {} were tried, in epochs of at most half as many. What the script does after more steps was not tried: --steps N "
    "tries more"
)
ASIDE = (
    "The script keeps {} for itself, and a joining worker begins with {} as at its start. What decides something, such as when "
    "to stop, or is used after the loop belongs into session.state, and an average of the weights into Session(...); what is "
    "only printed may stay"
)


def rehearse(
    command: Command,
    script: Annotated[Path, typer.Argument(help="The training script.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGS]", help="The script's own arguments.")
    ] = None,
    *,
    as_module: AsModule = False,
    with_: With = None,
    steps: Annotated[
        int, typer.Option(min=STEPS_MIN, help="How many steps of the script are done.")
    ] = STEPS,
) -> None:
    """Try a script on this machine, before any money is spent on it. Exit code 0: it passes.

    It runs a few steps alone; then with a worker that joins, one that is killed, all that are
    killed, and a job that is resumed; and again with the model in two stages, if it can be cut.
    The state at the end has to be the same each time.
    """
    argv = tuple(arguments or ())
    start = start_of(script, as_module=as_module)
    script = start.script
    packed = pack(start, command.config, with_ or (), argv)
    for text in packed.shown():
        command.say(text)
    began_s = time.monotonic()
    verdict = _play(command, script, packed, argv, steps)
    took = duration(time.monotonic() - began_s)
    note_rehearsed(command.config.state_dir, packed.sha)
    tone, word = ("green", "it holds") if verdict.passed else ("red", "it does not hold")
    if not verdict.tried:
        tone, word = "yellow", "it was not tried"
    texts = [Text.assemble((f"{script}: {word}", tone), f": {verdict.line}")]
    if verdict.passed:
        texts[0].append(f" ({took})")
        if verdict.steps == steps:
            texts.append(Text(NOT_TRIED.format(plural(steps, "step")), style="dim"))
        if verdict.aside:
            those = "it" if len(verdict.aside) == 1 else "them"
            texts.append(Text(ASIDE.format(", ".join(verdict.aside), those), style="yellow"))
    if verdict.traceback:
        lines = verdict.traceback.splitlines()[-TRACEBACK_LINES:]
        texts.insert(0, Text("\n".join(lines)))
    words = command_line(start, with_ or (), argv)
    then = (f"orchestrator submit {words}",) if verdict.passed else ()
    command.answer(verdict, *texts, then=then)
    if not verdict.passed:
        raise typer.Exit(ERROR)


def command_line(start: Start, with_: Sequence[str], argv: Sequence[str]) -> str:
    """Return the script, what goes along, and its arguments, as a person types them."""
    along = [word for path in with_ for word in ("--with", path)]
    return shlex.join([*start.words, *along, *(["--", *argv] if argv else [])])


def _play(
    command: Command, script: Path, packed: Packed, argv: tuple[str, ...], steps: int
) -> "SceneVerdict":
    from orchestrator.rehearsal.bench import Stage, Unready
    from orchestrator.rehearsal.scenes import Rehearsal

    job = command.config.job
    order = JobOrder(
        job="",
        script=str(script),
        script_sha=packed.sha,
        argv=argv,
        nan=job.nan,
        stop_at=steps,
        tail_s=TAIL_S,
        output_files=job.output_files,
        output_bytes=job.output_bytes,
    )
    command.say(Text(f"{plural(steps, 'step')} of {script}, on this machine", style="bold"))
    try:
        with command.busy("a stage is set up") as show, Stage() as stage:

            def say(scene: "Scene") -> None:
                command.say(_row(scene))

            return Rehearsal(stage, order, packed.payload, say, show).play()
    except Unready as error:
        raise CommandError(str(error)) from error


def _row(scene: "Scene") -> Text:
    mark, tone = ("ok", "green") if scene.passed else ("failed", "red")
    if scene.left_out:
        mark, tone = "left out", "yellow"
    took = "" if scene.left_out else pause(scene.seconds)
    row = Text.assemble(
        f"  {scene.name:<{NAME_WIDTH}}", (f"depth {scene.depth}   ", "dim"), (f"{mark:<10}", tone)
    )
    row.append(f"{took:>8}" if took else scene.why)
    return row


# --- which scripts were tried on this machine -----------------------------------------------------


def was_rehearsed(state_dir: Path, sha: str) -> bool:
    with suppress(OSError, StateDirError):
        return sha in Places(state_dir).rehearsed.read_text().split()
    return False


def note_rehearsed(state_dir: Path, sha: str) -> None:
    """Note that a script was rehearsed; ignore errors, because only a hint depends on it."""
    with suppress(OSError, StateDirError):
        places = Places(state_dir)
        places.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        with places.rehearsed.open("a") as file:
            file.write(f"{sha}\n")
