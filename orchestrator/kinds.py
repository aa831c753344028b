"""The kinds of what happens, as a person chooses among them in settings and commands."""

from typing import Literal, get_args

Kind = Literal[
    "buy",
    "join",
    "notice",
    "eviction",
    "return",
    "refusal",
    "layout",
    "checkpoint",
    "loss",
    "status",
    "finish",
    "failure",
    "budget",
    "order",
    "note",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
