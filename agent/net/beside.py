"""A thread that does things beside the script's, which helps when it cannot wait any more."""

import queue
import threading
from collections import deque
from collections.abc import Callable

Thing = Callable[[], object]


class Beside:
    """Does one thing after the other, on a thread that begins with the first."""

    def __init__(self, name: str, first: Thing = lambda: None) -> None:
        """`first` is done once, on that thread."""
        self._name, self._first, self._begun = name, first, False
        self._left: deque[Thing] = deque()
        self._doing = threading.Lock()
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._error: BaseException | None = None

    def do(self, thing: Thing) -> None:
        self._left.append(thing)
        if not self._begun:
            self._begun = True
            threading.Thread(target=self._serve, name=self._name, daemon=True).start()
        self._wakes.put(None)

    def settle(self) -> None:
        """Return when all is done; raise what one of the things has raised since the last time."""
        while self._do_one():
            pass
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _do_one(self) -> bool:
        """Do the next thing, after the one that is being done. Return False if there is none."""
        with self._doing:
            try:
                thing = self._left.popleft()
            except IndexError:
                return False
            try:
                thing()
            except BaseException as error:
                self._error = self._error or error
            return True

    def _serve(self) -> None:
        try:
            self._first()
        except BaseException as error:  # of a thread that ended by it, nobody would hear
            self._error = self._error or error
        while True:
            self._wakes.get()
            self._do_one()
