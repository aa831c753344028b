"""Hints for a person whose script has not found a file or a module. No torch here."""

import os
from pathlib import Path

SAID = (
    "{} is not on this machine: a file that the script reads goes along with `--with {}`, of submit and rehearse, or lies on "
    "storage that every machine reaches; what it writes belongs into session.output"
)
ABSOLUTE = (
    "{} is not on this machine: a file that the script reads goes along with `--with PATH`, of submit and rehearse, and is "
    "opened by a path from the script's folder, or lies on storage that every machine reaches; what it writes belongs into "
    "session.output"
)
FORBIDDEN = (
    "{} may not be opened on this machine: what the script writes belongs into session.output, and what it reads goes "
    "along with `--with PATH`, of submit and rehearse"
)
NOT_WRITTEN = (
    "{} is not in session.output on this worker: what is read back in a later step belongs into session.state, which "
    "every worker has"
)
MODULE = (
    "{} is not on this machine: a module beside the script goes along with `--with`, of submit and rehearse, if no import "
    "statement names it; packages are not sent: install it for the Python of the machines (docs/script.md, What a worker has)"
)
CHAIN_MAX = 20


def hint(error: BaseException, output: Path | None) -> str:
    """Return a line for a traceback; empty if the error is not about a file or a module."""
    one: BaseException | None = error
    for _ in range(CHAIN_MAX):
        if one is None:
            break
        if isinstance(one, FileNotFoundError | PermissionError):
            return _said(one, output)
        if isinstance(one, ModuleNotFoundError):
            return MODULE.format(one.name) if one.name else ""
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
    return ""


def _said(error: FileNotFoundError | PermissionError, output: Path | None) -> str:
    name = error.filename
    if not isinstance(name, str | bytes | os.PathLike) or not os.fspath(name):
        return ""
    text = os.fsdecode(name)
    shown = text if text.isprintable() else repr(text)
    if output is not None and Path(text).is_relative_to(output):
        return NOT_WRITTEN.format(Path(text).relative_to(output))
    if isinstance(error, PermissionError):
        return FORBIDDEN.format(shown)
    return ABSOLUTE.format(shown) if Path(text).is_absolute() else SAID.format(shown, shown)
