"""Whether the proof catches what a script keeps outside its session: each snippet is run as the workers of a job run it.

    python tests/hazards/trial.py            all snippets, into proof.json
    python tests/hazards/trial.py NAME ...   these, to be read; "NAME @ lost 3" in this way only

The first worker begins alone, and what it tells of its commits is remembered as the keeper remembers it. Then, for k of
1, 3 and 5:

    join k    a second worker proves itself by step k, and two steps later takes half of the microbatches
    lost k    all are lost behind step k: a worker proves itself by step k, applies it, and goes on alone
    together  two workers begin together, and nobody joins

A worker of these has no process around it, and no keeper: what it tells is judged by `agent.keeper.proofs`, and what
it does to prove itself is what `agent.worker.proof.reproduction` does.
"""

import json
import os
import pickle
import socket
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
from frames import Snippet
from judge import STEPS, outcome, run, waited
from snippets import SNIPPETS

from agent import session
from agent.errors import Misuse
from agent.keeper.proofs import Proofs, Question, judge
from agent.proof.turns import Shown, is_shown, sampled, turn_of
from agent.protocol import Arrived, Computed, Prepared, Proved, Reached
from agent.replica import Replica
from agent.store.layers import share_of
from agent.store.shares import Gathered, Share
from agent.tensors.partial_sum import Partial
from agent.tensors.sums import Sum, Summed
from agent.worker.peers import ENDS
from agent.world import Alone, Facts, Left

PROOF = Path(__file__).with_name("proof.json")
NAMES = "w1", "w2"
SAME, OTHER, CAUGHT = "", "other", "Caught: "
ENDED = ("EOFError", "BrokenPipeError", "ConnectionResetError")

State = tuple[int, Share, bytes]
Sums = dict[int, tuple[bytes, bytes]]
Fate = Literal[
    "refused alone", "computed twice", "at the join", "while running", "harmless", "not caught"
]


class Caught(BaseException):
    """The sentence by which the keeper would fail the job."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a snippet in each of the ways: empty is as alone, `other` with other weights, else the last words."""

    name: str
    kind: str
    ways: dict[str, str]

    @property
    def fate(self) -> Fate:
        said = {way: words for way, words in self.ways.items() if words}
        if alone := said.get("alone"):
            twice = "just before" in alone or "when it was asked for again" in alone
            return "computed twice" if twice else "refused alone"
        if any(words.startswith((OTHER, *ENDED, "took longer")) for words in said.values()):
            return "not caught"
        if not said:
            return "harmless"
        return "while running" if {*said} == {"together"} or self._late else "at the join"

    @property
    def _late(self) -> bool:
        """Whether somebody was let in who was caught later."""
        lost = any(self.ways.get(f"lost {k}") for k in STEPS)
        return not lost


class Packet(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is sent that has to prove itself."""

    microbatches: int
    question: Question
    base: State
    sums: Sums


class Over(msgspec.Struct, frozen=True, kw_only=True):
    """A script has left its loop: with this state, if it was through with it."""

    reached: Reached | None


class Channel:
    """A wire between two workers."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def say(self, thing: object) -> None:
        body = pickle.dumps(thing)
        self._end.sendall(struct.pack("<q", len(body)) + body)

    def hear(self) -> Any:
        (size,) = struct.unpack("<q", self._read(8))
        return pickle.loads(self._read(size))

    def _read(self, size: int) -> bytes:
        found = bytearray()
        while len(found) < size:
            part = self._end.recv(size - len(found))
            if not part:
                raise EOFError("the other worker has ended")
            found += part
        return bytes(found)


class Worker(Alone):
    """What all workers of a job do: they compare, and share the microbatches of a step once they are two."""

    def __init__(self, channel: Channel | None, index: int = 0) -> None:
        super().__init__()
        self.replica: Replica | None = None
        self.proofs = Proofs()
        self.channel, self.index, self.paired, self.joins = channel, index, False, False
        self.count = 0
        self._last: Reached | None = None

    def bind(self, replica: Replica, facts: Facts) -> bool:
        self.replica, self.count = replica, facts.microbatches
        return super().bind(replica, facts)

    @property
    def leader(self) -> bool:  # type: ignore[override]
        return not (self.paired and self.index)

    @property
    def state_shown(self) -> Shown:  # type: ignore[override]
        """As `agent.worker.group.Group.state_shown`, where a snapshot is taken in each of `STEPS`."""
        assert self.replica is not None
        step = self.replica.step
        if self.replica.stage == "over" or step in STEPS or step - 1 in STEPS:
            return "all"
        return "some" if is_shown(step) else "nothing"

    @property
    def batch_shown(self) -> Shown:  # type: ignore[override]
        assert self.replica is not None
        if self.replica.step in STEPS:
            return "all"
        return "some" if is_shown(self.replica.step) else "nothing"

    def shares(self) -> tuple[tuple[int, int], tuple[int, int]]:
        half = (self.count + 1) // 2
        return (0, half), (half, self.count - half)

    def share(self) -> tuple[int, int]:
        return self.shares()[self.index] if self.paired else (0, self.count)

    @property
    def twice(self) -> int | None:  # type: ignore[override]
        """As `agent.worker.group.Group.twice`."""
        assert self.replica is not None
        early, late = self.shares()
        step = self.replica.step
        if not (self.paired and late[1]):
            return None
        if self.joins:
            return sampled(*early, step) if self.index else late[0]
        turn = turn_of(step, late[1])
        if turn is None or turn % 2 == self.index:
            return None
        return sampled(*early, step) if self.index else sampled(*late, step)

    def all_reduce(self, version: int, partial: Partial, total: Sum) -> None:
        if not self.paired:
            super().all_reduce(version, partial, total)
            return
        assert self.channel is not None
        space, parts = partial.space, dict[Any, Sum]()
        first, count = self.share()
        if count:
            parts = dict(zip(partial.keys(first, count), partial.nodes(first, count), strict=True))
        size = space.total_bytes
        told = [(key, bytes(each.memory(0, size)), each.marks) for key, each in parts.items()]
        self.channel.say(told)
        for key, body, marks in self._hear():
            parts[key] = Sum(space)
            parts[key].memory(0, size)[:] = body
            parts[key].marks = marks

        def add(one: Sum, two: Sum) -> Sum:
            found = Sum(space)
            found.copy_(one)
            space.add(found, two)
            return found

        total.copy_(partial.fold(parts, add))

    def promise(self, version: int, summed: Summed) -> None:
        """Let the keeper compare; nobody goes on before it has."""
        replica = self.replica
        assert replica is not None
        told = Prepared(
            generation=1,
            step=version,
            loss=summed.total.loss,
            present=summed.marks,
            script_step=replica.step,
            phase=replica.phase,
            computed=self.evidence.computed,
            reached=self.evidence.reached if replica.phase == 0 else None,
        )
        self.compared(told, self.proofs.hear)
        self.joins = False

    def compared(self, told: Any, listen: Callable[[str, Any], str]) -> None:
        """Let the first worker judge what both tell."""
        if self.paired and self.index:
            assert self.channel is not None
            self.channel.say(told)
            why = self._hear()
        else:
            why = listen(NAMES[self.index], told)
            if self.paired:
                other = self._hear()
                why = why or listen(NAMES[1], other)
                assert self.channel is not None
                self.channel.say(why)
        if why:
            raise Caught(why)

    def _hear(self) -> Any:
        assert self.channel is not None
        found = self.channel.hear()
        if isinstance(found, Over):
            # As `agent.worker.peers.Crew.go_on`.
            assert self.replica is not None
            if self.replica.played:
                raise Misuse(ENDS.format(self.replica.step))
            raise Left
        return found

    def finish(self, replica: Replica, facts: Facts) -> bool:
        """Let the last state be compared, unless the other worker goes on: it has no step to do any more."""
        if self.paired:
            assert self.channel is not None
            try:
                self.channel.say(Over(reached=self._last))
                other = self.channel.hear()
                if isinstance(other, Over):
                    self._end(other.reached)
            except OSError:
                pass
            except EOFError:
                pass
        return True

    def _end(self, other: Reached | None) -> None:
        assert self.channel is not None
        assert self.replica is not None
        if self.index:
            why = self.channel.hear()
        else:
            told = [(NAMES[0], self._last), (NAMES[1], other)]
            step = self.replica.step
            arrived = (
                (name, Arrived(generation=1, script_step=step, reached=reached))
                for name, reached in told
                if reached is not None
            )
            why = next(filter(None, (self.proofs.arrive(*each) for each in arrived)), "")
            self.channel.say(why)
        if why:
            raise Caught(why)

    def close(self) -> None:
        """The script has ended."""
        for each in session.made():
            each.close()

    def arrived(self, reached: Reached) -> None:
        assert self.replica is not None
        if self.replica.stage == "over":
            self._last = reached
        elif self.state_shown == "all":
            told = Arrived(generation=1, script_step=self.replica.step, reached=reached)
            self.compared(told, self.proofs.arrive)

    def _load(self, replica: Replica, state: State) -> None:
        version, share, body = state
        gathered = Gathered()
        gathered.add(share, memoryview(body))
        replica.load(gathered, version)


class First(Worker):
    """The one that begins the job. Another joins behind a step, or what that would be sent lies in a folder."""

    def __init__(
        self, channel: Channel | None = None, joined: int | None = None, folder: Path | None = None
    ) -> None:
        super().__init__(channel)
        self._joined, self._folder = joined, folder
        self.paired = channel is not None and joined is None
        self._bases: dict[int, State] = {}
        self._sums: Sums = {}

    def boundary(self, replica: Replica, facts: Facts) -> None:
        super().boundary(replica, facts)
        if replica.step in STEPS:
            self._bases[replica.step] = self._state(replica)
        if self._joined is not None and replica.step == self._joined + 2:
            self._let_in(replica)

    def promise(self, version: int, summed: Summed) -> None:
        size = summed.total.space.total_bytes
        self._sums[version] = bytes(summed.total.memory(0, size)), summed.marks
        super().promise(version, summed)

    def arrived(self, reached: Reached) -> None:
        super().arrived(reached)
        assert self.replica is not None
        k = self.replica.step - 1
        if self._folder is not None and k in self._bases:
            (self._folder / f"{k}.packet").write_bytes(pickle.dumps(self._packet(k)))

    def _state(self, replica: Replica) -> State:
        share, pieces = share_of(replica.settled(), 1, 0)
        return replica.version, share, b"".join(bytes(piece) for piece in pieces)

    def _packet(self, k: int) -> Packet:
        assert self.replica is not None
        base = self._bases[k]
        question = self.proofs.question(base[0], self.replica.version)
        assert question is not None
        assert question.complete
        asked = range(base[0], base[0] + question.commits)
        sums = {version: self._sums[version] for version in asked}
        return Packet(microbatches=self.count, question=question, base=base, sums=sums)

    def _let_in(self, replica: Replica) -> None:
        assert self.channel is not None
        assert self._joined is not None
        packet = self._packet(self._joined)
        self.channel.say(packet)
        why = judge(NAMES[1], packet.question, self.channel.hear())
        self.channel.say(why)
        if why:
            raise Caught(why)
        self.channel.say(self._state(replica))
        self.paired = self.joins = True


class Second(Worker):
    """One that proves itself, and then joins the first; or, where nobody is left, goes on from what is stored."""

    def __init__(self, channel: Channel | None = None, stored: Path | None = None) -> None:
        super().__init__(channel, index=0 if channel is None else 1)
        self._stored, self._packet = stored, None
        self._stage: Literal["new", "proving", "inside"] = "new"
        self._computed, self._reached = list[Computed](), list[Reached]()

    @property
    def packet(self) -> Packet:
        if self._packet is None:
            if self._stored is not None:
                self._packet = pickle.loads(self._stored.read_bytes())
            else:
                assert self.channel is not None
                self._packet = self.channel.hear()
        return self._packet

    @property
    def microbatches(self) -> int:  # type: ignore[override]
        return self.packet.microbatches

    @property
    def leader(self) -> bool:  # type: ignore[override]
        return self._stage == "inside" and super().leader

    @property
    def state_shown(self) -> Shown:  # type: ignore[override]
        return "all" if self._stage == "proving" else super().state_shown

    @property
    def batch_shown(self) -> Shown:  # type: ignore[override]
        return "all" if self._stage == "proving" else super().batch_shown

    def boundary(self, replica: Replica, facts: Facts) -> None:
        if self._stage == "new":
            self._stage = "proving"
            self._load(replica, self.packet.base)
            self._reached.append(self.evidence.look(whole=True))
        elif self._stage == "proving":
            self._reached.append(self.evidence.look(whole=True))
            self._answer(replica)
        super().boundary(replica, facts)

    def _answer(self, replica: Replica) -> None:
        packet, self._stage = self.packet, "inside"
        proved = Proved(
            version=packet.question.version,
            computed=tuple(self._computed),
            reached=tuple(self._reached),
        )
        if self.channel is not None:
            self.channel.say(proved)
            why = self.channel.hear()
        else:
            why = judge(NAMES[0], packet.question, proved)
        if why:
            raise Caught(why)
        if self.channel is None:
            self.proofs.learn(packet.question)
            self._load(replica, packet.base)
        else:
            self._load(replica, self.channel.hear())
            self.paired = self.joins = True

    def asked(self, phase: int) -> int | None:  # type: ignore[override]
        microbatches = self.packet.question.microbatches
        proves = self._stage == "proving" and phase < len(microbatches)
        return microbatches[phase] if proves else None

    def logged(self, version: int) -> Summed | None:  # type: ignore[override]
        assert self.replica is not None
        if self._stage == "proving":
            asked = self.asked(self.replica.phase)
            self._computed += (one for one in self.evidence.computed if one.microbatch == asked)
        known = version in self.packet.sums
        if not known or (self._stage == "inside" and self.paired):
            if self._stage == "proving":
                raise Caught(f"step {self.replica.step}: it calls session.backward more often")
            return None
        payload, marks = self.packet.sums[version]
        return self.replica.summed(memoryview(payload), marks)


def tried(snippet: Snippet, folder: Path, only: str = "") -> Trial:
    """Run one snippet alone, and in one or all of the other ways."""
    script, alone = folder / "train.py", folder / "alone.pt"
    script.write_text(snippet.script)
    waited([run(script, alone, First(folder=folder), checked=True)])
    ways = {"alone": outcome(alone)}
    if not ways["alone"]:
        begun = [k for k in STEPS if (folder / f"{k}.packet").exists()]
        outs = {k: folder / f"lost-{k}.pt" for k in begun if only in ("", f"lost {k}")}
        stored = {k: Second(stored=folder / f"{k}.packet") for k in outs}
        waited([run(script, outs[k], stored[k], checked=True) for k in outs])
        ways |= {f"lost {k}": outcome(outs[k], alone) for k in outs}
        joined = {f"join {k}": k for k in begun} | {"together": None}
        for way, k in joined.items():
            if only in ("", way):
                ways[way] = _paired(script, folder / way.replace(" ", "-"), alone, k)
    return Trial(name=snippet.name, kind=snippet.kind, ways=ways)


def _paired(script: Path, stem: Path, alone: Path, joined: int | None) -> str:
    ends, pids = socket.socketpair(), []
    outs = [stem.with_name(f"{stem.name}-{index}.pt") for index in range(2)]
    for index in range(2):
        pid = os.fork()
        if not pid:
            ends[1 - index].close()
            waited(
                [
                    run(
                        script,
                        outs[index],
                        _member(Channel(ends[index]), index, joined),
                        checked=True,
                    )
                ]
            )
            os._exit(0)
        pids.append(pid)
    for end in ends:
        end.close()
    waited(pids)
    one, two = (outcome(out, alone) for out in outs)
    if not one and two.startswith(ENDED):
        # It was never let in.
        return SAME
    # One that has no step to do any more leaves nothing.
    found = [each for each in (one, two) if each and not each.startswith("Left:")]
    return next((each for each in found if not each.startswith(ENDED)), *found[:1] or (SAME,))


def _member(channel: Channel, index: int, joined: int | None) -> Worker:
    if not index:
        return First(channel, joined)
    if joined is not None:
        return Second(channel)
    found = Worker(channel, index)
    found.paired = True
    return found


def main(names: list[str]) -> None:
    lines = []
    for asked in names or SNIPPETS:
        name, _, only = asked.partition(" @ ")
        with tempfile.TemporaryDirectory() as folder:
            trial = tried(SNIPPETS[name], Path(folder), only)
        lines.append(json.dumps(msgspec.to_builtins(trial) | {"fate": trial.fate}))
        sys.stdout.write(f"{lines[-1]}\n")
        sys.stdout.flush()
    if not names:
        PROOF.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    # By its name, because each script that is run is the main module of its process.
    import trial

    trial.main(sys.argv[1:])
