"""One worker: runs the person's script in a process of its own, as `python script.py` would.

The script finds itself as `__main__`, with its own arguments and its own folder first on the path. What it
prints goes to the keeper as lines. How it ends is said to the keeper in one word and, if it
failed, with its own traceback: the frames are the script's and its libraries', none are ours.
"""

import io
import sys
import threading
import traceback
import types
from collections.abc import Callable
from pathlib import Path

from agent import session as sessions
from agent.errors import Dismissed, Misuse, NotFinite
from agent.group import Group
from agent.messages import FailureKind, JobOrder, WorkerOrder
from agent.protocol import Ended, Failed, Lines
from agent.wire import job_secret

LINE_CHARS_MAX = 4_000
LINES_HELD_MAX = 10_000
FLUSH_S = 0.2
TRACEBACK_CHARS_MAX = 20_000
OURS = str(Path(__file__).parent)


class Outcome(Exception):  # noqa: N818 - how a script ended, when it did not end well
    def __init__(self, kind: FailureKind, detail: str) -> None:
        super().__init__(detail)
        self.kind: FailureKind = kind
        self.detail = detail[-TRACEBACK_CHARS_MAX:]


class LineSink(io.TextIOBase):
    """Takes what the script prints and hands it on in whole lines, a few times a second."""

    def __init__(self, hand_on: Callable[[tuple[str, ...]], None]) -> None:
        self._hand_on = hand_on
        self._lock = threading.Lock()
        self._rest = ""
        self._lines: list[str] = []
        self._dropped = 0
        self._stop = threading.Event()
        threading.Thread(target=self._pump, name="lines", daemon=True).start()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        with self._lock:
            *whole, self._rest = (self._rest + text).split("\n")
            for line in whole:
                self._take(line)
            while len(self._rest) > LINE_CHARS_MAX:
                self._take(self._rest[:LINE_CHARS_MAX])
                self._rest = self._rest[LINE_CHARS_MAX:]
        return len(text)

    def _take(self, line: str) -> None:
        if len(self._lines) < LINES_HELD_MAX:
            self._lines.append(line[:LINE_CHARS_MAX])
        else:
            self._dropped += 1

    def _pump(self) -> None:
        while not self._stop.wait(FLUSH_S):
            self.hand_over()

    def hand_over(self) -> None:
        with self._lock:
            lines, self._lines = self._lines, []
            if self._dropped:
                lines.append(f"({self._dropped} lines were left out)")
                self._dropped = 0
            if lines:
                self._hand_on(tuple(lines))

    def finish(self) -> None:
        self._stop.set()
        with self._lock:
            if self._rest:
                self._take(self._rest)
                self._rest = ""
        self.hand_over()


def run_order(order: WorkerOrder, host: str, folder: Path, ended: Callable[[str], None]) -> str:
    """The whole life of a worker: join the job, run its script, say how it ended."""
    group = Group(
        job=order.job,
        worker=order.worker,
        machine_id=order.machine_id,
        keeper_address=order.keeper_address,
        secret=job_secret(order.secret, order.job),
        host=host,
        ended=ended,
    )
    job, script = group.start()
    sessions.join(group)
    sink = LineSink(lambda lines: group.link.send(Lines(lines=lines)))
    before = sys.stdout, sys.stderr
    sys.stdout = sys.stderr = sink
    try:
        _run_script(job, script, folder)
    except Outcome as outcome:
        sink.finish()
        group.link.send(Failed(kind=outcome.kind, detail=outcome.detail))
        return outcome.kind
    except Dismissed:
        return "dismissed"
    else:
        sink.finish()
        group.link.send(Ended())
        return "ended"
    finally:
        sys.stdout, sys.stderr = before
        group.close()


def _run_script(job: JobOrder, script: bytes, folder: Path) -> None:
    path = folder / (Path(job.script).name or "script.py")
    path.write_bytes(script)
    sys.argv = [str(path), *job.argv]
    sys.path.insert(0, str(folder))
    main = types.ModuleType("__main__")
    main.__file__ = str(path)
    sys.modules["__main__"] = main
    try:
        exec(compile(script, str(path), "exec"), main.__dict__)  # noqa: S102 - it is what the person sent
    except SystemExit as left:
        if left.code not in (None, 0):
            raise Outcome("exit", f"the script called sys.exit({left.code!r})") from None
    except Dismissed:
        raise
    except BaseException as error:
        raise _outcome(error) from error
    _close(job)


def _close(job: JobOrder) -> None:
    made = sessions.made()
    if not made:
        raise Outcome(
            "no_session",
            f"{job.script} ran to its end without making a Session: wrap its training loop in "
            "`for step in session.steps(...)`; see docs/tutorial.md",
        )
    try:
        made[0].close()
    except Dismissed:
        raise
    except Exception as error:
        raise _outcome(error) from error


def _outcome(error: BaseException) -> Outcome:
    kind: FailureKind = "nan" if isinstance(error, NotFinite) else "exception"
    if isinstance(error, NotFinite | Misuse):
        line = _line_of_script(error)
        return Outcome(kind, f"{type(error).__name__}: {error}{line}")
    return Outcome(kind, own_traceback(error))


def own_traceback(error: BaseException) -> str:
    """As Python prints it, without the frames that are ours."""
    told = traceback.TracebackException.from_exception(error)
    one: traceback.TracebackException | None = told
    seen = set()
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        kept = [frame for frame in one.stack if not frame.filename.startswith(OURS)]
        one.stack = traceback.StackSummary.from_list(kept)
        one = one.__cause__ or one.__context__
    return "".join(told.format()).rstrip()


def _line_of_script(error: BaseException) -> str:
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(OURS)
    ]
    if not frames:
        return ""
    last = frames[-1]
    return f"\n  {Path(last.filename).name}, line {last.lineno}: {last.line}"
