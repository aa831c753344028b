"""`session.state` in a few words, for people: what it holds, and no more of it than fits a table. No torch here."""

import reprlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from agent.messages import ENTRIES_MAX, KEY_CHARS_MAX, VALUE_CHARS_MAX
from agent.protocol import Message, ScriptValues

EVERY_S = 0.5


class _Short(reprlib.Repr):
    """A value is cut wherever it is long, so writing it down takes microseconds whatever it is."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 3, 80, 80

    def repr_int(self, x: int, level: int) -> str:
        if x.bit_length() > 256:
            return f"a number of {x.bit_length():,} bits"
        return super().repr_int(x, level)

    def repr_Tensor(self, x: Any, level: int) -> str:  # noqa: N802, ARG002 - named by the type
        return _array("tensor", x)

    def repr_ndarray(self, x: Any, level: int) -> str:  # noqa: ARG002
        return _array("array", x)


def _array(kind: str, x: Any) -> str:
    size = "x".join(map(str, x.shape)) or "single"
    return f"{kind} {size}, {str(x.dtype).removeprefix('torch.')}"


_SHORT = _Short()


def in_words(state: Mapping[Any, Any]) -> tuple[tuple[str, str], ...]:
    """Return the first entries, each as a name and a value; never longer than the bounds."""
    found: list[tuple[str, str]] = []
    for key, value in state.items():
        if len(found) == ENTRIES_MAX:
            break
        name = key if isinstance(key, str) else _SHORT.repr(key)
        found.append((_cut(name, KEY_CHARS_MAX), _cut(_SHORT.repr(value), VALUE_CHARS_MAX)))
    return tuple(found)


def _cut(text: str, most: int) -> str:
    text = text[: most + 1].encode(errors="backslashreplace").decode()
    return text if len(text) <= most else f"{text[: most - 3]}..."


class Teller:
    """Sends what `session.state` holds behind a step, if that has changed, and not too often."""

    def __init__(self, send: Callable[[Message], None] | None) -> None:
        self._send = send
        self._told: tuple[int, tuple[tuple[str, str], ...]] = (0, ())
        self._due_s = 0.0

    def tell(self, step: int, state: Mapping[Any, Any], *, last: bool = False) -> None:
        now_s = time.monotonic()
        if self._send is None or (now_s < self._due_s and not last):
            return
        self._due_s = now_s + EVERY_S
        entries = in_words(state)
        if (len(state), entries) == self._told:
            return
        self._told = len(state), entries
        self._send(ScriptValues(step=step, entries=entries, count=len(state)))

    def forget(self) -> None:
        """Tell all of it again, because another worker may have told something else meanwhile."""
        self._told, self._due_s = (-1, ()), 0.0
