"""What goes between a device and the host, piece by piece; each function is one test, by its name as the argument.

It ends at once: a thread of torch's that has run a backward on a device may want Python's lock while Python ends, is ended inside
C++ by that, and takes the process with it ("terminate called without an active exception").
"""

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "agent" / "worker"))

from leaving import (
    alone,
    check,
    in_two_parts,
    kept,
    plain,
    together,
    workers,
)

from agent.net.wire import room
from agent.pipeline.stages.channel import Parcel
from agent.pipeline.stages.transport import asked_for, pack, unpack
from agent.store.encoding.plain import TENSORS, packed, unpacked
from agent.store.layers import collect, share_of
from agent.store.memory import Again, Copying
from agent.tensors.device import DeviceWatch, set_stream_state, stream_state
from agent.tensors.metrics import Numbers
from agent.tensors.partial_sum import partial_of
from agent.tensors.shards import bytes_of
from agent.tensors.staging import Away, Fetch, here, mark, pinned
from agent.tensors.sums import SumSpace

KIND = torch.accelerator.current_accelerator().type
DEVICE = torch.zeros(1, device=KIND).device  # with its number


def model_of() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64)).to(DEVICE)


def a_copy_is_of_its_moment() -> None:
    """What is written behind `hold_back` is not in it; what was asked for before the mark is."""
    x = torch.zeros(1 << 16, device=DEVICE)
    x.add_(1)
    away, target = Away(x, 0, x.nbytes, mark(DEVICE)), pinned(x.nbytes, DEVICE)
    fetch = Fetch([(away, target)])
    fetch.hold_back()
    x.add_(1)
    fetch.wait()
    assert torch.equal(target.view(torch.float32), torch.ones(1 << 16))


def whoever_reads_waits() -> None:
    """The copy is there when `wait` returns, though nobody else has waited for anything."""
    x = torch.ones(1024, device=DEVICE)
    target = pinned(x.nbytes, DEVICE)
    Fetch([(Away(x, 0, x.nbytes, mark(DEVICE)), target)]).wait()
    assert torch.equal(target.view(torch.float32), torch.ones(1024))


def what_is_copied_is_held() -> None:
    """Nobody else gets the memory of a tensor that is still being copied."""
    target = pinned(4096, DEVICE)
    fetch = Fetch([(Away(torch.ones(1024, device=DEVICE), 0, 4096, mark(DEVICE)), target)])
    others = [torch.zeros(1024, device=DEVICE) for _ in range(4)]
    fetch.wait()
    assert len(others) == 4
    assert torch.equal(target.view(torch.float32), torch.ones(1024))


def a_state_is_of_its_version() -> None:
    """Weights on the device, counts on the host: copied beside the step, while an update is told to the device."""
    _state(late=True)
    _state(late=False)


def _state(*, late: bool) -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 64, device=DEVICE)).sum().backward()
    optimizer.step()
    state = collect({"model": model, "AdamW1": optimizer})
    expected = b"".join(
        bytes(bytes_of(tensor)) for layer in state.finish() for tensor in layer.tensors
    )
    copying = Copying(
        lambda: share_of(state.finish(), 1, 0)[1],
        Again(),
        far=lambda pairs: Fetch([(a, torch.frombuffer(m, dtype=torch.uint8)) for a, m in pairs]),
        room=lambda count: pinned(count, DEVICE).numpy().data,
    )
    if late:
        copying.let_change()
    else:
        copying.finish()
        assert bytes(copying.whole) == expected
    before = [param.cpu() for param in model.parameters()]
    optimizer.step()
    copying.finish()
    assert bytes(copying.whole) == expected
    assert not any(map(torch.equal, before, (param.cpu() for param in model.parameters())))


def pieces_come_in_their_order() -> None:
    """Of the host and of the device, mixed, and parts of tensors that do not lie end to end."""
    x = torch.arange(64.0, device=DEVICE).view(8, 8)
    behind = mark(DEVICE)
    found = here(
        [memoryview(b"ab"), Away(x.t(), 4, 12, behind), memoryview(b"c"), Away(x, 0, 4, behind)]
    )
    assert b"".join(found) == b"ab" + bytes(bytes_of(x.t().cpu()))[4:12] + b"c" + bytes(4)


def a_parcel_arrives_as_it_was() -> None:
    """Values, strides, and what was on the device is there again; a random stream stays on the host."""
    x = torch.arange(24.0, device=DEVICE).view(2, 3, 4)
    sent = (x, x.transpose(0, 2), x[:, ::2], x[:1].expand(5, 3, 4), stream_state(DEVICE), None)
    parcel = Parcel(tensors=sent, plain=7)
    behind = asked_for(parcel)
    x_later = x + 1  # the device goes on
    extra, pieces = pack(parcel, behind)
    frame = b"".join(pieces)
    payload = room(len(frame))
    payload[:] = frame
    got = unpack(extra, payload, DEVICE)
    assert got.plain == 7
    assert x_later.device == DEVICE
    for one, other in zip(sent, got.tensors, strict=True):
        if one is None:
            assert other is None
            continue
        assert one.device == other.device
        assert one.shape == other.shape
        assert torch.equal(one.cpu(), other.cpu())
    assert got.tensors[1].stride() == sent[1].stride()


def sums_are_added_where_they_arise() -> None:
    """On the device, and handed out in host memory; gradients are on the device again."""
    for deterministic in (True, False):
        _are_added_where_they_arise(deterministic=deterministic)


def _are_added_where_they_arise(*, deterministic: bool) -> None:
    model = torch.nn.Linear(64, 64).to(DEVICE)
    space = SumSpace({"model": model})
    partial = partial_of(space, 4, deterministic=deterministic)
    space.begin()
    expected = [torch.zeros_like(param) for param in model.parameters()]
    for microbatch in range(4):
        loss = model(torch.full((4, 64), float(microbatch), device=DEVICE)).square().sum()
        gradients = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        for total, gradient in zip(expected, gradients, strict=True):
            total.add_(gradient)
        if microbatch > 1:
            partial.lend(microbatch, 0, 4)
        loss.backward()
        partial.add(microbatch, Numbers(values=(loss.detach().double(),)), 0, 4)
    sums = [one.cpu() for one in expected]  # before, for it makes the device hurry
    (total,) = partial.nodes(0, 4)
    assert total.flat.device.type == "cpu"
    for one, view in zip(sums, total.views, strict=True):
        torch.testing.assert_close(view, one)
    assert float(total.loss) > 0
    space.install(total, 4)
    total.flat.fill_(255)  # the next step's sum comes into the same memory
    for one, param in zip(expected, model.parameters(), strict=True):
        assert param.grad.device == DEVICE
        torch.testing.assert_close(param.grad, one)


def blocks_leave_a_device_while_it_computes() -> None:
    """Whoever folds does so on the device; the bits are those of one process, also where what has left was void."""
    for count in (1, 2, 3):
        with workers(count, device=DEVICE) as made:
            for step in range(3):
                together(made, step, plain)
                wanted = alone(step, plain, device=DEVICE)
                check(made, wanted)
                assert kept(made, step) == bytes(wanted.flat.numpy().data)
                assert all(worker.left_early for worker in made) == (step > 0)
            rooms = sum(w.exchanging._present.lanes.room_bytes for w in made)
            assert (rooms > 0) == (count > 1)
    with workers(2, device=DEVICE) as made:
        together(made, 0, plain)
        together(made, 1, in_two_parts, plain)
        share = made[0].layout.replica_of(made[0].me)
        check(made, alone(1, plain, in_two_parts, share.count, device=DEVICE))
        assert not any(worker.preparing._told for worker in made)
        for worker in made:
            worker.left_early = False
        together(made, 2, plain)
        check(made, alone(2, plain, device=DEVICE))
        assert not any(worker.left_early for worker in made)


def what_is_computed_on_a_stream_of_the_script_leaves_late() -> None:
    """What another stream than the script's adds up is not seen by copies that follow the script's."""
    side = torch.Stream(DEVICE)

    def beside(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        side.wait_stream(torch.accelerator.current_stream(DEVICE))
        with side:
            loss = model(x)
        torch.accelerator.current_stream(DEVICE).wait_stream(side)
        return loss

    with workers(2, device=DEVICE) as made:
        for step in range(3):
            together(made, step, beside)
            check(made, alone(step, plain, device=DEVICE))
            assert not any(worker.left_early for worker in made)


def streams_go_on_where_they_were() -> None:
    """The state of the random stream is that of both, the CPU's and the device's."""
    torch.manual_seed(1)
    state = stream_state(DEVICE)
    one = torch.rand(4), torch.rand(4, device=DEVICE).cpu()
    set_stream_state(state, DEVICE)
    assert torch.equal(one[0], torch.rand(4))
    assert torch.equal(one[1], torch.rand(4, device=DEVICE).cpu())
    assert not torch.equal(one[0], one[1])


def a_watch_tells_when_it_was_done() -> None:
    """Marks of a device have times of the host, one behind the other."""
    watch = DeviceWatch(DEVICE)
    watch.begin()
    marks = [watch.mark() for _ in range(3)]
    seconds = [watch.seconds(each) for each in marks]
    assert seconds == sorted(seconds)


def a_row_of_the_data_is_not_written_to() -> None:
    """A state that keeps a row of what lies on the device is loaded from the host."""
    data = torch.arange(6.0, device=DEVICE)
    state = packed({"row": data[4]})
    state[TENSORS] = [tensor.cpu().clone() for tensor in state[TENSORS]]
    found = unpacked(state, {"row": data[2]})["row"]
    assert (found.device, found.cpu().item()) == (DEVICE, 4.0)
    assert data.cpu().tolist() == [0, 1, 2, 3, 4, 5]


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    os._exit(0)
