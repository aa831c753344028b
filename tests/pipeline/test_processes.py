"""Real processes over real sockets: the same bits as one process."""

import multiprocessing as mp
import threading

import pytest
import torch
from playing import (
    MODELS,
    SEED,
    Streams,
    alone,
    batches,
    graph_of,
    layout_of,
    optimizer,
    same_weights,
)

from agent import session
from agent.net.mesh import Mesh
from agent.pipeline.stages.cut import Sections, build
from agent.pipeline.stages.stage_worker import Worker
from agent.pipeline.stages.transport import MeshChannel
from orchestrator.planner.simulation import schedules

DEPTH, COUNTS, STEPS, CONNECT_S = 2, (3, 1), 2, 60.0


def train(me: str, place: int, model: str, cuts, schedule, pipe) -> None:
    """One worker in a process of its own."""
    torch.set_num_threads(1)
    changed = threading.Condition()
    mesh = Mesh(me, "secret", "127.0.0.1", changed, lambda peer: None)
    pipe.send(mesh.address)
    peers = {name: address for name, address in pipe.recv().items() if name != me}
    mesh.enter(1)
    mesh.want(peers)
    with changed:
        assert changed.wait_for(lambda: all(map(mesh.connection, peers)), CONNECT_S)
    factory, draw = MODELS[model]
    graph, facts, _ = graph_of(factory, draw)
    layout = layout_of(DEPTH, COUNTS)
    pieces = build(graph, facts, cuts)
    channel = MeshChannel(mesh, changed, 1, patience_s=60)
    worker = Worker(layout, me, schedule, {place: pieces[place]}, channel, reach=8)
    session._sessions.clear()
    layer = torch.nn.Linear(1, 1)
    seeds = Streams(session.Session(layer, microbatches=layout.microbatches, seed=SEED))
    opt = optimizer(worker.stages[place].module.parameters())
    losses = []
    for step in range(STEPS):
        todo = batches(draw, step, layout.microbatches)
        found = worker.step(step, todo, lambda m, step=step: seeds.seed_for(step, m))
        losses.append(None if found is None else found["loss"])
        opt.step()
    state = worker.stages[place].module.state_dict()
    pipe.send((losses, {name: tensor.numpy() for name, tensor in state.items()}))
    pipe.recv()
    channel.close()
    mesh.close()


@pytest.mark.processes
def test_four_processes_are_one():
    """Two stages by two uneven replicas, four processes over TCP, end with the bits of one process."""
    factory, draw = MODELS["tied"]
    losses, expected, _ = alone(factory, draw, sum(COUNTS), STEPS)
    cuts = Sections().choose(*graph_of(factory, draw), DEPTH)
    context = mp.get_context("fork")  # four imports of torch would be most of the test
    pipes, workers = {}, []
    for replica in layout_of(DEPTH, COUNTS).replicas:
        schedule = schedules.make("varuna", DEPTH, replica.count, recompute=(True,) * DEPTH)
        for place, me in enumerate(replica.workers):
            pipes[me], far = context.Pipe()
            args = (me, place, "tied", cuts, schedule, far)
            workers.append(context.Process(target=train, args=args, daemon=True))
            workers[-1].start()
    addresses = {me: pipe.recv() for me, pipe in pipes.items()}
    for pipe in pipes.values():
        pipe.send(addresses)
    seen = {me: pipe.recv() for me, pipe in pipes.items()}
    for pipe in pipes.values():
        pipe.send("done")
    for worker in workers:
        worker.join(CONNECT_S)
        assert worker.exitcode == 0
    states = [
        {name: torch.from_numpy(array) for name, array in state.items()}
        for _, state in seen.values()
    ]
    assert same_weights(states, expected) == []
    assert [found for found, _ in seen.values() if found[0] is not None] == [losses, losses]
