"""Where a job's numbers can go: TensorBoard, W&B, MLflow and trackio, each as one run with a fixed name.

The run is named after the job, so it is the same one after every recovery and every start of the
command. A tracker says itself which step it has last, so no step is sent twice.

TensorBoard needs no package: an event file is records of `length, its checksum, event, its checksum`.
"""

import struct
import sys
import time
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Protocol

from agent.checksum import crc32c
from orchestrator.cli.command import USAGE, CommandError

Numbers = Mapping[str, float]
FILE = "events.out.tfevents.{at}.{job}"
MASK = 0xA282EAD8
STEP_TAG = "spot.step"
NAMES = ("tensorboard", "wandb", "mlflow", "trackio")


class Tracker(Protocol):
    """One run of a tracker; steps come in order."""

    def last(self) -> int:
        """Return the last step that it has, -1 for none."""

    def tell(self, step: int, numbers: Numbers) -> None: ...

    def close(self) -> None: ...


def open_tracker(where: str, job: str, notes: Path) -> Tracker:
    """Open the run of a job at `tensorboard:FOLDER`, `mlflow:EXPERIMENT`, or a project of the others.

    `notes` is a folder for what a tracker cannot be asked.
    """
    kind, _, place = where.partition(":")
    if kind not in NAMES or not place:
        raise CommandError(
            f"--to {where}: write {', '.join(f'{name}:...' for name in NAMES)}", USAGE
        )
    kinds: dict[str, type[Any]] = {"wandb": Wandb, "mlflow": Mlflow, "trackio": Trackio}
    try:
        made: Tracker = (
            TensorBoard(Path(place), job)
            if kind == "tensorboard"
            else kinds[kind](place, job, notes)
        )
    except ImportError as error:
        raise CommandError(f"--to {where} needs {error.name}: pip install {error.name}") from None
    return made


# --- TensorBoard ---------------------------------------------------------------------------------


class TensorBoard:
    """A folder for each job, with an event file for each start of the command."""

    def __init__(self, folder: Path, job: str) -> None:
        self._folder = folder / job
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._last = max((last_step(file) for file in self._files()), default=-1)
            name = FILE.format(at=f"{int(time.time()):010d}.{len(self._files())}", job=job)
            self._file = (self._folder / name).open("xb")
        except OSError as error:
            raise CommandError(f"--to tensorboard:{folder}: {error.strerror}", USAGE) from error
        self._write(_event(0, version=b"brain.Event:2"))

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob("events.out.tfevents.*"))

    def last(self) -> int:
        return self._last

    def tell(self, step: int, numbers: Numbers) -> None:
        self._write(_event(step, numbers=numbers))

    def _write(self, event: bytes) -> None:
        self._file.write(record(event))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _checksum(length) + data + _checksum(data)


def _checksum(data: bytes) -> bytes:
    value = crc32c(0, data)
    return struct.pack("<I", ((value >> 15 | value << 17) + MASK) & 0xFFFFFFFF)


def _event(step: int, *, numbers: Numbers | None = None, version: bytes = b"") -> bytes:
    """Return an Event: wall_time = 1, step = 2, file_version = 3, summary = 5 of its message."""
    made = b"\x09" + struct.pack("<d", time.time()) + b"\x10" + _varint(step)
    if version:
        made += _field(3, version)
    values = b"".join(
        _field(1, _field(1, name.encode()) + b"\x15" + struct.pack("<f", value))
        for name, value in (numbers or {}).items()
    )
    return made + (_field(5, values) if values else b"")


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    made = b""
    while value > 0x7F:
        made, value = made + bytes([value & 0x7F | 0x80]), value >> 7
    return made + bytes([value])


def last_step(file: Path) -> int:
    """Return the last step of a file that has numbers; a torn end of it is passed over."""
    data, at, last = file.read_bytes(), 0, -1
    while at + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        event = data[at + 12 : at + 12 + length]
        at += 16 + length
        if at > len(data) or event[9:10] != b"\x10":
            continue
        step, shift, place = 0, 0, 10
        while event[place] & 0x80:
            step, shift, place = step | (event[place] & 0x7F) << shift, shift + 7, place + 1
        step |= event[place] << shift
        if event[place + 1 : place + 2] == b"\x2a":  # field 5: it has numbers
            last = max(last, step)
    return last


# --- trackers with a library of their own --------------------------------------------------------


class Wandb:
    """A run whose id is the job's. Offline it does not know what it has, so a file says so, too."""

    def __init__(self, project: str, job: str, notes: Path) -> None:
        import wandb  # type: ignore[import-not-found, unused-ignore]

        notes.mkdir(exist_ok=True)
        self._noted = notes / f"wandb.{project.replace('/', '.')}.{job}"
        self._run: Any = wandb.init(project=project, id=job, name=job, resume="allow")

    def last(self) -> int:
        noted = int(self._noted.read_text()) if self._noted.exists() else -1
        return max(int(self._run.step) - 1, noted)  # the run names its next step

    def tell(self, step: int, numbers: Numbers) -> None:
        self._run.log(dict(numbers), step=step, commit=True)
        self._noted.write_text(str(step))

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    """A run with the job as a tag, by which it is found again; the step is written with the numbers."""

    def __init__(self, experiment: str, job: str, _: Path) -> None:
        from mlflow import MlflowClient  # type: ignore[import-not-found, unused-ignore]
        from mlflow.entities import Metric, RunTag  # type: ignore[import-not-found, unused-ignore]

        self._client: Any = MlflowClient()
        self._metric, self._tag = Metric, RunTag
        known = self._client.get_experiment_by_name(experiment)
        at = known.experiment_id if known else self._client.create_experiment(experiment)
        runs = self._client.search_runs([at], f"tags.`spot.job` = '{job}'", max_results=1)
        tags = {"spot.job": job}
        run = runs[0] if runs else self._client.create_run(at, run_name=job, tags=tags)
        self._run, self._last = run.info.run_id, int(run.data.tags.get(STEP_TAG, -1))

    def last(self) -> int:
        return self._last

    def tell(self, step: int, numbers: Numbers) -> None:
        at_ms = int(1000 * time.time())
        metrics = [self._metric(name, value, at_ms, step) for name, value in numbers.items()]
        self._client.log_batch(self._run, metrics=metrics, tags=[self._tag(STEP_TAG, str(step))])

    def close(self) -> None:
        self._client.set_terminated(self._run)


class Trackio:
    """A run with the job's name. Steps are written in order, so the last one has all others before it.

    Trackio writes from a thread of its own: what a kill leaves unwritten is sent again by the next
    start. What it prints goes where errors go, because an answer in JSON stands alone.
    """

    def __init__(self, project: str, job: str, _: Path) -> None:
        import trackio  # type: ignore[import-not-found, unused-ignore]

        self._finish: Any = trackio.finish  # the run's own would be followed by another at the end
        with redirect_stdout(sys.stderr):  # the numbers of this machine are none of the job's
            self._run: Any = trackio.init(
                project, job, resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False
            )

    def last(self) -> int:
        return int(self._run._next_step) - 1

    def tell(self, step: int, numbers: Numbers) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        with redirect_stdout(sys.stderr):
            self._finish()
