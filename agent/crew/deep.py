"""Where a worker is in a layout of deep chains, and what of that outlives a layout.

A chain is made anew for each layout, and for each graph that the script's loss turns out to have; each loss function of
a script has one, so that a step of several phases has several. Who is first
in the layout chooses where the graph is cut, if the layout does not say so, and tells the others; with that goes what
it has found out about the graph, so that whoever records the loss later does not run it for that.
"""

from collections.abc import Callable
from typing import Any

import msgspec
import torch

from agent.crew.anew import Anew
from agent.crew.chain import Chain, Whole
from agent.errors import Misuse
from agent.faults import passing
from agent.layout import Layout
from agent.pipeline.channel import Channel, Parcel
from agent.pipeline.cut import Sections
from agent.pipeline.examine import Facts, cut_points
from agent.pipeline.recording import Recording
from agent.pipeline.wires import MeshChannel


class Word(msgspec.Struct, frozen=True):
    """What the first worker of a layout has to say of its recording: which graph it is, and where it is cut."""

    mark: str
    cuts: tuple[int, ...]
    facts: Facts
    # Of the microbatch that it was recorded with, if others may make another graph.
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
    """... on its way to the others, once in a chain."""

    def __init__(self, channel: Channel, workers: tuple[str, ...], tag: str) -> None:
        self._channel, self._workers, self._tag = channel, workers, tag
        self._word: Word | None = None

    def say(self, word: Word) -> None:
        plain = msgspec.msgpack.encode(msgspec.structs.replace(word, tensors=()))  # once for all
        parcel = Parcel(tensors=word.tensors, plain=plain)
        for peer in self._workers[1:]:
            self._channel.send(peer, self._tag, parcel)

    def heard(self) -> Word:
        if self._word is None:
            parcel = self._channel.receive(self._workers[0], self._tag)
            assert isinstance(parcel.plain, bytes)
            word = msgspec.msgpack.decode(parcel.plain, type=Word)
            self._word = msgspec.structs.replace(word, tensors=parcel.tensors)
        return self._word

    def facts(self, mark: str) -> Facts | None:
        """What is known of this graph, if it has come already: nobody waits for that."""
        if self._word is None and not self._channel.ready(self._workers[0], self._tag):
            return None
        return self.heard().facts if self.heard().mark == mark else None


class Deep:
    """What a worker keeps of deep layouts, from one to the next."""

    def __init__(self, me: str) -> None:
        self._me = me
        self._sections = Sections()
        self._anew = Anew()
        self._channel: MeshChannel | None = None
        self._generation, self._entering = -1, True
        self._chains: list[Chain] = []  # one for each loss function, the last used first

    def leave(self) -> None:
        """The layout is not the one any more: nothing more of it is sent."""
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
        """The chain of this layout; another one if the script computes something else now."""
        if self._generation != layout.generation:
            self.leave()
            self._generation = layout.generation
        if self._channel is None:
            self._channel = channel()
        word = FirstWord(self._channel, layout.workers, f"recorded/{step}")
        recording = self._anew.recorded(step, lambda: to_play(word.facts, entered=self._entering))
        # Numbers that the loss closes over and that are not in its graph make another recording of the same graph.
        found = [each for each in self._chains if each.recording.graph is recording.graph]
        self._entering = self._entering and not found
        if not found:
            recording = self._begun_alike(layout, recording, word, adopt)
            cuts = self._cuts(layout, step, recording, word)
            found = [Chain(layout, self._me, recording, cuts, self._channel, whole)]
        self._chains = [*found, *(each for each in self._chains if not _replaced(each, found[0]))]
        return found[0]

    def keepers(self) -> dict[str, frozenset[str] | None]:
        """Who has what, behind a step of a layout in which each keeps its own."""
        return dict(self._chains[0].keepers())

    def _begun_alike(
        self,
        layout: Layout,
        recording: Recording,
        word: FirstWord,
        adopt: Callable[[Recording], None],
    ) -> Recording:
        """Cuts are places in one graph: where others may compute other microbatches, everyone begins with that of the first worker."""
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
        """Those of the layout, if they are of this graph; else the first worker chooses for all."""
        stages = layout.schedule_of(layout.replica_of(self._me)).stages
        known = {point.after for point in cut_points(recording.facts)}
        told = len(layout.cuts) == stages - 1 and known.issuperset(layout.cuts)
        if layout.workers[0] == self._me:
            cuts = layout.cuts
            if not told:
                graph, facts = recording.graph, recording.facts
                cuts = self._sections.choose(graph, facts, recording.example, stages)
            word.say(Word.of(recording, cuts))
            passing("morph: cuts told")
            return cuts
        if told and not recording.fixed:
            return layout.cuts
        heard = word.heard()
        passing("morph: cuts told")
        if heard.mark != recording.mark:
            raise Misuse(
                f"step {step}: loss_of computes something else here than on {layout.workers[0]}, because it closes over "
                "something that is not the same on every worker: keep it in session.state, or set it anew in every step, as it "
                "depends on the step"
            )
        return heard.cuts


def _replaced(chain: Chain, by: Chain) -> bool:
    return chain.recording.closure.of_same_function(by.recording.closure)
