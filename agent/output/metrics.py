"""The numbers that a script logs, once per step even if it is repeated. No torch here.

They leave with the next heartbeat, because a message for each step would cost a quick step more
than it costs to commit it. What waits is lost only with its worker. Others have it as well, and
workers that do those steps again.
"""

import math
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from agent.errors import Misuse
from agent.protocol import Message, Numbers

KEPT_STEPS = 64  # that a new leader sends again
WAITING_MAX = KEPT_STEPS // 2  # steps; of more, another worker may not have all
NAMES_MAX = 100
NAME_CHARS_MAX = 100


class Log:
    """The numbers of one worker. Every worker logs the same, and the leader sends them."""

    def __init__(self, send: Callable[[Message], None] | None) -> None:
        self._send = send
        self._now: dict[int, dict[str, float]] = {}  # the step in flight, and idle turns before it
        self._steps: dict[int, dict[str, float]] = {}
        self._waiting: deque[tuple[int, dict[str, float]]] = deque()
        self._telling = threading.Lock()  # else steps could arrive in another order

    def add(self, step: int, numbers: Mapping[str, Any]) -> None:
        """Log numbers in the step in flight; of a name logged twice, the last value counts."""
        now = self._now.setdefault(step, {})
        for name, value in numbers.items():
            now[checked_name(step, name)] = checked(step, name, value)
        while len(self._now) > KEPT_STEPS:
            del self._now[next(iter(self._now))]
        if len(now) > NAMES_MAX:
            raise Misuse(
                f"session.log: {len(now)} names in step {step}, at most {NAMES_MAX} are kept: log fewer, or write "
                "them into a file in session.output"
            )

    def ended(self, step: int, *, leads: bool) -> None:
        """Take note of what was logged up to this step, to be sent if this worker leads."""
        now = {at: numbers for at, numbers in self._now.items() if at <= step}
        self._now = {at: numbers for at, numbers in self._now.items() if at > step}
        if not now or self._send is None:
            return
        for at, numbers in now.items():
            # After the loop the last step may get more numbers.
            self._steps[at] = {**self._steps.pop(at, {}), **numbers}
        while len(self._steps) > KEPT_STEPS:
            del self._steps[next(iter(self._steps))]
        if leads:
            self._waiting.extend(now.items())
        if len(self._waiting) >= WAITING_MAX:
            self.tell()

    def tell(self) -> None:
        """Send what waits, on any thread."""
        if self._send is not None and self._waiting:
            with self._telling:
                steps = tuple(self._waiting.popleft() for _ in range(len(self._waiting)))
                if steps:
                    self._send(Numbers(steps=steps))

    def forget(self) -> None:
        """Forget the step in flight, because it counts for nothing, and is done again."""
        self._now = {}

    def tell_again(self, before: float = math.inf) -> None:
        """Send known steps again, because an earlier leader or keeper may be lost with some."""
        known = tuple(each for each in [*self._steps.items()] if each[0] < before)
        if known and self._send is not None:
            self._send(Numbers(steps=known, again=True))


def checked_name(step: int, name: object) -> str:
    fits = isinstance(name, str) and 0 < len(name) <= NAME_CHARS_MAX and name.isprintable()
    if not fits:
        raise Misuse(
            f"session.log: {str(name)[:NAME_CHARS_MAX]!r} in step {step} is no name for a number: give 1 to "
            f"{NAME_CHARS_MAX} printable characters"
        )
    return str(name)


def checked(step: int, name: str, value: Any) -> float:
    """Return a number of Python, numpy or torch as a float.

    It need not be finite, because that may be just what a person looks for.
    """
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "numel", lambda: getattr(value, "size", 1))() == 1:
        value = item()
    # A recording's number, which is not read yet, says there that it is asked for.
    if hasattr(value, "__float__") and not hasattr(value, "shape"):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    what = f"shape {tuple(value.shape)}" if hasattr(value, "shape") else repr(value)[:80]
    raise Misuse(
        f"session.log({name}=...): one number is expected in step {step}, not {what}: give its mean, or write it into a "
        "file in session.output"
    )
