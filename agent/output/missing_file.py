"""Hints for a person whose script has found no file, no module or no room. No torch here."""

import errno
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

READ_BACK = (
    "what an earlier step wrote is there only as far as it was stored in time and is kept (docs/script.md): keep what every "
    "step reads back in session.state"
)
SAID = (
    "{} is not on this machine: a file that the script reads goes along with `--with {}`, of submit and rehearse, or lies on "
    f"storage that every machine reaches; {READ_BACK}"
)
ABSOLUTE = (
    "{} is not on this machine: a file that the script reads goes along with `--with PATH`, of submit and rehearse, and is "
    f"opened by a path from the script's folder, or lies on storage that every machine reaches; {READ_BACK}"
)
BESIDE = (
    "{} lies beside the script, at {}, and the script runs in the folder where submit was typed: open "
    "`Path(__file__).parent / ...`, or type submit in the script's folder"
)
FORBIDDEN = (
    "{} may not be opened on this machine: what the script writes belongs into session.output, and what it reads goes "
    "along with `--with PATH`, of submit and rehearse"
)
NOT_WRITTEN = (
    "{} is not in session.output on this worker: in the loop a file is there only as far as it was stored in time, and "
    "job.output_bytes and job.output_files left room for it (docs/script.md); session.state is there in any case"
)
MODULE = (
    "{} is not on this machine: a module beside the script goes along with `--with`, of submit and rehearse, if no import "
    "statement names it; packages are not sent: install it for the Python of the machines (docs/script.md, What a worker has)"
)
NO_ROOM = (
    "the disk of {} is full, {}: write less beside the script and into session.output, or take machines with larger disks "
    "(aws.disk_gib, azure.disk_gb)"
)
NOT_UNPACKED = (
    "{} does not take the files that come with the script, in {}: {}. Make room there, or take machines with larger disks "
    "(aws.disk_gib, azure.disk_gb)"
)
LACKED = (
    "it came into the job without the files that earlier steps wrote, which were not stored in time, and {} is one of "
    "them: another worker takes its place"
)
FULL = (errno.ENOSPC, errno.EDQUOT)
FULL_BYTES = 1 << 20  # with less, an error may come from that: torch.save does not say why it fails
CHAIN_MAX = 20


def hint(error: BaseException, output: Path | None) -> str:
    """Return a line for a traceback; empty if the error is not about a file or a module."""
    for one in _chain(error):
        if isinstance(one, FileNotFoundError | PermissionError):
            return _said(one, output)
        if isinstance(one, ModuleNotFoundError):
            return MODULE.format(one.name) if one.name else ""
    return ""


def no_room(error: BaseException, disk: Path, machine: str) -> str:
    """Return a line for a traceback; empty if there was room on this machine's disk."""
    line = NO_ROOM.format(machine, disk)
    if any(isinstance(one, OSError) and one.errno in FULL for one in _chain(error)):
        return line
    with suppress(OSError):
        if shutil.disk_usage(disk).free < FULL_BYTES:
            said = str(error).partition("\n")[0]
            return f"{line}; that may be the cause of {type(error).__name__}: {said}"
    return ""


def lacked(error: BaseException) -> str:
    """Return what to say of a worker that came in without a file that it reads; empty if it has."""
    names = [one.filename for one in _chain(error) if isinstance(one, FileNotFoundError)]
    return LACKED.format(_shown(names[0])) if names and names[0] else ""


def not_unpacked(error: OSError, disk: Path, machine: str) -> str:
    return NOT_UNPACKED.format(machine, disk, error.strerror or error)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, and those that it comes from."""
    one: BaseException | None = error
    for _ in range(CHAIN_MAX):
        if one is None:
            return
        yield one
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)


def _said(error: FileNotFoundError | PermissionError, output: Path | None) -> str:
    name = error.filename
    if not isinstance(name, str | bytes | os.PathLike) or not os.fspath(name):
        return ""
    text, shown = os.fsdecode(name), _shown(name)
    if output is not None and Path(text).is_relative_to(output):
        return NOT_WRITTEN.format(Path(text).relative_to(output))
    if isinstance(error, PermissionError):
        return FORBIDDEN.format(shown)
    if Path(text).is_absolute():
        return ABSOLUTE.format(shown)
    beside = Path(sys.argv[0]).parent / text
    return BESIDE.format(shown, beside) if beside.exists() else SAID.format(shown, shown)


def _shown(name: str | bytes | os.PathLike[str]) -> str:
    text = os.fsdecode(name)
    return text if text.isprintable() else repr(text)
