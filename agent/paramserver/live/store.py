"""The store of committed clocks on the disk."""

import os
from pathlib import Path

import numpy as np

from agent.errors import CheckpointError
from agent.paramserver.messages import Section
from cloud.private import flush


class Folder:
    """The store of committed clocks: a file for each partition and clock."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def write(self, partition: int, clock: int, sections: list[Section]) -> None:
        arrays = {}
        for section in sections:
            arrays[f"keys {section.table}"] = section.keys
            arrays[f"rows {section.table}"] = section.values
        path = self._path(partition, clock)
        path.parent.mkdir(parents=True, exist_ok=True)  # somebody may have removed it
        part = path.with_suffix(f".{os.getpid()}")
        with part.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        flush(self._folder)  # the name is on the disk as well, before it counts as saved

    def read(self, partition: int, clock: int) -> list[Section]:
        """Read a file, in which each array has a checksum; raise `CheckpointError` if it is torn."""
        path = self._path(partition, clock)
        try:
            with path.open("rb") as file, np.load(file) as found:
                names = [name.removeprefix("keys ") for name in found if name.startswith("keys ")]
                return [Section(one, found[f"keys {one}"], found[f"rows {one}"]) for one in names]
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} is missing") from error
        except OSError:
            raise
        except Exception as error:  # numpy and zipfile say of damaged bytes whatever they trip over
            raise CheckpointError(f"{path} is damaged: {error}") from error

    def drop(self, partition: int, before: int) -> None:
        for path in self._folder.glob(f"{partition}-*"):
            clock = path.stem.partition("-")[2]
            if clock.isdigit() and int(clock) < before:
                path.unlink(missing_ok=True)

    def _path(self, partition: int, clock: int) -> Path:
        return self._folder / f"{partition}-{clock}.npz"
