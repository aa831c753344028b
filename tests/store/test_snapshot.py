"""A snapshot is the state at its moment, whatever the training does meanwhile."""

import copy
import threading

import pytest
import torch
from models import check_same, make

from agent.store.archive import Archive, assemble, write_parts
from agent.store.errors import Unavailable
from agent.store.layers import load
from agent.store.sinks import MemorySink
from agent.store.snapshot import Snapshotter


class Keeping:
    """A deliver that writes every share to a sink, when it is allowed to."""

    def __init__(self):
        self.sink = MemorySink()
        self.go = threading.Event()
        self.go.set()
        self.parts = {}
        self.forms = {}

    def __call__(self, snapshot):
        assert self.go.wait(30)
        parts = write_parts(
            self.sink, (snapshot.file(one) for one in snapshot.shares if one.end > one.start)
        )
        self.parts.setdefault(snapshot.version, []).extend(parts)
        self.forms[snapshot.version] = snapshot.layers

    def manifest(self, version):
        return assemble("job", version, 1, self.forms[version], self.parts[version])

    def check(self, version, objects, kind="tied"):
        """What was delivered as `version` is exactly what `objects` hold."""
        others, _ = make(kind, seed=9)
        load(self.sink, self.manifest(version), others)
        check_same(objects, others)


@pytest.fixture
def snapshotter():
    """Makes snapshotters, and closes them when the test is over."""
    made = []

    def start(*args, **kwargs):
        made.append(Snapshotter(*args, **kwargs))
        return made[-1]

    yield start
    for one in made:
        one.close()


def frozen(objects, kind="tied"):
    """A copy of the objects as they are now."""
    others, _ = make(kind)
    for key, thing in objects.items():
        others[key].load_state_dict(copy.deepcopy(thing.state_dict()))
    return others


@pytest.mark.parametrize("kind", ["tied", "mixed"])
def test_a_snapshot_is_the_state_when_it_began(snapshotter, kind):
    """Steps that follow at once change the model, and not the snapshot: twenty times over."""
    objects, step = make(kind)
    step(0)
    keeping = Keeping()
    taker = snapshotter(objects, keeping)
    for version in range(1, 21):
        step(version)
        expected = frozen(objects, kind)
        while not taker.begin(version, 1):
            taker.wait()
        step(version + 100), step(version + 200)
        taker.wait()
        keeping.check(version, expected, kind)


def test_the_optimizer_itself_waits_for_the_copies(snapshotter):
    """Nobody calls before_update: the optimizer's own hook does, and only while copies are open."""
    objects, step = make("tied")
    step(0)
    taker = snapshotter(objects, Keeping())
    taker.take(1, 1)
    taker.wait()
    before = taker.newest
    assert before.version == 1
    step(1)
    taker.take(2, 1)
    taker.wait()
    assert taker.newest.version == 2
    changed = [
        one.data != other.data
        for one, other in zip(before.shares, taker.newest.shares, strict=True)
        if one.layer.name == "wte"
    ]
    assert changed == [True], "the one before is kept until the next is complete"


def test_holders_share_a_layer_and_their_parts_make_it_whole(snapshotter):
    """Three replicas with the same state copy a third each; together it is the state."""
    keeping = Keeping()
    total = []
    for holder in range(3):
        objects, step = make("tied")
        step(0)
        taker = snapshotter(objects, keeping, holding=lambda layer, at=holder: (3, at))
        taker.take(1, 1)
        taker.wait()
        total.append(sum(one.data.nbytes for one in taker.newest.shares))
    keeping.check(1, objects)
    assert max(total) < 0.5 * sum(total)


def test_while_one_is_delivered_no_other_begins(snapshotter):
    """A slow sink makes snapshots rarer and no step slower: steps go on while it hangs."""
    objects, step = make("tied")
    step(0)
    keeping = Keeping()
    taker = snapshotter(objects, keeping)
    keeping.go.clear()
    taker.take(1, 1)
    expected = frozen(objects)
    for version in range(2, 12):
        step(version)
        assert not taker.begin(version, 1)
    keeping.go.set()
    taker.wait()
    keeping.check(1, expected)
    assert taker.begin(12, 1)


def test_a_sink_that_fails_stops_no_training(snapshotter):
    """The failure is kept for whoever asks, and the next snapshot is taken as if nothing was."""
    objects, step = make("tied")
    step(0)
    delivered = []

    def deliver(snapshot):
        if snapshot.version == 1:
            raise Unavailable("scripted: the store is away")
        delivered.append(snapshot.version)

    taker = snapshotter(objects, deliver)
    taker.take(1, 1)
    step(1)
    with pytest.raises(Unavailable, match="scripted"):
        taker.wait()
    taker.take(2, 1)
    taker.wait()
    assert delivered == [2]


def test_a_state_that_grows_gets_more_memory(snapshotter):
    """Before the first step there is no optimizer state; afterwards there is, and it is kept too."""
    objects, step = make("tied")
    keeping = Keeping()
    taker = snapshotter(objects, keeping)
    taker.take(0, 1)
    taker.wait()
    keeping.check(0, objects)
    step(0)
    taker.take(1, 1)
    taker.wait()
    keeping.check(1, objects)


def test_an_update_at_the_first_moment_changes_no_copy(snapshotter):
    """A large state, updated the moment the snapshot allows it, is copied before it changes."""
    model = torch.nn.Linear(1500, 1500)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    keeping = Keeping()
    taker = snapshotter({"model": model, "opt": optimizer}, keeping)
    model.weight.grad, model.bias.grad = torch.ones(1500, 1500), torch.ones(1500)
    for version in range(1, 12):
        while not taker.begin(version, 1):
            taker.wait()
        optimizer.step()
        taker.wait()
        (share,) = [one for one in taker.newest.shares if one.layer.name == "weight"]
        weights = torch.frombuffer(bytearray(share.data[: 1500 * 1500 * 4]), dtype=torch.float32)
        assert torch.all(weights == 1.0 - version)


def test_closing_finishes_what_is_under_way(snapshotter):
    """A worker that ends waits for its last snapshot; afterwards none begins."""
    objects, step = make("tied")
    step(0)
    keeping = Keeping()
    taker = snapshotter(objects, keeping)
    taker.take(1, 1)
    taker.close()
    keeping.check(1, objects)
    assert not taker.begin(2, 1)
    step(1)


def test_a_snapshot_is_committed_and_found_again(snapshotter):
    """From memory through a sink to the newest version of an archive, as a worker would do it."""
    objects, step = make("tied")
    step(0)
    keeping = Keeping()
    taker = snapshotter(objects, keeping)
    taker.take(7, 1)
    taker.wait()
    archive = Archive(keeping.sink, "job")
    assert archive.commit(keeping.manifest(7))
    others, _ = make("tied", seed=3)
    load(keeping.sink, archive.newest(), others)
    check_same(objects, others)
