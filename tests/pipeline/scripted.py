"""A script that is recorded as a session records it, and played by two workers that each have a model of their own."""

import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from playing import SEED, Streams, Turns, in_turns, layout_of, made
from torch import nn

from agent import session
from agent.pipeline.stages.channel import Exchange
from agent.pipeline.stages.stage_worker import Worker
from agent.pipeline.tracing.analysis import cut_points
from agent.pipeline.tracing.graphs import Recording
from agent.pipeline.tracing.recorder import Recorder
from agent.pipeline.tracing.variants import Pieces
from orchestrator.planner.simulation import schedules

STEPS, MICROBATCHES = 2, 3
State = dict[str, torch.Tensor]


class Script(msgspec.Struct, frozen=True):
    """What a script makes its model of, its microbatches, and its loss; `draw` gets a microbatch's number."""

    model: Callable[[], nn.Module]
    draw: Callable[[torch.Generator, int], Any]
    loss: Callable[[nn.Module, Any], torch.Tensor]

    def batches(self, step: int) -> list[Any]:
        generator = torch.Generator().manual_seed(1000 + step)
        return [self.draw(generator, number) for number in range(MICROBATCHES)]


def optimizer(params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def alone(script: Script) -> tuple[list[float], State, Streams]:
    """The losses and the state on one device."""
    model = made(script.model)
    opt = optimizer([*model.parameters()])
    session._sessions.clear()
    own = session.Session(model, opt, microbatches=MICROBATCHES, seed=SEED)
    losses = []
    for step in own.steps(STEPS):
        result = own.backward(lambda batch: script.loss(model, batch), script.batches(step))
        opt.step()
        losses.append(result.loss)
    session._sessions.clear()
    return losses, state_of(model), Streams(own)


def state_of(model: nn.Module) -> State:
    return {
        name: tensor.detach().clone()
        for name, tensor in itertools.chain(
            model.named_parameters(remove_duplicate=False),
            model.named_buffers(remove_duplicate=False),
        )
    }


class Recorded:
    """A model of its own, and what the script's loss is recorded as on it."""

    def __init__(self, script: Script) -> None:
        self.script, self.model = script, made(script.model)
        self.recorder = Recorder(lambda: self.model, [self.model], None)

    def loss_of(self, batch: Any) -> torch.Tensor:
        return self.script.loss(self.model, batch)

    def in_step(self, step: int) -> Recording:
        self.recorder.asked(step, self.loss_of, self.script.batches(step))
        return self.recorder.to_play(entered=step == 0)


def places(script: Script) -> list[tuple[str, int]]:
    """The names of the nodes after which it may be cut, and their places."""
    recording = Recorded(script).in_step(0)
    nodes = list(recording.graph.graph.nodes)
    return [(nodes[p.after].name, p.after) for p in cut_points(recording.facts)]


def played(script: Script, cut: int, streams: Streams) -> tuple[list[float], list[State]]:
    """The losses, and what each worker has of the state, if it is cut there."""
    layout = layout_of(2, (MICROBATCHES,))
    wires, turn = Exchange(patience_s=60), threading.Lock()
    losses, states = dict[int, float](), list[State]()
    schedule = schedules.make("1f1b", 2, MICROBATCHES)

    def play(place: int, me: str) -> None:
        own = Recorded(script)
        recording = own.in_step(0)
        pieces = Pieces(recording.variants.first, [cut])

        def piece_of(stage: int, batch: Any) -> Any:
            return pieces.of(batch.variant)[stage]

        channel = Turns(wires.channel(me), turn)
        mine = {place: pieces.first[place]}
        worker = Worker(layout, me, schedule, mine, channel, piece_of=piece_of)
        params = [*worker.stages[place].module.parameters()]
        opt = optimizer(params) if params else None
        for step in range(STEPS):
            batches = [recording.flatten(batch) for batch in script.batches(step)]
            found = worker.step(step, batches, lambda m, step=step: streams.seed_for(step, m))
            losses.update({step: found["loss"]} if found else {})
            if opt is not None:
                opt.step()
        module = worker.stages[place].module
        here = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        names = itertools.chain(own.model.named_parameters(), own.model.named_buffers())
        states.append({name: tensor for name, tensor in names if id(tensor) in here})

    workers = enumerate(layout.replicas[0].workers)
    in_turns(wires, turn, (functools.partial(play, *each) for each in workers))
    return [losses[step] for step in range(STEPS)], states


def check_every_cut(script: Script) -> list[str]:
    """Compare at every place, and return the names of these places."""
    losses, expected, streams = alone(script)
    found = places(script)
    assert found
    for name, cut in found:
        again, states = played(script, cut, streams)
        assert again == losses, name
        for state in states:
            wrong = [key for key, value in state.items() if not torch.equal(value, expected[key])]
            assert not wrong, name
    return [name for name, _ in found]
