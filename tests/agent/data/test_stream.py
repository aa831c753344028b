"""An IterableDataset in steps."""

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from samples import Owner, Read, Told, bits, plain
from test_data import histories
from torch.utils.data import IterableDataset

from agent.data.data import Data
from agent.errors import Misuse

SAMPLES, BATCH, M = 23, 8, 4


def _data(dataset, **options) -> Data:
    return Data(
        Owner(), dataset, **{"batch_size": BATCH, "microbatches": M, "shuffle": False, **options}
    )


@pytest.mark.parametrize(("processes", "kind"), [(0, Read), (0, Told), (2, Read)])
@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow])
@given(history=histories())
def test_stream_under_any_shares_is_the_epoch_of_a_plain_run(processes: int, kind, history):
    expected = plain(_data(Told(SAMPLES)), len(history))
    workers = [_data(kind(SAMPLES), num_workers=processes) for _ in range(2)]
    try:
        for step, parts in enumerate(history):
            for worker, first, count in parts:
                workers[worker].expect(step, first, count)
                for i in range(first, first + count):
                    assert bits(workers[worker].at(step)[i]) == expected[step][i]
    finally:
        for each in workers:
            each.close()


@pytest.mark.parametrize(
    ("samples", "drop_last", "sizes"),
    [
        (24, False, [8, 8, 8]),
        (20, False, [8, 8, 4]),
        (18, False, [8, 5, 5]),
        (18, True, [8, 8]),
        (5, False, [5]),
    ],
)
@pytest.mark.parametrize("kind", [Read, Told])
def test_stream_is_cut_as_a_data_set_with_indices_is(kind, samples, drop_last, sizes):
    data = _data(kind(samples), drop_last=drop_last)
    for epoch in range(2):
        found, seen = [], []
        for step in range(epoch * len(sizes), (epoch + 1) * len(sizes)):
            indices = [data.at(step)[i][0] for i in range(M)]
            assert max(map(len, indices)) - min(map(len, indices)) <= 1
            found.append(sum(map(len, indices)))
            seen += torch.cat(indices).tolist()
        assert found == sizes
        assert len(set(seen)) == len(seen) == sum(sizes)
    assert len(data) == len(sizes)


def test_stream_without_a_length_is_counted_and_says_so(capfd):
    data = _data(Read(SAMPLES))
    assert len(data) == 3
    assert len(data) == 3
    assert capfd.readouterr().err.count("has no length and is read once to its end") == 1


def test_stream_that_is_sought_says_what_that_costs(capfd):
    data = _data(Told(100))
    _ = data.at(9)[0]
    assert (
        "72 samples of Told were read and passed over to come to step 9" in capfd.readouterr().err
    )
    _ = data.at(10)[3], data.at(9)[1], data.at(11)[0]
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("processes", [0, 1])
def test_stream_without_end_has_steps(processes: int):
    class Endless(IterableDataset):
        def __iter__(self):
            return itertools.count()

    data = _data(Endless(), num_workers=processes)
    for step in range(50):
        data.expect(step, 2, 1)
        assert data.at(step)[2].tolist() == [step * BATCH + 4, step * BATCH + 5]
    data.close()


def test_stream_in_its_own_order_says_that_shuffle_has_no_part(capfd):
    _data(Told(SAMPLES), shuffle=True)
    assert "is read in its own order" in capfd.readouterr().err


def test_stream_that_is_shared_out_among_processes_is_read_whole():
    class Sharded(Told):
        """As torch's documentation has it."""

        def __iter__(self):
            info = torch.utils.data.get_worker_info()
            first, apart = (0, 1) if info is None else (info.id, info.num_workers)
            return iter(range(first, self.samples, apart))

    data = _data(Sharded(16), num_workers=4)
    data.expect(0, 0, M)
    assert [data.at(step)[i].tolist() for step in range(2) for i in range(M)] == [
        [i, i + 1] for i in range(0, 16, 2)
    ]
    data.close()


class Once(IterableDataset):
    """A generator that was made once has nothing more to give in the second epoch."""

    def __init__(self) -> None:
        self.samples = iter(range(16))

    def __iter__(self):
        return self.samples


class Liar(Told):
    def __iter__(self):
        return itertools.islice(super().__iter__(), self.samples - 1)


class Shrinking(Read):
    def __iter__(self):
        self.samples -= 4
        return super().__iter__()


@pytest.mark.parametrize(
    ("processes", "dataset", "says"),
    [
        (0, Once, "Once.*the data set gave 0 samples in epoch 1 and had 16 before"),
        (1, Once, "Once.*the data set gave 0 samples in epoch 1 and had 16 before"),
        (
            0,
            lambda: Liar(16),
            "Liar.*the data set gave 15 samples in epoch 0 and says that it has 16",
        ),
        (
            0,
            lambda: Shrinking(20),
            "Shrinking.*the data set gave 12 samples in epoch 1 and had 16 before",
        ),
        (0, lambda: Read(3), "Read.*the data set has 3 samples, too few for a step"),
        (0, lambda: Read(0), "Read.*the data set has 0 samples, too few for a step"),
    ],
)
def test_stream_that_gives_no_epoch_is_refused(processes: int, dataset, says):
    data = _data(dataset(), num_workers=processes)
    with pytest.raises(Misuse, match=says):
        for step in range(6):
            data.expect(step, 0, M)
            _ = data.at(step)[:]
    data.close()


@pytest.mark.parametrize("processes", [0, 1])
def test_stream_that_raises_is_named_each_time(processes: int):
    class Raising(Told):
        def __iter__(self):
            for index in range(self.samples):
                if index == 30:
                    raise OSError("shard 3 is gone")
                yield index

    data = _data(Raising(64), num_workers=processes)
    for _ in range(2):
        data.expect(3, 0, 1)
        with pytest.raises(OSError, match="shard 3 is gone") as raised:
            _ = data.at(3)[0]
        assert "in the samples from 24 on, in epoch 0" in raised.value.__notes__[0]
    data.close()


def test_order_of_a_stream_is_refused():
    with pytest.raises(Misuse, match="an IterableDataset has an order of its own"):
        _data(Read(8), order=lambda epoch: [0])
