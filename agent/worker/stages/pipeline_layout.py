"""A worker's place in a layout of deep chains, and what of it outlives the layout.

A chain is made for each layout, and for each graph that the script's loss turns out to have. Each
loss function of a script has a chain, so a step of several phases uses several. The first worker of
the layout chooses where the graph is cut, if the layout does not say so, and sends the cuts to the
others. It sends its facts about the graph too, so that a worker that records the loss later does
not have to run it to find them.
"""

from collections.abc import Callable
from typing import Any

import msgspec
import torch

from agent.errors import Misuse
from agent.faults import passing
from agent.layout import Layout
from agent.pipeline.stages.channel import Channel, Parcel
from agent.pipeline.stages.cut import Sections
from agent.pipeline.stages.transport import MeshChannel, nothing
from agent.pipeline.tracing.analysis import Facts, cut_points
from agent.pipeline.tracing.graphs import Recording
from agent.worker.rerecording import Anew
from agent.worker.stages.pipeline_step import Chain, Whole

ASKING = "recorded?"


class Word(msgspec.Struct, frozen=True):
    """The first worker's word on its recording: which graph it is, and where it is cut."""

    mark: str
    cuts: tuple[int, ...]
    facts: Facts
    # The leaves of the microbatch that it was recorded with, in case others record a different
    # graph.
    numbers: tuple[bool | int | float | None, ...] = ()
    tensors: tuple[torch.Tensor | None, ...] = ()

    @classmethod
    def of(cls, recording: Recording, cuts: tuple[int, ...]) -> "Word":
        begun = recording.beginning
        numbers = tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in begun)
        tensors = tuple(leaf if isinstance(leaf, torch.Tensor) else None for leaf in begun)
        return cls(recording.mark, cuts, recording.facts, numbers, tensors)

    @property
    def example(self) -> tuple[Any, ...]:
        both = zip(self.tensors, self.numbers, strict=True)
        return tuple(number if tensor is None else tensor for tensor, number in both)


class FirstWord:
    """The `Word` of the first worker on its way to the others, sent once in a chain.

    A worker that makes a chain asks for it. So neither waits for ever where only one of them
    computes something else than before.
    """

    def __init__(self, channel: Channel, workers: tuple[str, ...], step: int) -> None:
        self._channel, self._workers, self._step = channel, workers, step
        self._tag = f"recorded/{step}"
        self._word: Word | None = None

    def say(self, word: Word) -> None:
        self._asking()  # so that no question that is answered now is kept
        # Encoded once for all peers.
        plain = msgspec.msgpack.encode(msgspec.structs.replace(word, tensors=()))
        parcel = Parcel(tensors=word.tensors, plain=plain)
        for peer in self._workers[1:]:
            self._channel.send(peer, self._tag, parcel)

    def heard(self) -> Word:
        if self._word is None:
            if not self._channel.ready(self._workers[0], self._tag):
                self._channel.send(self._workers[0], ASKING, Parcel(tensors=(), plain=self._step))
            parcel = self._channel.receive(self._workers[0], self._tag)
            assert isinstance(parcel.plain, bytes)
            word = msgspec.msgpack.decode(parcel.plain, type=Word)
            self._word = msgspec.structs.replace(word, tensors=parcel.tensors)
        return self._word

    def facts(self, mark: str) -> Facts | None:
        """Return the facts about this graph if they have arrived already; never wait for them."""
        return self.heard().facts if self.known and self.heard().mark == mark else None

    def disputed(self, me: str, mark: str, *, made: bool) -> str | None:
        """Return a worker that computes another graph in this step; `made`: this one says its own."""
        if me != self._workers[0]:
            return self._workers[0] if self.known and self.heard().mark != mark else None
        if made:
            return None
        return next(iter(self._asking()), None)

    def _asking(self) -> list[str]:
        """Take the questions that are here, and return who asks about this step.

        Of each worker the newest one is held, because all of them have the same name.
        """
        here = [peer for peer in self._workers[1:] if self._channel.ready(peer, ASKING)]
        return [p for p in here if self._channel.receive(p, ASKING).plain == self._step]

    @property
    def known(self) -> bool:
        """Return whether `heard` would return at once."""
        return self._word is not None or self._channel.ready(self._workers[0], self._tag)


class Deep:
    """What a worker keeps from one deep layout to the next."""

    def __init__(self, me: str) -> None:
        self._me = me
        self._sections = Sections()
        self._anew = Anew()
        self._channel: MeshChannel | None = None
        self._generation, self._entering = -1, True
        self._chains: list[Chain] = []  # one for each loss function, the last used first

    def leave(self) -> None:
        """Stop sending in the layout that has ended, and drop its chains."""
        if self._channel is not None:
            self._channel.break_off("the layout has changed")
        self._channel, self._chains, self._entering = None, [], True

    def chain(
        self,
        layout: Layout,
        step: int,
        to_play: Callable[..., Recording],
        adopt: Callable[[Recording], None],
        whole: Whole,
        channel: Callable[[], MeshChannel],
    ) -> Chain:
        """Return the chain of this layout, a different one if the script's computation changed."""
        if self._generation != layout.generation:
            self.leave()
            self._generation = layout.generation
        if self._channel is None:
            self._channel = channel()
        self._channel.watch = nothing  # the step before is over
        word = FirstWord(self._channel, layout.workers, step)
        recording = self._anew.recorded(step, lambda: to_play(word.facts, entered=self._entering))
        # A recording with other numbers in the loss's closure, which are not in the graph, has the
        # same graph.
        found = [each for each in self._chains if each.recording.graph is recording.graph]
        self._entering = self._entering and not found
        made = not found
        if made:
            recording = self._begun_alike(layout, recording, word, adopt)
            cuts = self._cuts(layout, step, recording, word)
            found = [Chain(layout, self._me, recording, cuts, self._channel, whole)]
        self._chains = [*found, *(each for each in self._chains if not _replaced(each, found[0]))]
        self._watch(self._channel, step, word, recording.mark, made=made)
        return found[0]

    def _watch(
        self, channel: MeshChannel, step: int, word: FirstWord, mark: str, *, made: bool
    ) -> None:
        """Refuse, while the step waits for others, that one of them computes another graph in it."""

        def look() -> None:
            channel.watch = nothing  # the word is received once
            if (other := word.disputed(self._me, mark, made=made)) is not None:
                raise _disputed(step, other)
            if not word.known:
                channel.watch = look

        channel.watch = look

    def keepers(self) -> dict[str, frozenset[str] | None]:
        """Return which layers each worker has after a step in which each keeps its own."""
        return dict(self._chains[0].keepers())

    def _begun_alike(
        self,
        layout: Layout,
        recording: Recording,
        word: FirstWord,
        adopt: Callable[[Recording], None],
    ) -> Recording:
        """Return a recording that begins with the first worker's graph, so that the cuts fit.

        Cuts are places in one graph, and workers may compute microbatches of different graphs.
        """
        if not recording.fixed or layout.workers[0] == self._me:
            return recording
        heard = word.heard()
        if heard.mark != recording.mark and heard.example:
            recording = recording.begun_with(recording.variants.of(heard.example))
            adopt(recording)
        return recording

    def _cuts(
        self, layout: Layout, step: int, recording: Recording, word: FirstWord
    ) -> tuple[int, ...]:
        """Return the layout's cuts if they fit this graph, else those the first worker chooses."""
        schedule = layout.schedule_of(layout.replica_of(self._me))
        stages = schedule.stages
        known = {point.after for point in cut_points(recording.facts)}
        told = len(layout.cuts) == stages - 1 and known.issuperset(layout.cuts)
        if layout.workers[0] == self._me:
            cuts = layout.cuts
            if not told:
                graph, facts = recording.graph, recording.facts
                cuts = self._sections.choose(graph, facts, recording.example, stages, schedule)
            word.say(Word.of(recording, cuts))
            passing("morph: cuts told")
            return cuts
        if told and not recording.fixed:
            return layout.cuts
        heard = word.heard()
        passing("morph: cuts told")
        if heard.mark != recording.mark:
            raise _disputed(step, layout.workers[0])
        return heard.cuts


def _disputed(step: int, other: str) -> Misuse:
    return Misuse(
        f"step {step}: loss_of computes something else here than on {other}, because it closes over "
        "something that is not the same on every worker: keep it in session.state, or set it anew in every step, as it "
        "depends on the step"
    )


def _replaced(chain: Chain, by: Chain) -> bool:
    return chain.recording.closure.of_same_function(by.recording.closure)
