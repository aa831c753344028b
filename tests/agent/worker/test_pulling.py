"""Layers that are asked for, and what becomes of a question that comes too late."""

import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from crews import until

from agent.net.mesh import ASK, Mesh
from agent.protocol import Part
from agent.store.layers import Collected, collect
from agent.store.shares import Share
from agent.worker.state.layer_transfer import Ask, Changed, Pulling


class Ahead:
    """Somebody who is in generation 2."""

    generation = 2

    def now(self) -> tuple[int, Collected | None]:
        return -1, None

    def past(self, version: int) -> bool:
        return False


@pytest.fixture
def pair() -> Iterator[tuple[Mesh, Mesh]]:
    meshes = [
        Mesh(name, "secret", "127.0.0.1", threading.Condition(), lambda _: None) for name in "ab"
    ]
    meshes[0].want({"b": meshes[1].address})
    until("the connection", lambda: meshes[0].connection("b") and meshes[1].connection("a"))
    yield meshes[0], meshes[1]
    for mesh in meshes:
        mesh.close()


def test_what_changes_while_it_is_sent_is_not_used(pair: tuple[Mesh, Mesh]) -> None:
    """Nobody waits for who was left out: the answer may be of two versions, and says so behind itself."""
    asker, answerer = pair
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    crew: Any = Ahead()
    pulling = Pulling(crew, lambda: answerer, threading.Condition())
    pulling.show(5, collect({"model": model}))
    connection = answerer.connection("a")
    assert connection is not None
    send = connection.send

    def send_and_go_on(message: Any, *pieces: Any) -> None:
        send(message, *pieces)
        crew.past = lambda version: version <= 5

    connection.send = send_and_go_on  # type: ignore[method-assign]
    extra = msgspec.msgpack.encode(Ask(1, (("0", 0, 1),), look=True))
    pulling.answer("a", Part(generation=2, step=5, tag=ASK, extra=extra))
    waiting: Any = Waiting(asker)
    with pytest.raises(Changed):
        Pulling(waiting, lambda: asker, asker._changed).look({"0"}, 5, {"b": None}, 2)


class Waiting(Ahead):
    """Somebody who has asked."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def send(self, peer: str, part: Part, pieces: list[memoryview]) -> None: ...

    def take(self, peer: str, step: int, tag: str, generation: int) -> tuple[bytes, memoryview]:
        return until(tag, lambda: self._mesh.mailbox.pop((peer, generation, step, tag), None))


@pytest.mark.parametrize("generation", [1, 2])
def test_who_asks_in_a_layout_that_is_over_is_not_told_of_a_mistake(
    pair: tuple[Mesh, Mesh], generation: int
) -> None:
    """The answerer has gone on in a newer layout: the question has no answer. In the same layout, a model that
    has changed is the script's mistake, and whoever asks is told."""
    asker, answerer = pair
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    crew: Any = Ahead()
    pulling = Pulling(crew, lambda: answerer, threading.Condition())
    pulling.offer(5, collect({"model": model}))
    with torch.no_grad():
        model[0].weight.add_(1)
    ask = msgspec.msgpack.encode(Ask(1, (("0", 0, 1),)))
    pulling.answer("a", Part(generation=generation, step=5, tag=ASK, extra=ask))
    connection = answerer.connection("a")
    assert connection is not None
    connection.send(Part(generation=2, step=5, tag="behind it"))
    until("what comes behind it", lambda: ("b", 2, 5, "behind it") in asker.mailbox)
    assert (("b", generation, 5, "give/1") in asker.mailbox) == (generation == 2)


def test_who_asks_for_a_version_that_the_layout_is_past_is_told(pair: tuple[Mesh, Mesh]) -> None:
    """Only who was left out can come so late, and would wait for ever. In a layout that is not entered yet the
    version may come again: nothing is said before."""
    asker, answerer = pair
    crew: Any = Ahead()
    pulling = Pulling(crew, lambda: answerer, threading.Condition())
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    pulling.offer(5, collect({"model": model}))
    pulling.forget(6)
    ask = msgspec.msgpack.encode(Ask(1, (("0", 0, 1),), look=True))
    waits = threading.Thread(
        target=pulling.answer, args=("a", Part(generation=3, step=5, tag=ASK, extra=ask))
    )
    waits.start()
    pulling.answer("a", Part(generation=2, step=5, tag=ASK, extra=ask))
    waiting: Any = Waiting(asker)
    with pytest.raises(Changed):
        Pulling(waiting, lambda: asker, asker._changed).look({"0"}, 5, {"b": None}, 2)
    assert ("b", 3, 5, "give/1") not in asker.mailbox
    pulling.offer(5, collect({"model": model}))
    waits.join()
    until("the answer", lambda: ("b", 3, 5, "give/1") in asker.mailbox)


def test_who_asks_for_what_is_not_here_hears_that_the_connection_broke(
    pair: tuple[Mesh, Mesh],
) -> None:
    """A layer that whoever asked believes to be here and is not: it would wait for ever; so it loses us instead."""
    _, answerer = pair
    crew: Any = Ahead()
    pulling = Pulling(crew, lambda: answerer, threading.Condition())
    pulling.offer(5, collect({"model": torch.nn.Sequential(torch.nn.Linear(2, 2))}))
    connection = answerer.connection("a")
    extra = msgspec.msgpack.encode(Ask(1, (("7", 0, 1),)))
    with pytest.raises(KeyError):
        pulling.answer("a", Part(generation=2, step=5, tag=ASK, extra=extra))
    until("the break", lambda: answerer.connection("a") is not connection)


def test_what_is_shown_in_the_middle_of_a_step_is_no_state(pair: tuple[Mesh, Mesh]) -> None:
    """Behind an evaluation a script may still set what belongs to the step: a newcomer that asks for the state
    waits until the step is over, and whoever looks at the weights has them at once."""
    asker, answerer = pair
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    objects: Any = {"model": model, "optimizer": optimizer}
    crew: Any = Ahead()
    changed = threading.Condition()
    pulling = Pulling(crew, lambda: answerer, changed)
    pulling.show(5, collect(objects))

    def ask(serial: int, *, look: bool) -> threading.Thread:
        extra = msgspec.msgpack.encode(Ask(serial, (("0", 0, 1),), look))
        part = Part(generation=2, step=5, tag=ASK, extra=extra)
        thread = threading.Thread(target=pulling.answer, args=("a", part))
        thread.start()
        return thread

    newcomer = ask(1, look=False)
    ask(2, look=True).join()
    until("what was looked at", lambda: ("b", 2, 5, "give/2") in asker.mailbox)
    optimizer.param_groups[0]["lr"] = 0.5
    pulling.offer(5, collect(objects))
    newcomer.join()
    until("the state", lambda: ("b", 2, 5, "give/1") in asker.mailbox)
    extra, _ = asker.mailbox["b", 2, 5, "give/1"]
    (form,) = msgspec.msgpack.decode(extra, type=Share).forms
    assert '["lr", 0.5]' in form.values


def test_what_was_shown_before_the_state_was_given_up_is_forgotten(pair: tuple[Mesh, Mesh]) -> None:
    """Who goes back and applies steps again comes to a version once more: who looks at it waits until it is there, and is
    not told that the script has changed it."""
    asker, answerer = pair
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    crew: Any = Ahead()
    pulling = Pulling(crew, lambda: answerer, threading.Condition())
    pulling.offer(5, collect({"model": model}))
    pulling.show(5, collect({"model": model}))
    with torch.no_grad():
        model[0].weight.add_(1)
    pulling.clear()
    extra = msgspec.msgpack.encode(Ask(1, (("0", 0, 1),), look=True))
    part = Part(generation=2, step=5, tag=ASK, extra=extra)
    looking = threading.Thread(target=pulling.answer, args=("a", part))
    looking.start()
    with torch.no_grad():
        model[0].weight.sub_(1)
    pulling.show(5, collect({"model": model}))
    looking.join()
    until("what was looked at", lambda: ("b", 2, 5, "give/1") in asker.mailbox)
    extra, _ = asker.mailbox["b", 2, 5, "give/1"]
    assert msgspec.msgpack.decode(extra, type=Share).extents
