"""What the scripts of the hazards share: a beginning, and frames with places that a snippet fills.

A place is `<name>` on a line of its own or within one. What fills it may have several lines; those behind the first
are indented as the place is. A place that is left out becomes `pass`.
"""

import re
from typing import Literal

import msgspec

Kind = Literal["refused", "allowed"]
PLACE = re.compile(r"^( *)(.*?)<(\w+)>", re.MULTILINE)


class Snippet(msgspec.Struct, frozen=True, kw_only=True):
    """A script that keeps something from step to step, or from microbatch to microbatch, or seems to.

    `refused` were those that the reading of a script's source refused, `allowed` those that it let pass.
    """

    name: str
    kind: Kind
    script: str
    because: str
    """What is kept, and where."""


def filled(frame: str, **pieces: str) -> str:
    """Put the pieces into their places."""
    used: set[str] = set()

    def put(found: re.Match[str]) -> str:
        indent, before, place = found.groups()
        used.add(place)
        lines = pieces.get(place, "" if before.strip() else "pass").strip("\n").split("\n")
        return indent + before + f"\n{indent}".join(lines)

    while PLACE.search(frame):
        frame = PLACE.sub(put, frame)
    if unknown := pieces.keys() - used:
        raise KeyError(f"the frame has no place <{unknown.pop()}>")
    return frame


class Table:
    """The snippets of one kind of script: each is the frame with some pieces."""

    def __init__(self, group: str, frame: str) -> None:
        self.group, self.frame, self.snippets = group, frame, dict[str, Snippet]()
        self._pieces: dict[str, dict[str, str]] = {}

    def refused(self, name: str, because: str, **pieces: str) -> None:
        self._add("refused", name, because, pieces)

    def allowed(self, name: str, because: str, **pieces: str) -> None:
        self._add("allowed", name, because, pieces)

    def gone_by(self, name: str, **more: str) -> None:
        """Add the snippet `name` again, with more behind its pieces: what it keeps goes into a weight now."""
        because = self.snippets[f"{self.group}: {name}"].because
        pieces = {**self._pieces[name]}
        for place, piece in more.items():
            pieces[place] = f"{pieces[place]}\n{piece}" if place in pieces else piece
        self.refused(f"{name}, gone by", because, **pieces)

    def _add(self, kind: Kind, name: str, because: str, pieces: dict[str, str]) -> None:
        self._pieces[name] = pieces
        name = f"{self.group}: {name}"
        if name in self.snippets:
            raise KeyError(f"two snippets are called {name!r}")
        script = filled(self.frame, **pieces)
        self.snippets[name] = Snippet(name=name, kind=kind, script=script, because=because)


PRELUDE = """
import collections, copy, functools, itertools, os, random, sys, time, types
import numpy as np
import torch
from torch.nn import functional
from orchestrator import Session
torch.manual_seed(0)
def show(*words, **how):
    # As print does, but to nobody.
    " ".join(map(str, words))
"""
# What a script leaves; a snippet that leaves more than its model says so.
LEAVE = """
torch.save(model.state_dict(), sys.argv[1])
"""
