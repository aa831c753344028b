"""A clock of served tables as a version of the job's archive, and back. No torch here.

So tables lie beside other states, are copied into object storage with them, and are found there by
a keeper whose disk has nothing. A layer is one table of one partition; one more, without tensors,
has the measures of all clocks, and for how long the job was served.
"""

import logging
import os
import threading
import time
import zipfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from agent.checksum import crc32c
from agent.errors import AgentError, CheckpointError
from agent.keeper.storage.backup import Backup, Saved
from agent.keeper.storage.vault import Vault
from agent.paramserver.messages import Section
from agent.protocol import Serving, Shape
from agent.store.encoding.format import Layer, lay_out
from agent.store.errors import Unknown

log = logging.getLogger(__name__)

MEASURE = np.dtype("<f8")  # in the file of measures
MEASURES = "~measures"  # the layer that has no tensors
KEYS, ROWS = "keys", "rows"
AGAIN_S = 5.0  # until the next try after a requested copy that failed
COPIED_S = 10.0  # for a copy that is waited for; less than the manager waits
CODES = {
    "float64": "F64",
    "int64": "I64",
    "float32": "F32",
    "int32": "I32",
    "float16": "F16",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


class Clock(NamedTuple):
    """All tables as they are at the end of a clock: the sections of each partition."""

    measures: tuple[float, ...]
    partitions: list[list[Section]]
    elapsed_s: float = 0.0  # in which the job was served so far
    tables: tuple[Shape, ...] = ()  # as they were declared; of an earlier version, nothing

    @property
    def number(self) -> int:
        return len(self.measures) - 1


class Past(msgspec.Struct, frozen=True):
    """What a version has beside its rows."""

    measures: tuple[float, ...]
    elapsed_s: float = 0.0
    tables: tuple[Shape, ...] = ()


class Measures:
    """The measures of all clocks, in memory and in a file to which each clock adds its own.

    A month of clocks is millions, so none of them may cost a file with all that were before it.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._written = path, 0
        self._all: list[float] = []
        self.checksum = 0  # of what is in the file

    def __getitem__(self, clock: int) -> float:
        return self._all[clock]

    def up_to(self, clock: int) -> tuple[float, ...]:
        return tuple(self._all[: clock + 1])

    def recall(self, clock: int, told: Iterable[float], checksum: int | None = None) -> None:
        """Take over what an earlier keeper has `told`; if that is nothing, what is in the file."""
        self._all = list(told)
        if not self._all and clock >= 0:
            data = b""
            with suppress(FileNotFoundError), self._path.open("rb") as source:
                data = source.read((clock + 1) * MEASURE.itemsize)
            self._all = np.frombuffer(data, MEASURE, len(data) // MEASURE.itemsize).tolist()
            self._written, self.checksum = len(self._all), crc32c(0, data)
        if len(self._all) <= clock:
            raise CheckpointError(f"{self._path} has {len(self._all)} of {clock + 1} measures")
        if checksum not in (None, self.checksum):
            raise CheckpointError(f"{self._path} is damaged: it does not have its checksum")

    def add(self, first: int, fresh: Sequence[float]) -> None:
        """Have these from clock `first` on, and wait until the disk has them."""
        with os.fdopen(os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as sink:
            there = os.fstat(sink.fileno()).st_size // MEASURE.itemsize  # somebody may have cut it
            start = min(first, self._written, there)
            data = np.array([*self._all[start:first], *fresh], MEASURE).tobytes()
            sink.seek(start * MEASURE.itemsize)
            sink.write(data)
            sink.flush()
            os.fsync(sink.fileno())
        before = self.checksum
        if start < self._written:
            before = crc32c(0, np.array(self._all[:start], MEASURE).tobytes())
        self.checksum = crc32c(before, data)
        self._all[first:] = fresh
        self._written = len(self._all)


def demand_alike(before: Iterable[Shape], partitions: int, serving: Serving, where: str) -> None:
    """Raise if tables are declared otherwise now, because their rows would mean something else.

    What an earlier version does not say, no tables or 0 partitions, is not compared.
    """
    if partitions and partitions != serving.partitions:
        raise Unknown(
            f"{where} has {partitions} partitions, and this job {serving.partitions}; "
            "start the job with those that it had"
        )
    shapes, were = {one.name: one for one in serving.tables}, {one.name: one for one in before}
    for name, shape in were.items():
        other = shapes.get(name)
        if other is None or not shape.fits(other):
            now = f"this job of {other}" if other else f"table {name!r} is not there any more"
            raise Unknown(f"{where} has table {name!r} of {shape}, and {now}; declare it as it was")
    if were and (new := sorted(set(shapes) - set(were))):
        raise Unknown(
            f"{where} has tables {', '.join(were)}, and table {new[0]!r} was not there; leave it out"
        )


def saved_of(clock: Clock) -> Saved:
    """Return a clock as it is written; version v is what v clocks have made."""
    past = Past(clock.measures, clock.elapsed_s, clock.tables)
    layers = [lay_out(MEASURES, (), msgspec.json.encode(past).decode())]
    bodies = {MEASURES: memoryview(b"")}
    for number, sections in enumerate(clock.partitions):
        for section in sections:
            arrays = {KEYS: section.keys, ROWS: section.values}
            if lacking := {one.dtype.name for one in arrays.values()} - set(CODES):
                raise CheckpointError(f"{section.table}: no checkpoint can have {lacking.pop()}")
            forms = [(name, CODES[one.dtype.name], one.shape) for name, one in arrays.items()]
            layer = lay_out(f"{number}/{section.table}", forms)
            flat = [np.ascontiguousarray(arrays[form.name]).reshape(-1) for form in layer.tensors]
            layers.append(layer)
            bodies[layer.name] = np.concatenate([one.view(np.uint8) for one in flat]).data
    backup = Backup(generation=0, version=clock.number + 1, layers=tuple(layers), bodies=bodies)
    return Saved(backup, ())


def clock_of(saved: Saved, serving: Serving) -> Clock:
    """Return the clock that was written, or name what does not fit the tables of this job."""
    backup = saved.backup
    layers = {layer.name: layer for layer in backup.layers}
    if MEASURES not in layers or saved.redo:
        raise Unknown(f"version {saved.reached} is a model's, and this job serves tables")
    past = msgspec.json.decode(layers.pop(MEASURES).values, type=Past)
    parts = 1 + max((int(name.partition("/")[0]) for name in layers), default=-1)
    demand_alike(past.tables, parts, serving, f"version {saved.reached}")
    shapes = {
        f"{at}/{shape.name}": shape for at in range(serving.partitions) for shape in serving.tables
    }
    if odd := sorted(set(shapes) ^ set(layers)):
        raise Unknown(
            f"version {saved.reached} has other tables than this job ({odd[0]}); "
            "start the job with those that it had"
        )
    partitions: list[list[Section]] = [[] for _ in range(serving.partitions)]
    for name, shape in shapes.items():
        layer, body = layers[name], backup.bodies[name]
        keys, rows = (_array(layer, one, body) for one in (KEYS, ROWS))
        if rows.shape[1:] != (shape.columns,) or rows.dtype != shape.dtype:
            raise Unknown(
                f"version {saved.reached} has rows of {rows.shape[1]} {rows.dtype} in "
                f"{shape.name}, and this job of {shape.columns} {shape.dtype}"
            )
        at = int(name.partition("/")[0])
        if shape.keys and not np.array_equal(keys, np.arange(at, shape.keys, serving.partitions)):
            raise Unknown(
                f"version {saved.reached} has other keys of table {shape.name!r} than this job, "
                f"which has 0 to {shape.keys - 1}"
            )
        partitions[at].append(Section(shape.name, keys, rows))
    return Clock(past.measures, partitions, past.elapsed_s, past.tables)


def write_result(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write a file as `numpy.savez` would, whose parameters no array can be named as."""
    with zipfile.ZipFile(path, "w") as sink:
        for name, array in arrays.items():
            with sink.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def _array(layer: Layer, name: str, body: memoryview) -> np.ndarray:
    (tensor,) = (one for one in layer.tensors if one.name == name)
    (dtype,) = (one for one, code in CODES.items() if code == tensor.dtype)
    if tensor.start == tensor.end:
        return np.zeros(tensor.shape, dtype)
    return np.frombuffer(body[tensor.start : tensor.end], dtype).reshape(tensor.shape)


class Copying:
    """Writes clocks into the job's archive, one at a time, on a thread for each.

    `look` and `ask` belong to one thread.
    """

    def __init__(self, vault: Vault, every_s: float, read: Callable[[int], Clock]) -> None:
        self._vault, self._every_s, self._read = vault, every_s, read
        self._due_s = time.monotonic() + every_s
        # Requests are numbered, so that one which comes during a copy is not answered by it.
        self._asked = self._answered = 0
        self._again_s = 0.0
        self._thread: threading.Thread | None = None
        self._taken = self._written = -1

    def ask(self) -> None:
        """Have the newest clock written soon, and copied before that is reported."""
        self._asked += 1

    def pinned(self, clock: int) -> int:
        """Return the oldest clock that is still to be read, or this one."""
        return min(clock, self._taken) if self._busy else clock

    @property
    def _busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def look(self, clock: int) -> None:
        """Begin to write this clock, which is whole on the disk, if it is time for one."""
        now_s = time.monotonic()
        due = self._vault.offsite is not None and now_s >= self._due_s
        asked = self._asked if self._asked > self._answered and now_s >= self._again_s else 0
        if clock < 0 or self._busy or not (due or asked):
            return
        self._taken, self._due_s = clock, now_s + self._every_s
        self._thread = threading.Thread(
            target=self._answer, args=(clock, asked), name="tables-copy", daemon=True
        )
        self._thread.start()

    def _answer(self, clock: int, asked: int) -> None:
        """Write a clock; a request is answered only when its clock is written."""
        written = self.write(clock, asked=asked > 0)
        if asked and written:
            self._answered = asked
        elif asked:
            self._again_s = time.monotonic() + AGAIN_S

    def write(self, clock: int, asked: bool) -> bool:
        """Write a clock, and return whether it was; what fails is reported."""
        try:
            saved = saved_of(self._read(clock))
            written = self._vault.write(saved, last=asked, copied_s=COPIED_S if asked else 0.0)
        except (AgentError, OSError, ValueError, MemoryError) as error:
            log.warning("clock %d could not be copied: %s", clock, error)
            return False
        if written:
            self._written = clock
        return written

    def close(self, clock: int) -> None:
        """Write the last clock, after what is being written."""
        if self._thread is not None:
            self._thread.join()
        if clock > self._written:
            self.write(clock, asked=True)
