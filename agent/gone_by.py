"""What the loop over `session.share(...)` goes by, in a few numbers: whoever joins later may have it as the script begins.

`if step == 100: cfg.beta = 0.5` is right on whoever was there in step 100. So workers tell each other, by names, which numbers the
code of the loop reads (`agent.pipeline.reads`), and of words, functions and losses which ones they are.
"""

import functools
from collections.abc import Iterator
from types import FunctionType
from typing import Any
from zlib import crc32

import torch

from agent import own
from agent.carried import clocked, timed
from agent.errors import CannotRecord
from agent.pipeline.heard import Items
from agent.pipeline.loops import Caller, find, names_of
from agent.pipeline.reads import Reads

NAMES_MAX = 64
WORDS = 997.0  # so few that two of them are never near to each other


class GoneBy:
    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._left: set[str] | None = None

    def now(self, caller: Caller) -> dict[str, float]:
        """By the words that stand in the source; where these mean several things, they are told if all are the same."""
        if self._left is None:
            sources = own.sources(caller.frame)
            self._left = clocked(sources) | timed(sources)
        told, unlike = dict[str, float](), set[str]()
        for words, value in self._reads(caller).said(names_of(caller.frame)):
            if words.split()[0].rpartition(".")[2] in self._left:
                continue
            for name, number in _numbers(words, value):
                if told.setdefault(name, number) != number:
                    unlike.add(name)
        return {name: told[name] for name in sorted(told.keys() - unlike)[:NAMES_MAX]}

    def _reads(self, caller: Caller) -> Reads:
        """Anew in each step: names may stand for other objects then."""
        try:
            loop = find(caller).whole
        except CannotRecord:
            return Reads([], {}, self._model, ())
        return Reads([loop.target, *loop.body], names_of(caller.frame), self._model, ())


def _numbers(words: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, Items):
        for each in value:
            if isinstance(each, tuple) and isinstance(each[2], bool | int | float):
                yield f"{words}[{each[0]!r}]", float(each[2])
    elif isinstance(value, bool | int | float):
        yield words, float(value)
    elif isinstance(value, str | torch.nn.Module | FunctionType | functools.partial):
        yield words, _word(value)


def _word(value: Any) -> float:
    """A path is another on every machine."""
    name = value if isinstance(value, str) else getattr(value, "__qualname__", type(value).__name__)
    return 0.0 if "/" in name else 1 + crc32(name.encode()) % WORDS
