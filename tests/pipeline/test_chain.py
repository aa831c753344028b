"""Chains of workers: every worker ends with the sum of the step, its loss and the numbers beside it among it."""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import playing
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from playing import Turns, alone, batches, in_turns, layout_of, made, rows
from torch import nn

from agent.errors import StateError
from agent.pipeline.stages.channel import Exchange
from agent.pipeline.stages.cut import Sections
from agent.pipeline.tracing.graphs import Recording
from agent.pipeline.tracing.loss import record_loss
from agent.proof.digest import digests
from agent.proof.evidence import Staged
from agent.proof.graph import digest_of
from agent.sharded.holdings import Holdings
from agent.tensors.metrics import decoded
from agent.tensors.sums import Sum, Summed, SumSpace
from agent.worker.stages.pipeline_layout import Deep
from agent.worker.stages.pipeline_step import Chain, How, Whole

COUNTS, MICROBATCHES = (3, 1), 4


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 5))


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
    logits = model(x)
    right = (logits.argmax(-1) == y).float().mean()
    return F.cross_entropy(logits, y), {"right": right, "first": x[0, 0]}


def plain(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
    return F.cross_entropy(model(x), y)


class Played:
    """A layout of chains, each worker in a thread, one at a time."""

    def __init__(
        self,
        depth: int,
        loss: Callable[..., Any],
        *,
        owned: bool = False,
        frozen: Sequence[int] = (),
    ) -> None:
        layout = layout_of(depth, COUNTS)
        self.layout = type(layout)(
            generation=0, microbatches=MICROBATCHES, replicas=layout.replicas, owned=owned
        )
        self._exchange, self._turn = Exchange(patience_s=10), threading.Lock()
        self.chains: dict[str, Chain] = {}
        self.step_ = 0
        self.samples: dict[tuple[int, ...], tuple[float | None, int, list[str], int]] = {}
        cuts: tuple[int, ...] = ()
        for replica in layout.replicas:
            for me in replica.workers:
                model = made(layers)
                space = SumSpace({"model": model})
                for index in frozen:
                    model[index].requires_grad_(False)
                found = record_loss(
                    model, lambda b, m=model: loss(m, *b), batches(rows, 0, MICROBATCHES)
                )
                cuts = cuts or Sections().choose(found.graph, found.facts, found.example, depth)
                whole = Whole(
                    space,
                    Holdings({"model": model}),
                    lambda s=space: Sum(s),
                    None,
                    True,
                    self.sample,
                )
                channel = Turns(self._exchange.channel(me), self._turn)
                self.chains[me] = Chain(self.layout, me, found, cuts, channel, whole)

    def sample(self, one: Staged) -> None:
        """Every replica says the same of a microbatch in a stage."""
        (found,) = digests({"": list(one.gradients.values())})
        loss = None if one.numbers is None else float(one.numbers.loss)
        said = loss, digest_of(one.graph), [*one.gradients], found.bits
        assert self.samples.setdefault((self.step_, one.microbatch, one.stage), said) == said

    def at_once(self, play: Callable[[str, Chain], Summed]) -> dict[str, Summed]:
        found: dict[str, Summed] = {}

        def one(me: str, chain: Chain) -> None:
            found[me] = play(me, chain)

        plays = (partial(one, *each) for each in self.chains.items())
        in_turns(self._exchange, self._turn, plays)
        return found

    def step(self, number: int, open_: Callable[[int, int], None]) -> dict[str, Summed]:
        todo, self.step_ = batches(rows, number, MICROBATCHES), number
        return self.at_once(
            lambda _, chain: chain.play(
                number,
                todo,
                How(
                    lambda microbatch: open_(number, microbatch), lambda: None, range(MICROBATCHES)
                ),
            )
        )


@pytest.mark.parametrize("owned", [False, True])
def test_a_layer_may_be_frozen_for_a_while(owned: bool) -> None:
    """A sum has room for it, for when it learns again."""
    _, _, streams = alone(layers, rows, MICROBATCHES, 1)
    learning = Played(2, plain, owned=owned).step(0, streams.seed_for)
    for me, summed in Played(2, plain, owned=owned, frozen=[0]).step(0, streams.seed_for).items():
        assert len(summed.total.flat) == len(learning[me].total.flat)
        assert summed.total.loss == learning[me].total.loss
        named = zip(made(layers).state_dict(), summed.marks, strict=False)
        assert {name: bool(mark) for name, mark in named} == {
            name: not name.startswith("0.") for name in made(layers).state_dict()
        }


@pytest.mark.parametrize("owned", [False, True])
@pytest.mark.parametrize("depth", [2, 3])
def test_every_worker_has_the_numbers(
    monkeypatch: pytest.MonkeyPatch, depth: int, owned: bool
) -> None:
    """Those of one process to the bit, of each step anew: whatever a worker keeps, and whichever stage it has."""
    monkeypatch.setattr(playing, "loss_of", loss_of)
    told = list[dict[str, float]]()
    losses, _, streams = alone(layers, rows, MICROBATCHES, 1, told=told)
    played = Played(depth, loss_of, owned=owned)
    first, *_ = (played.step(number, streams.seed_for) for number in (0, 1))
    for summed in (played.step(0, streams.seed_for)).values():
        assert summed.total.loss / MICROBATCHES == losses[0]
        means = {name: value / MICROBATCHES for name, value in summed.total.metrics.items()}
        assert means == told[0]
    marks = {summed.marks for summed in first.values()}
    assert len(marks) == 1
    whole = SumSpace({"model": made(layers)})
    present, names = decoded(marks.pop(), len(whole.tensors))
    assert set(present) == {1}
    assert names == ("first", "right")


@pytest.mark.parametrize("loss", [loss_of, plain])
def test_a_committed_step_has_the_numbers_again(loss: Callable[..., Any]) -> None:
    """From the bytes of the whole sum, of which a worker takes what it keeps."""
    streams = torch.manual_seed
    played = Played(2, loss, owned=True)
    one = Played(2, loss).step(0, lambda _, m: streams(m))["r0s0"]
    body, marks = one.total.memory(0, one.total.space.total_bytes), one.marks
    stored = one.total.space.sealed(marks)

    def again(_: str, chain: Chain) -> Summed:
        payload = b"".join(bytes(body[start:end]) for start, end in chain.spans)
        return chain.again(0, memoryview(bytearray(payload)), stored)

    for summed in played.at_once(again).values():
        assert summed.total.loss == one.total.loss
        assert summed.total.metrics == one.total.metrics
        assert summed.marks == marks
        assert summed.finite
    stored = SumSpace({"model": made(layers)}, exchange="bfloat16").sealed(marks)
    with pytest.raises(StateError, match=r"in bfloat16, .* sums in float32: resume"):
        played.at_once(again)


def test_a_chain_computes_a_microbatch_of_another_to_compare_it() -> None:
    """It has the same gradients in every stage, and the sum of the step does not know of it."""
    played = Played(2, loss_of)
    first = played.step(0, lambda _, m: torch.manual_seed(m))
    before = {worker: summed.total.flat.clone() for worker, summed in first.items()}
    samples, given = {**played.samples}, batches(rows, 0, MICROBATCHES)
    assert len(samples) == 2 * MICROBATCHES
    how = How(lambda m: torch.manual_seed(m) and None, lambda: None, range(MICROBATCHES))
    played.at_once(lambda _, chain: chain.compute_aside("aside", given, how))  # type: ignore[func-returns-value, arg-type, return-value]
    after = played.step(0, lambda _, m: torch.manual_seed(m))
    assert played.samples == samples
    for worker, summed in after.items():
        assert torch.equal(summed.total.flat, before[worker])


def test_each_loss_of_a_step_has_its_chain() -> None:
    """A generator's and a critic's take turns. One that is recorded anew has another one in the place of its own."""
    model, layout = made(layers), layout_of(2, COUNTS)
    space = SumSpace({"model": model})
    whole = Whole(
        space, Holdings({"model": model}), lambda: Sum(space), None, True, lambda *_: None
    )
    given = batches(rows, 0, MICROBATCHES)

    def weighed(weight: float) -> Callable[[Any], Any]:
        return lambda batch: plain(model, *batch) * weight

    losses = [weighed(1.0), lambda batch: model(batch[0]).square().mean()]
    recordings = [record_loss(model, loss, given) for loss in losses]
    told = list[bool]()
    deep, channel = Deep("r0s0"), Exchange(patience_s=10).channel("r0s0")

    def chain(step: int, recording: Recording) -> Chain:
        def to_play(_: Any, *, entered: bool) -> Recording:
            told.append(entered)
            return recording

        return deep.chain(layout, step, to_play, lambda _: None, whole, lambda: channel)  # type: ignore[arg-type, return-value]

    first = [chain(step, found) for step, found in enumerate(recordings)]
    assert [chain(2 + step, found) for step, found in enumerate(recordings)] == first
    # In its first step all phases enter the layout; the third is the first one of another step.
    assert told == [True, True, True, False]
    anew = chain(4, record_loss(model, weighed(2.0), given))
    assert anew not in first
    assert chain(5, recordings[1]) is first[1]
    assert chain(6, recordings[0]) is not first[0]
