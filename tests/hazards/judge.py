"""Whether what a script keeps outside its session reaches a weight: each snippet is run, and compared to the bit.

    python tests/hazards/judge.py            all snippets, into truth.json
    python tests/hazards/judge.py NAME ...   these, to be read

Each is run alone; in fresh processes that begin at step 1, 3 and 5 with the state that the first run had there, as a
job does that has lost all its workers; and by two workers that share the microbatches of each step. What workers
compute is compared with nothing on the way: this is what would come out if nobody looked. A fresh process is a fork
of one that has loaded torch and computed nothing yet.
"""

import json
import os
import pickle
import runpy
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from frames import Snippet
from snippets import SNIPPETS

from agent import session
from agent.proof.evidence import Evidence
from agent.replica import Replica
from agent.store.layers import share_of
from agent.store.shares import Gathered
from agent.tensors.partial_sum import Partial
from agent.tensors.staging import Away
from agent.tensors.sums import Sum
from agent.world import Alone, Facts

STEPS = (1, 3, 5)
LIMIT_S = 60
TRUTH = Path(__file__).with_name("truth.json")


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a snippet. Empty is: as alone; `other` is: with other weights; else it is the error's line."""

    name: str
    kind: str
    alone: str
    """What a session says of it alone, where one microbatch is computed twice; empty if nothing."""
    lost: dict[str, str]
    """By the step that a fresh process began with."""
    shared: str

    @property
    def reaches(self) -> bool:
        """Whether a job in which nobody compares would end with other weights, and no word."""
        return "other" in (*self.lost.values(), self.shared)


class Recorded(Alone):
    """Alone, and remembers its state at some steps."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def boundary(self, replica: Replica, facts: Facts) -> None:
        super().boundary(replica, facts)
        if replica.step in STEPS:
            share, pieces = share_of(replica.settled(), 1, 0)
            assert not any(isinstance(piece, Away) for piece in pieces)
            body = b"".join(bytes(piece) for piece in pieces)
            saved = share, body, replica.version, facts.microbatches
            (self._folder / f"{replica.step}.state").write_bytes(pickle.dumps(saved))


class Resumed(Alone):
    """Alone, from a state that another process had."""

    def __init__(self, saved: Path) -> None:
        super().__init__()
        share, body, self._version, self.microbatches = pickle.loads(saved.read_bytes())
        self._gathered = Gathered()
        self._gathered.add(share, memoryview(body))
        self._loaded = False

    def boundary(self, replica: Replica, facts: Facts) -> None:
        if not self._loaded:
            self._loaded = True
            replica.load(self._gathered, self._version)
        super().boundary(replica, facts)


class Half(Alone):
    """One of two workers that share the microbatches of each step from the first one on."""

    def __init__(self, index: int, other: socket.socket) -> None:
        super().__init__()
        self._index, self._other, self.leader = index, other, not index

    def bind(self, replica: Replica, facts: Facts) -> bool:
        count, half = facts.microbatches, (facts.microbatches + 1) // 2
        self._shares = (0, half), (half, count - half)
        self._share = self._shares[self._index]
        return super().bind(replica, facts)

    def share(self) -> tuple[int, int]:
        return self._shares[self._index]

    def all_reduce(self, version: int, partial: Partial, total: Sum) -> None:
        space, parts = partial.space, dict[Any, Sum]()
        first, count = self.share()
        if count:
            parts = dict(zip(partial.keys(first, count), partial.nodes(first, count), strict=True))
        size = space.total_bytes
        told = [(key, bytes(each.memory(0, size)), each.marks) for key, each in parts.items()]
        for key, body, marks in self._exchanged(told):
            parts[key] = Sum(space)
            parts[key].memory(0, size)[:] = body
            parts[key].marks = marks

        def add(one: Sum, two: Sum) -> Sum:
            found = Sum(space)
            found.copy_(one)
            space.add(found, two)
            return found

        total.copy_(partial.fold(parts, add))

    def _exchanged(self, told: object) -> list[tuple[Any, bytes, bytes]]:
        body = pickle.dumps(told)
        self._other.sendall(struct.pack("<q", len(body)) + body)
        (size,) = struct.unpack("<q", self._received(8))
        found: list[tuple[Any, bytes, bytes]] = pickle.loads(self._received(size))
        return found

    def _received(self, size: int) -> bytes:
        found = b""
        while len(found) < size:
            part = self._other.recv(size - len(found))
            if not part:
                raise EOFError("the other worker has ended")
            found += part
        return found


def unheard(*_: object) -> None:
    """Takes the place of what would be said of a difference."""


def run(script: Path, out: Path, world: Alone, *, checked: bool = False) -> int:
    """Start the script in a process of its own; its last words are beside what it leaves."""
    pid = os.fork()
    if pid:
        return pid
    words = ""
    try:
        for stream in (1, 2):
            os.dup2(os.open(out.with_suffix(f".{stream}"), os.O_WRONLY | os.O_CREAT), stream)
        sys.argv = [str(script), str(out)]
        session.join(world)
        if not checked:
            Evidence._differs = unheard  # type: ignore[method-assign]
        runpy.run_path(str(script), run_name="__main__")
        getattr(world, "close", lambda: None)()
    except BaseException as error:
        words = f"{type(error).__name__}: {error}".splitlines()[0]
    finally:
        out.with_suffix(".words").write_text(words)
        os._exit(0)


def waited(pids: Iterable[int]) -> None:
    """Wait until these have ended; those that take too long are ended."""
    end_s = time.monotonic() + LIMIT_S
    for pid in pids:
        while not os.waitpid(pid, os.WNOHANG)[0]:
            if time.monotonic() > end_s:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)


def said(value: Any) -> Any:
    """The bits of a value, nested as it is."""
    if isinstance(value, torch.Tensor):
        whole = value.detach().contiguous()
        return str(whole.dtype), tuple(whole.shape), whole.view(-1).view(torch.uint8).tolist()
    if isinstance(value, Mapping):
        return [(str(key), said(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [said(item) for item in value]
    return repr(value)


def outcome(out: Path, expected: Path | None = None) -> str:
    """The error's last line; `other` if what it leaves is not what is expected."""
    words = out.with_suffix(".words")
    if not words.exists():
        return f"took longer than {LIMIT_S} s"
    if line := words.read_text():
        return line
    if not out.exists():
        return "left nothing"
    if expected is None:
        return ""
    one, two = (torch.load(each, weights_only=False) for each in (out, expected))
    return "" if said(one) == said(two) else "other"


def judged(snippet: Snippet, folder: Path) -> Verdict:
    """Run one snippet in all ways."""
    script = folder / "train.py"
    script.write_text(snippet.script)
    told, alone, again = (folder / f"{name}.pt" for name in ("told", "alone", "again"))
    pids = [run(script, told, Alone(), checked=True), run(script, again, Alone())]
    waited([*pids, run(script, alone, Recorded(folder))])
    found, lost, shared = outcome(told), dict[str, str](), ""
    if outcome(alone) or outcome(again):
        # It fails alone, whoever looks.
        found = found or outcome(alone)
    elif outcome(again, alone):
        found = "does not come out the same twice"
    else:
        outs = {step: folder / f"from-{step}.pt" for step in STEPS}
        states = {step: folder / f"{step}.state" for step in STEPS}
        begun = [step for step in STEPS if states[step].exists()]
        waited([run(script, outs[step], Resumed(states[step])) for step in begun])
        lost = {str(step): outcome(outs[step], alone) for step in begun}
        shared = _shared(script, folder, alone)
    return Verdict(name=snippet.name, kind=snippet.kind, alone=found, lost=lost, shared=shared)


def _shared(script: Path, folder: Path, alone: Path) -> str:
    ends, outs, pids = socket.socketpair(), [folder / "half-0.pt", folder / "half-1.pt"], []
    for index in range(2):
        pid = os.fork()
        if not pid:
            ends[1 - index].close()
            inner = run(script, outs[index], Half(index, ends[index]))
            ends[index].close()
            waited([inner])
            os._exit(0)
        pids.append(pid)
    for end in ends:
        end.close()
    waited(pids)
    found = [each for out in outs if (each := outcome(out, alone))]
    return next((each for each in found if not each.startswith("EOFError")), *found[:1] or ("",))


def main(names: list[str]) -> None:
    lines = []
    for name in names or SNIPPETS:
        with tempfile.TemporaryDirectory() as folder:
            verdict = judged(SNIPPETS[name], Path(folder))
        lines.append(json.dumps(msgspec.to_builtins(verdict) | {"reaches": verdict.reaches}))
        sys.stdout.write(f"{lines[-1]}\n")
        sys.stdout.flush()
    if not names:
        TRUTH.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main(sys.argv[1:])
