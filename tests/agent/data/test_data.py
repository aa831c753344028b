"""A data set in steps: each microbatch has the same bits whoever fetches it, when and where."""

import random
import threading
import traceback
from collections import Counter
from itertools import accumulate, chain, pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from samples import Drawn, Owner, bits, plain
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from agent.data.data import Data, opened
from agent.errors import Misuse

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
SAMPLES, BATCH, M = 23, 8, 4


@st.composite
def histories(draw) -> list[list[tuple[int, int, int]]]:
    """For each step the parts (worker, first, count) in which it is computed.

    A part whose worker is lost in the step is there again, with another worker.
    """
    history = []
    for _ in range(7):
        cuts = sorted(draw(st.lists(st.integers(0, M), max_size=2)))
        parts = [
            (draw(st.integers(0, 1)), begin, end - begin)
            for begin, end in zip([0, *cuts], [*cuts, M], strict=True)
            if end > begin
        ]
        if draw(st.booleans()):
            worker, first, count = draw(st.sampled_from(parts))
            parts.append((1 - worker, first, count))
        history.append(parts)
    return history


@pytest.mark.parametrize("processes", [0, 2])
@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow])
@given(history=histories())
def test_data_under_any_shares_is_the_epoch_of_a_plain_run(processes: int, history):
    alone = Data(Owner(), Drawn(SAMPLES), batch_size=BATCH, microbatches=M)
    expected = plain(alone, len(history))
    workers = [
        Data(Owner(), Drawn(SAMPLES), batch_size=BATCH, microbatches=M, num_workers=processes)
        for _ in range(2)
    ]
    try:
        for step, parts in enumerate(history):
            for worker, first, count in parts:
                workers[worker].expect(step, first, count, end=len(history))
                microbatches = workers[worker].at(step)
                for i in range(first, first + count):
                    assert bits(microbatches[i]) == expected[step][i]
    finally:
        for each in workers:
            each.close()
    for epoch in range(2):
        steps = expected[epoch * len(alone) : (epoch + 1) * len(alone)]
        indices = [np.frombuffer(parts[0], np.int64) for step in steps for parts in step]
        assert sorted(np.concatenate(indices)) == list(range(SAMPLES))


@pytest.mark.parametrize("processes", [0, 1, 3])
def test_data_asked_for_in_any_order_has_the_same_bits(processes: int):
    expected = plain(Data(Owner(), Drawn(SAMPLES), batch_size=BATCH, microbatches=M), 6)
    data = Data(Owner(), Drawn(SAMPLES), batch_size=BATCH, microbatches=M, num_workers=processes)
    # Backwards, beside the share, twice, behind what is expected, and an earlier step again.
    for step in (0, 1, 2, 5, 1, 2, 3):
        data.expect(step, 1, 2)
        for i in (2, 1, 3, 2):
            assert bits(data.at(step)[i]) == expected[step][i]
    data.close()


def test_data_leaves_the_streams_of_the_script_alone():
    data = Data(Owner(), Drawn(SAMPLES), batch_size=BATCH, microbatches=M, num_workers=1)
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    before = (torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state()))
    data.expect(0, 0, 1)
    _ = data.at(0)[:]
    assert (torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())) == before
    data.close()


def test_data_fetches_only_what_is_asked_for():
    fetched: list[int] = []

    class Counted(Drawn):
        def __getitem__(self, index: int):
            fetched.append(index)
            return super().__getitem__(index)

    data = Data(Owner(), Counted(SAMPLES), batch_size=BATCH, microbatches=M, shuffle=False)
    microbatches = data.at(1)
    assert len(microbatches) == M
    assert fetched == []
    _ = microbatches[-1]
    assert fetched == [14, 15]


def test_data_is_gone_through_in_the_epoch_of_the_session():
    data = Data(Owner(epoch=2), Drawn(SAMPLES), batch_size=BATCH, microbatches=M)
    steps = list(data)
    assert [each.step for each in steps] == [6, 7, 8]
    assert len(data) == 3


def test_microbatch_that_phases_share_is_kept_for_the_step():
    data = Data(Owner(), Drawn(SAMPLES), batch_size=BATCH, microbatches=M)
    first, second = data.at(0)[0], data.at(0)[0]
    assert bits(first) == bits(second)
    assert first is not second
    assert data.at(1)[0] is data.at(1)[0]
    kept = data.at(1)
    _ = data.at(2)
    # Its step is over, so it is fetched anew.
    assert bits(kept[0]) == bits(data.at(1)[0])


def test_data_of_tensors_is_collated_as_in_torch():
    x = torch.arange(12.0).reshape(6, 2)
    dataset = TensorDataset(x, torch.arange(6))
    data = Data(Owner(), dataset, batch_size=6, microbatches=3, shuffle=False)
    for mine, torchs in zip(data.at(0), DataLoader(dataset, batch_size=2), strict=True):
        assert type(mine) is type(torchs)
        assert bits(mine) == bits(torchs)


def test_data_set_that_fetches_several_at_once_is_asked_once():
    class Several(Drawn):
        def __getitems__(self, indices: list[int]) -> list[int]:
            return [10 * index for index in indices]

    data = Data(Owner(), Several(8), batch_size=4, microbatches=2, shuffle=False)
    assert data.at(1)[1].tolist() == [60, 70]


def test_order_of_the_persons_own_may_draw_and_is_the_same_on_every_worker():
    weights = torch.linspace(0, 1, SAMPLES)

    def order(epoch: int) -> torch.Tensor:
        return torch.multinomial(weights, 16, replacement=True)

    one, other = (
        Data(Owner(), Drawn(SAMPLES), batch_size=BATCH, microbatches=M, order=order)
        for _ in range(2)
    )
    assert len(one) == 2
    assert plain(one, 4) == plain(other, 4)
    assert plain(one, 2) != plain(one, 4)[2:]


def test_seed_left_out_is_the_sessions():
    def first(**options) -> list[bytes]:
        return bits(Data(Owner(), Drawn(SAMPLES), batch_size=4, microbatches=2, **options).at(0)[0])

    assert first() == first(seed=None) == first(seed=Owner.seed) != first(seed=8)


class Raising(Drawn):
    def __getitem__(self, index: int):
        if index == 5:
            raise KeyError("cat.png")
        return index


@pytest.mark.parametrize("processes", [0, 1])
def test_sample_that_raises_is_named_and_keeps_its_traceback(processes: int):
    data = Data(
        Owner(), Raising(8), batch_size=4, microbatches=2, shuffle=False, num_workers=processes
    )
    data.expect(0, 0, 2)
    _ = data.at(0)[0], data.at(0)[1], data.at(1)[1]
    with pytest.raises(KeyError, match=r"cat\.png") as raised:
        _ = data.at(1)[0]
    told = "".join(traceback.format_exception(raised.value))
    assert "at sample 5 of the data set (step 1, microbatch 0)" in told
    assert 'raise KeyError("cat.png")' in told
    # It is the person's error, and fetching goes on.
    assert data.at(0)[0].tolist() == [0, 1]
    data.close()


def test_collate_fn_that_raises_is_named():
    def collate(samples: list[int]) -> int:
        raise StopIteration

    data = Data(Owner(), Drawn(8), batch_size=4, microbatches=2, collate_fn=collate)
    with pytest.raises(RuntimeError, match="raised StopIteration") as raised:
        _ = data.at(0)[0]
    assert raised.value.__cause__ is not None
    assert "collate_fn of the data set" in raised.value.__cause__.__notes__[0]


def _changing(epoch: int, counts=(4, 8)) -> list[int]:
    return list(range(counts[epoch > 0]))


def _random(epoch: int) -> list[int]:
    return [STREAM.randrange(8) for _ in range(4)]


STREAM = random.Random(0)
LOADER = DataLoader(Drawn(8), batch_size=4)


@pytest.mark.parametrize(
    ("dataset", "options", "says"),
    [
        (Drawn(0), {}, "the data set is empty"),
        (Drawn(8), {"microbatches": 5}, "a microbatch needs a sample"),
        (Drawn(8), {"batch_size": 0}, "batch_size=0.*at least 1"),
        (Drawn(8), {"batch_size": 4.0}, r"batch_size=4\.0"),
        (Drawn(8), {"num_workers": -1}, "num_workers=-1.*at least 0"),
        (Drawn(8), {"seed": "x"}, "seed='x'"),
        (Drawn(8), {"sampler": LOADER.sampler}, "sampler=.*order="),
        (Drawn(8), {"batch_sampler": LOADER.batch_sampler}, "batch_sampler=.*order="),
        (Drawn(8), {"shuffel": True}, "there is no such option; give one of shuffle"),
        (Drawn(8), {"collate_fn": 3}, "a int cannot be called"),
        (Drawn(8), {"order": lambda epoch: []}, "order\\(0\\) has no samples"),
        (Drawn(8), {"order": lambda epoch: [0, 8]}, "order\\(0\\) has sample 8"),
        (Drawn(8), {"order": lambda epoch: ["0", "1"]}, "<lambda> gives '0' for a sample"),
        (Drawn(8), {"order": _random}, "has to be a function of the epoch"),
        ((i for i in range(8)), {}, "begins at the first sample each time"),
        (3, {}, "has __len__ and __getitem__"),
    ],
)
def test_data_that_cannot_be_is_refused_in_one_line(dataset, options, says):
    with pytest.raises(Misuse, match=says) as refused:
        Data(Owner(), dataset, **{"batch_size": 4, "microbatches": 2, **options})
    assert "\n" not in str(refused.value)


def test_data_set_that_grows_is_refused():
    dataset = Drawn(8)
    data = Data(Owner(), dataset, batch_size=4, microbatches=2)
    _ = data.at(0)
    dataset.samples = 9
    with pytest.raises(Misuse, match="has 9 samples in step 1 and had 8 before"):
        data.at(1)


def test_order_of_another_length_is_refused():
    data = Data(Owner(), Drawn(8), batch_size=4, microbatches=2, order=_changing)
    with pytest.raises(Misuse, match=r"order\(1\) has 8 samples and order\(0\) has 4"):
        _ = data.at(1)[0]


@pytest.mark.parametrize("step", [-1, 1.0, "0"])
def test_step_that_is_none_is_refused(step):
    with pytest.raises(Misuse, match="a step is a number from 0 on"):
        Data(Owner(), Drawn(8), batch_size=4, microbatches=2).at(step)


def test_a_loader_is_taken_apart() -> None:
    """Its data set goes on under a sampler of ours, with what else it was told."""
    loader = DataLoader(Drawn(8), batch_size=4, shuffle=True, drop_last=True)
    dataset, options = opened(loader, {"seed": 3})
    assert dataset is loader.dataset
    assert options == {
        "batch_size": 4,
        "shuffle": True,
        "drop_last": True,
        "num_workers": 0,
        "collate_fn": loader.collate_fn,
        "seed": 3,
    }


class Ordered(Sampler):
    """As a sampler of a script, which begins where it left off if its epoch is not set."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self):
        self.epoch += 1
        return iter([(self.epoch + each) % 8 for each in range(6)])


class Opened(Ordered):
    """One that cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Numbered(Ordered):
    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def rows_of(loader: DataLoader, epochs: int = 2) -> list[list[tuple[int, ...]]]:
    """The samples of each epoch, as a new worker has them."""
    dataset, options = opened(loader, {})
    data = Data(Owner(), dataset, microbatches=2, **options)
    return [data._order.rows(epoch, 0) for epoch in range(epochs)]


@pytest.mark.parametrize(
    "sampler",
    [
        WeightedRandomSampler([0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0], 8),
        WeightedRandomSampler([1.0] * 8, 8, generator=torch.Generator()),
        RandomSampler(Drawn(8), replacement=True),
        SubsetRandomSampler([1, 2, 3, 5, 6]),
        Ordered(),
        Numbered(),
    ],
)
def test_a_loaders_own_sampler_is_its_order(sampler: Sampler) -> None:
    """A function of the epoch, however often it was asked: its draws are seeded."""
    loader = DataLoader(Drawn(8), batch_size=4, sampler=sampler)
    first, second = rows_of(loader)
    assert rows_of(loader) == [first, second]
    assert first != second
    if isinstance(sampler, WeightedRandomSampler) and sampler.generator is None:
        assert {each for rows in first for each in rows} <= {1, 2, 3}


@pytest.mark.parametrize(
    ("sampler", "why"),
    [
        (Opened(), "gave other samples when asked again"),
        (DistributedSampler(Drawn(8), num_replicas=2, rank=0), "takes a share of the samples"),
        ([(3, 32), (4, 64)], r"list gives '\(3, 32\)' for a sample, and a whole number is needed"),
        ([0.5, 1.5], r"list gives '0.5' for a sample"),
        (torch.rand(4), r"Tensor gives 'tensor\(0.* for a sample"),
        (WeightedRandomSampler([1.0] * 8, 10**10), "lambda epoch: torch.ran"),
    ],
)
def test_a_sampler_that_is_no_function_of_the_epoch_is_refused(sampler: Sampler, why: str) -> None:
    with pytest.raises(Misuse, match=why):
        rows_of(DataLoader(Drawn(8), batch_size=4, sampler=sampler))


def test_draws_with_replacement_are_not_listed_and_fall_alike_on_all_samples() -> None:
    """An epoch may have so many that it never ends, as minGPT's has."""
    sampler = RandomSampler(Drawn(8), replacement=True, num_samples=10**10)
    loader = DataLoader(Drawn(8), batch_size=4000, sampler=sampler)
    data = Data(Owner(), loader.dataset, **opened(loader, {"microbatches": 2})[1])
    assert len(data) == 10**10 // 4000
    first, second, last, again = (
        data._order.rows(epoch, place)
        for epoch, place in ((0, 0), (0, 1), (1, len(data) - 1), (0, 0))
    )
    assert first == again and first != second != last
    counts = Counter(each for rows in (first, second, last) for part in rows for each in part)
    assert sorted(counts) == [*range(8)] and min(counts.values()) > 1300
    whole = Data(Owner(), loader.dataset, **opened(loader, {"microbatches": 4})[1])
    assert [each for part in whole._order.rows(0, 1) for each in part] == [*chain(*second)]


class Buckets(Sampler):
    """As the samplers of detection and of translation: batches of samples alike, in a new order."""

    def __init__(self, sizes: list[int]) -> None:
        ends = [*accumulate(sizes, initial=0)]
        self.groups = [[*range(begin, end)] for begin, end in pairwise(ends)]

    def __iter__(self):
        random.shuffle(self.groups)
        yield from self.groups


class Shuffled(BatchSampler):
    """Batches of a sampler, which it is told the epoch of by its own count."""

    def __init__(self, sampler: Sampler) -> None:
        super().__init__(sampler, 3, drop_last=False)
        self.rng = np.random.default_rng(0)

    def __iter__(self):
        yield from self.rng.permutation(8).reshape(2, 4)


@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize("whole", [False, True])
def test_a_batch_sampler_says_what_a_batch_is(processes: int, whole: bool) -> None:
    loader = DataLoader(
        Drawn(12), batch_sampler=Buckets([2, 5, 3, 2]), num_workers=processes, collate_fn=list
    )
    dataset, options = opened(loader, {})
    data = Data(Owner(), dataset, microbatches=2, whole=whole, **options)
    try:
        assert len(data) == 4
        epochs = []
        for epoch in range(3):
            steps = [data.at(4 * epoch + place) for place in range(4)]
            batches = steps if whole else [[*chain(*step)] for step in steps]
            epochs.append([tuple(int(sample[0]) for sample in batch) for batch in batches])
    finally:
        data.close()
    assert all(sorted(each) == [(0, 1), (2, 3, 4, 5, 6), (7, 8, 9), (10, 11)] for each in epochs)
    assert len({*map(tuple, epochs)}) > 1


def test_torch_s_own_batch_sampler_keeps_its_order() -> None:
    """As DETR gives one, to drop the last batch."""
    sampler = BatchSampler(RandomSampler(range(8)), 3, drop_last=True)
    for options in ({}, {"batch_size": 3}):
        dataset, found = opened(DataLoader(Drawn(8), batch_sampler=sampler), options)
        data = Data(Owner(), dataset, microbatches=1, **found)
        epochs = [[data._order.rows(epoch, place)[0] for place in range(2)] for epoch in range(2)]
        assert len(data) == 2
        assert all(len({*a, *b}) == 6 for a, b in epochs)
        assert epochs[0] != epochs[1]


@pytest.mark.parametrize(
    "sampler",
    [
        Buckets([2, 2, 2, 2]),
        Shuffled(SequentialSampler(range(8))),
        Shuffled(RandomSampler(range(8))),
    ],
)
def test_a_sampler_that_changes_itself_is_gone_through_from_its_first_epoch(
    sampler: Sampler,
) -> None:
    """A worker that joins late has the batches of one that was there from the beginning."""
    loader = DataLoader(Drawn(8), batch_sampler=sampler)
    first = rows_of(loader, 5)
    assert len({*map(str, first)}) > 1
    dataset, options = opened(loader, {})
    late = Data(Owner(), dataset, microbatches=2, **options)
    assert [late._order.rows(epoch, 0) for epoch in (4, 2, 3)] == [first[4], first[2], first[3]]


def test_the_data_set_of_a_sampler_is_not_copied_with_it() -> None:
    dataset, sampler = Drawn(8), Ordered()
    dataset.lock = sampler.lock = threading.Lock()
    sampler.data_source = dataset
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    assert rows_of(loader) == rows_of(loader)


def test_a_sampler_that_the_script_changes_too_is_refused() -> None:
    sampler = Buckets([4, 4])
    dataset, options = opened(DataLoader(Drawn(8), batch_sampler=sampler), {})
    data = Data(Owner(), dataset, microbatches=2, **options)
    sampler.groups = [[0], [1]]
    with pytest.raises(
        Misuse, match=r"its Buckets changes itself.*script changes it.*groups"
    ) as refused:
        data._order.rows(0, 0)
    assert "\n" not in str(refused.value)


def test_a_batch_that_is_too_small_to_cut_is_named() -> None:
    dataset, options = opened(DataLoader(Drawn(8), batch_sampler=Buckets([7, 1])), {})
    data = Data(Owner(), dataset, microbatches=2, **options)
    with pytest.raises(Misuse, match="a batch of 1, which cannot be cut into 2 microbatches"):
        _ = [data._order.rows(0, place) for place in range(2)]


@pytest.mark.parametrize(
    ("workers", "options", "says"), [(2, {}, 1), (0, {}, 0), (2, {"num_workers": 0}, 0)]
)
def test_a_loader_whose_processes_begin_otherwise_is_told_so(workers, options, says, capfd) -> None:
    """It goes on, because most such functions seed, and torch calls them in processes only."""
    loader = DataLoader(Drawn(8), batch_size=4, num_workers=workers, worker_init_fn=print)
    assert opened(loader, options)[0] is loader.dataset
    told = capfd.readouterr().err
    assert told.count("worker_init_fn of the DataLoader is not called") == told.count("\n") == says
