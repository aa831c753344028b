"""A sink in this process's memory."""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from agent.checksum import Buffer
from agent.errors import CheckpointError
from agent.store.errors import Damaged, Full
from agent.store.memory import copy_bytes, fresh
from agent.store.places.sinks import Read, check_key


class MemorySink:
    """Files in this process."""

    span_bytes = 1 << 18

    def __init__(self, name: str = "memory") -> None:
        self.name = name
        self._files: dict[str, memoryview] = {}
        self._lock = threading.Lock()

    def put(self, key: str, pieces: Sequence[Buffer]) -> None:
        views = [memoryview(piece).cast("B") for piece in pieces]
        try:
            whole = fresh(sum(view.nbytes for view in views))
        except (MemoryError, OSError) as error:
            raise Full(f"{self.name}: no memory for {key}") from error
        at = 0
        for view in views:
            copy_bytes(view, whole[at : at + view.nbytes])
            at += view.nbytes
        with self._lock:
            if check_key(key) in self._files:
                raise CheckpointError(f"{self.name}/{key} is there already")
            self._files[key] = whole.toreadonly()

    def settle(self) -> None:
        return None

    def create(self, key: str, data: bytes) -> bool:
        with self._lock:
            if check_key(key) in self._files:
                return False
            self._files[key] = memoryview(data)
            return True

    @contextmanager
    def open(self, key: str) -> Iterator[Read]:
        view = self._view(key)

        def read(offset: int, views: list[memoryview]) -> None:
            wanted = sum(view.nbytes for view in views)
            if offset + wanted > view.nbytes:
                raise Damaged(f"{self.name}/{key} ends at {view.nbytes}, not {offset + wanted}")
            for target in views:
                copy_bytes(view[offset : offset + target.nbytes], target)
                offset += target.nbytes

        yield read

    def get(self, key: str) -> bytes:
        return bytes(self._view(key))

    def _view(self, key: str) -> memoryview:
        with self._lock:
            view = self._files.get(key)
        if view is None:
            raise Damaged(f"{self.name}/{key} is missing")
        return view

    def sizes(self, prefix: str) -> dict[str, int]:
        with self._lock:
            files = list(self._files.items())
        return {key: view.nbytes for key, view in files if key.startswith(f"{prefix}/")}

    def delete(self, keys: Iterable[str]) -> None:
        with self._lock:
            for key in keys:
                self._files.pop(key, None)
