"""Channels: what is sent arrives, with its bits and its strides, over a wire or without one."""

import threading

import pytest
import torch

from agent.errors import WireError
from agent.net.mesh import Mesh
from agent.pipeline.stages.channel import Exchange, Parcel
from agent.pipeline.stages.transport import MeshChannel

CONNECT_S = 20.0


@pytest.fixture(params=["local", "mesh"])
def pair(request):
    """Two ends of a channel, and what each calls the other."""
    if request.param == "local":
        exchange = Exchange(patience_s=5)
        yield exchange.channel("a"), exchange.channel("b")
        return
    meshes, ends = {}, []
    for name in "ab":
        changed = threading.Condition()
        mesh = Mesh(name, "secret", "127.0.0.1", changed, lambda peer: None)
        mesh.enter(3)
        meshes[name] = (mesh, changed)
    addresses = {name: mesh.address for name, (mesh, _) in meshes.items()}
    for name, (mesh, changed) in meshes.items():
        (peer,) = set(addresses) - {name}
        mesh.want({peer: addresses[peer]})
        with changed:
            assert changed.wait_for(lambda m=mesh, p=peer: m.connection(p) is not None, CONNECT_S)
        ends.append(MeshChannel(mesh, changed, 3, patience_s=5))
    yield tuple(ends)
    for end in ends:
        end.close()
    for mesh, _ in meshes.values():
        mesh.close()


def tensors():
    base = torch.arange(24.0).reshape(2, 3, 4)
    return (
        base,
        base.transpose(0, 2),
        base[:, 1:, ::2],
        base[:1].expand(5, 3, 4),
        torch.tensor(2.0).expand(5),
        torch.tensor(2.0).expand(1),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(1, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.tensor(3, dtype=torch.int64),
        torch.randn(3).to(torch.bfloat16),
        torch.ones(2, 2, dtype=torch.bool),
        torch.randn(2, 3, dtype=torch.complex64).T,
        torch.randn(2, 3, dtype=torch.complex128).conj(),
        torch.empty(0, 4),
        None,
    )


def test_what_is_sent_arrives(pair):
    """Values, types, shapes and strides are the same on arrival; what is missing stays missing."""
    a, b = pair
    sent = tensors()
    plain = [3, "word", None, [1.5, True], torch.bfloat16, torch.device("cpu")]
    a.send("b", "x", Parcel(tensors=sent, plain=plain))
    got = b.receive("a", "x")
    assert got.plain == plain
    for before, after in zip(sent, got.tensors, strict=True):
        if before is None:
            assert after is None
            continue
        assert after.dtype == before.dtype
        assert torch.equal(after, before)
        assert after.stride() == before.stride()


def test_tensors_begin_where_torch_would_put_them(pair):
    """Every tensor starts on 64 bytes, so that kernels round as they do on memory of torch's own."""
    a, b = pair
    a.send("b", "x", Parcel(tensors=(torch.randn(3), torch.randn(5), torch.randn(7))))
    for tensor in b.receive("a", "x").tensors:
        assert tensor.data_ptr() % 64 == 0


def test_messages_are_found_by_name(pair):
    """What arrives early waits under its tag; `wait` returns when any of several is there."""
    a, b = pair
    for tag in ("late", "early"):
        a.send("b", tag, Parcel(tensors=(), plain=tag))
    b.wait([("a", "never"), ("a", "late")])
    assert b.ready("a", "late")
    assert not b.ready("a", "never")
    assert b.receive("a", "early").plain == "early"
    assert b.receive("a", "late").plain == "late"


def test_nothing_is_waited_for_without_end(pair):
    """A message that does not come is an error that says which one it was."""
    _, b = pair
    b._patience_s = 0.05
    if hasattr(b, "_exchange"):
        b._exchange._patience_s = 0.05
    with pytest.raises(WireError, match="never"):
        b.receive("a", "never")


def test_a_waiter_can_be_woken():
    """Whoever waits for a peer that is gone is told so at once, and told why."""
    exchange = Exchange(patience_s=60)
    b = exchange.channel("b")
    said: list[str] = []

    def wait() -> None:
        try:
            b.receive("a", "x")
        except WireError as error:
            said.append(str(error))

    waiter = threading.Thread(target=wait)
    waiter.start()
    exchange.break_off("a was evicted")
    waiter.join(10)
    assert "a was evicted" in said[0]
