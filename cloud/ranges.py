"""Ranges of numbers and lengths of texts in what others say, and the sentence about a flaw.

A value that comes in is decoded into a type whose fields have one of these ranges, so a number
that no decision can use is refused at the door. A range says no more than that: every sound sender
stays far inside. NaN and the infinities are outside of each of them.
"""

import re
import sys
from typing import Annotated, Any

import msgspec
from msgspec import Meta

TIME_S_MAX = 1e10  # the year 2286; with far larger times, adding a period would round to nothing
PERIOD_S_MIN = 1e-3
COUNT_MAX = 1 << 53  # what a double counts exactly
AMOUNT_MAX = 1e18
USD_MAX = 1e9
SLOTS_MAX = 100_000
MICROBATCHES_MAX = 1_000_000
NAME_MAX = 4_096
TEXT_MAX = 1 << 24  # the message in front of a payload is no longer, either
SHOWN_MAX = 60

Time = Annotated[float, Meta(ge=-TIME_S_MAX, le=TIME_S_MAX)]  # a simulated clock may be below zero
Amount = Annotated[float, Meta(ge=0, le=AMOUNT_MAX)]  # of seconds, bytes, and what else is measured
Number = Annotated[float, Meta(ge=-AMOUNT_MAX, le=AMOUNT_MAX)]
Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
Portion = Annotated[float, Meta(ge=0, le=1)]
Usd = Annotated[float, Meta(ge=0, le=USD_MAX)]
Price = Annotated[float, Meta(gt=0, le=USD_MAX)]
Speed = Annotated[float, Meta(ge=1e-9, le=1e9)]
Count = Annotated[int, Meta(ge=0, le=COUNT_MAX)]
Positive = Annotated[int, Meta(ge=1, le=COUNT_MAX)]
Step = Annotated[int, Meta(ge=-1, le=COUNT_MAX)]  # -1 stands for the time before the first
Generation = Annotated[int, Meta(ge=-2, le=COUNT_MAX)]  # -1: none yet; -2: of a proof
Slots = Annotated[int, Meta(ge=1, le=SLOTS_MAX)]
Microbatches = Annotated[int, Meta(ge=1, le=MICROBATCHES_MAX)]
Name = Annotated[str, Meta(max_length=NAME_MAX)]
Text = Annotated[str, Meta(max_length=TEXT_MAX)]
JobName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")]
Haste = Annotated[float, Meta(ge=0, le=1000)]
Period = Annotated[float, Meta(ge=PERIOD_S_MIN, le=TIME_S_MAX)]

_AT = re.compile(r"^(?P<what>.*?)(?: - at `\$(?P<path>.*)`)?$", re.DOTALL)
_PART = re.compile(r"\.(\w+)|\[(\d+)\]")
_encode = msgspec.msgpack.Encoder().encode


def flaw_in(value: object, kind: Any) -> str:
    """Return in one sentence what is wrong with a value of this type, or "" if nothing is."""
    try:
        msgspec.msgpack.decode(_encode(value), type=kind)
    except msgspec.ValidationError as error:
        return explain(error, value)
    except (OverflowError, UnicodeEncodeError, TypeError) as error:
        where = _too_large(value).removeprefix(".") or type(value).__name__
        return f"{where}: it cannot be written down ({error})"
    return ""


def explain(error: msgspec.ValidationError, said: object) -> str:
    """Return which field of `said` has which value, and which range it has to be in."""
    found = _AT.match(str(error))
    what, path = (str(error), None) if found is None else (found["what"], found["path"])
    if path is None:
        return shown_text(what)
    what = what[:1].lower() + what[1:]
    try:
        value = f" is {shown(_follow(said, path))}"
    except LookupError:
        value = ""
    return f"{path.removeprefix('.')}{value}: {shown_text(what)}"


def shown(value: object) -> str:
    """Return the value as a text of bounded length, on one line."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, (str, bytes)) and len(value) > SHOWN_MAX:
        return f"{value[:SHOWN_MAX]!r}... of length {len(value)}"
    return shown_text(repr(value), SHOWN_MAX)


def shown_text(text: str, most: int = 4 * SHOWN_MAX) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[:most]}..."


def _follow(value: Any, path: str) -> object:
    """Return what lies at a path that msgspec names; it leaves out the keys of a mapping."""
    if "[...]" in path:
        raise LookupError(path)
    for field, index in _PART.findall(path):
        if isinstance(value, msgspec.Struct):
            value = getattr(value, field or value.__struct_fields__[int(index)])
        elif isinstance(value, dict) and field:
            value = value[field]
        elif isinstance(value, (list, tuple)) and index:
            value = value[int(index)]
        else:
            raise LookupError(path)
    return value


def _too_large(value: object, path: str = "") -> str:
    """Return where a number lies that has more than 64 bits; "" if none does."""
    if isinstance(value, int):
        return f"{path} is {shown(value)}" if value.bit_length() > 64 else ""
    if isinstance(value, msgspec.Struct):
        within = ((f"{path}.{n}", getattr(value, n)) for n in value.__struct_fields__)
    elif isinstance(value, dict):
        within = ((f"{path}[{shown(key)}]", each) for key, each in value.items())
    elif isinstance(value, (list, tuple)):
        within = ((f"{path}[{nth}]", each) for nth, each in enumerate(value))
    else:
        return ""
    return next((found for at, each in within if (found := _too_large(each, at))), "")
