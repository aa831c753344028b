"""Processes that fetch ahead are killed, fail, and end with the one that they fetch for."""

import contextlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from explain import lives
from samples import Drawn, Owner, bits, plain
from torch.utils.data import Subset
from waiting import until

from agent.data.data import Data
from agent.data.own_places import places, take_own_places
from agent.errors import Misuse

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
SAMPLES, BATCH, M = 64, 8, 4
LONG = bytes(range(256)) * 4096
FAR = 100_000  # more than a file reads ahead
KILLED = """
import multiprocessing, sys, time
from samples import Drawn, Owner
from agent.data.data import Data

class Stuck(Drawn):
    def __getitem__(self, index):
        time.sleep(3600)

data = Data(Owner(), Stuck(64), batch_size=8, microbatches=4, num_workers=2)
data.expect(0, 0, 4)
print(*(each.pid for each in multiprocessing.active_children()), flush=True)
time.sleep(3600)
"""

# Both processes are late: the training process is gone before they look for it, and the second one still lives then.
LATE = """
import os
from agent.data import prefetch
training, begin = os.getpid(), prefetch._begin_process

def late(*arguments):
    while os.getppid() == training:
        time.sleep(0.01)
    while arguments[-1]:
        time.sleep(0.01)
    begin(*arguments)

prefetch._begin_process = late
"""


def _data(dataset, processes: int = 2, **options) -> Data:
    return Data(
        Owner(), dataset, batch_size=BATCH, microbatches=M, num_workers=processes, **options
    )


class Where(Drawn):
    """Each sample is the process that fetched it; all that is fetched is counted."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.fetched = multiprocessing.Value("i", 0)

    def __getitem__(self, index: int) -> int:
        with self.fetched.get_lock():
            self.fetched.value += 1
        return os.getpid()


class Long(Drawn):
    def __getitem__(self, index: int) -> bytes:
        return LONG


def _where(data: Data, step: int, i: int) -> int:
    (where,) = set(data.at(step)[i].tolist())
    return where


def test_what_is_expected_is_fetched_by_other_processes_and_nothing_else():
    data = _data(Where(SAMPLES))
    for step in range(6):
        data.expect(step, 1, 2)
        assert os.getpid() not in {_where(data, step, 1), _where(data, step, 2)}
        assert _where(data, step, 3) == os.getpid()
    # From the middle of the step on, another share: from here it is that of the next steps.
    data.at(6).expect(0, 4)
    for step in (6, 7):
        assert os.getpid() not in {_where(data, step, i) for i in range(M)}
    data.close()


def test_what_is_fetched_ahead_is_bounded_and_ends_with_the_training():
    dataset = Where(SAMPLES)
    data = _data(dataset)
    for step in range(3):
        data.expect(step, 0, 2, end=5)
        taken = [_where(data, step, i) for i in range(2)]
        assert os.getpid() not in taken
        # Two steps of two microbatches of two samples.
        assert dataset.fetched.value <= (step + 1) * 4 + 8
    for step in (3, 4):
        _ = [_where(data, step, i) for i in range(2)]
    data.close()
    assert dataset.fetched.value == 5 * 4


def test_order_that_goes_by_what_changes_is_refused_if_it_was_asked_ahead():
    """Without processes it is asked as its epoch begins."""
    hard = [0]

    def order(epoch: int) -> list[int]:
        return [(hard[0] + i) % SAMPLES for i in range(16)]

    def train(processes: int) -> list[int]:
        data, found, hard[0] = _data(Drawn(SAMPLES), processes, order=order), [], 0
        try:
            for step in range(6):
                microbatches = data.at(step)
                microbatches.expect(0, M, 6)
                found.append(int(microbatches[0][0][0]))
                hard[0] += step % 2  # at the end of an epoch
        finally:
            data.close()
        return found

    assert train(0) == [0, 8, 1, 9, 2, 10]
    with pytest.raises(
        Misuse, match=r"order\(1\) gave other samples when it was asked ahead"
    ) as no:
        train(2)
    assert "\n" not in str(no.value)


class Sized(Drawn):
    """Samples as long as the script says, and a count of its own that nobody compares."""

    size = 1

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.calls = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        self.calls += 1
        return torch.full((self.size,), index)


@pytest.mark.parametrize(("processes", "whole"), [(0, False), (2, False), (2, True)])
def test_what_a_script_sets_in_its_data_set_counts_from_the_next_step_on(processes, whole, capfd):
    dataset = Sized(16)
    data = _data(Subset(dataset, range(16)), processes, whole=whole)
    for step in range(6):
        dataset.size = 1 + step // 2
        batch = data.at(step)
        if not whole:
            batch.expect(0, M, 6)
        (found,) = {len(sample) for part in batch for sample in ([part] if whole else part)}
        assert found == dataset.size
    data.close()
    assert capfd.readouterr().err.count("Subset was changed by the script") == (processes > 0)


class Scaled:
    """A transform with a setting of its own."""

    def __init__(self) -> None:
        self.strength = 1.0

    def __call__(self, sample):
        return sample * self.strength

    def collated(self, samples: list[torch.Tensor]) -> torch.Tensor:
        return self(torch.stack(samples))


class Transformed(Drawn):
    def __init__(self, samples: int, transform) -> None:
        super().__init__(samples)
        self.transform = transform

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.transform(torch.ones(1))


class Composed:
    def __init__(self, *transforms) -> None:
        self.transforms = transforms

    def __call__(self, sample):
        for transform in self.transforms:
            sample = transform(sample)
        return sample


@pytest.mark.parametrize(
    ("processes", "place"),
    [
        (0, "transform"),
        *((2, place) for place in ("transform", "one of several", "module", "collate_fn")),
    ],
)
def test_what_a_script_sets_in_a_transform_counts_from_the_next_step_on(processes, place, capfd):
    """As with a torch loader, whose processes begin with each epoch."""
    scaled = Scaled()
    module = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Identity())
    module[1].forward = scaled
    transform = {
        "transform": scaled,
        "one of several": Composed(Composed(scaled)),
        "module": module,
        "collate_fn": Composed(),
    }[place]
    options = {"collate_fn": scaled.collated} if place == "collate_fn" else {}
    data = _data(Subset(Transformed(16, transform), range(16)), processes, **options)
    for step in range(6):
        scaled.strength = 1.0 + step // 2
        batch = data.at(step)
        batch.expect(0, M, 6)
        assert {float(each) for part in batch for each in part} == {scaled.strength}
    data.close()
    assert capfd.readouterr().err.count("Subset was changed by the script") == (processes > 0)


STRENGTH = epoch = 1


def strengthened(sample: torch.Tensor) -> torch.Tensor:
    return sample * STRENGTH


class Reading(Drawn):
    """A data set that names an attribute as the script names a variable of its own."""

    epoch = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        return strengthened(torch.ones(1)) + self.epoch


@pytest.mark.parametrize(
    ("processes", "place"),
    [(0, "data set"), (2, "data set"), (2, "transform"), (2, "collate_fn")],
)
def test_a_global_that_the_code_of_a_data_set_reads_counts_from_the_next_step_on(
    processes, place, capfd, monkeypatch
):
    dataset = Reading(16) if place == "data set" else Transformed(16, lambda sample: sample)
    if place == "transform":
        dataset.transform = strengthened
    options = (
        {"collate_fn": lambda x: strengthened(torch.stack(x))} if place == "collate_fn" else {}
    )
    data = _data(dataset, processes, **options)
    for step in range(6):
        monkeypatch.setitem(globals(), "STRENGTH", 1 + step // 2)
        monkeypatch.setitem(globals(), "epoch", step)
        batch = data.at(step)
        batch.expect(0, M, 6)
        assert {float(each) for part in batch for each in part} == {1.0 + step // 2}
    data.close()
    said = capfd.readouterr().err
    name = f"{type(dataset).__name__} was changed by the script (STRENGTH), so"
    assert said.count(name) == (processes > 0)


def test_an_attribute_named_as_a_variable_of_the_script_begins_no_process_again(monkeypatch):
    data = _data(Reading(16), 2)
    begun = set()
    for step in range(4):
        monkeypatch.setitem(globals(), "epoch", step)
        data.at(step).expect(0, M, 4)
        begun |= {each.pid for each in multiprocessing.active_children()}
    data.close()
    assert len(begun) == 2


def test_what_a_data_set_notes_for_itself_begins_no_process_again():
    data = _data(Sized(SAMPLES))
    begun = set()
    for step in range(4):
        microbatches = data.at(step)
        microbatches.expect(0, 2, 4)
        begun |= {each.pid for each in multiprocessing.active_children()}
        assert len(microbatches[:]) == M  # two of them are fetched here
    data.close()
    assert len(begun) == 2


def test_worker_without_a_share_starts_no_process():
    data = _data(Where(SAMPLES))
    data.expect(0, 2, 0)
    assert multiprocessing.active_children() == []
    assert _where(data, 0, 0) == os.getpid()
    data.close()


def test_close_ends_the_processes():
    data = _data(Drawn(SAMPLES))
    data.expect(0, 0, 4)
    assert len(multiprocessing.active_children()) == 2
    data.close()
    assert multiprocessing.active_children() == []
    assert len(data.at(0)[0]) == 4


def test_processes_that_are_killed_change_no_bits(capfd):
    expected = plain(Data(Owner(), Drawn(SAMPLES), batch_size=BATCH, microbatches=M), 8)
    data = _data(Drawn(SAMPLES))
    for step in range(8):
        data.expect(step, 0, M)
        if step in (1, 3, 5):
            assert multiprocessing.active_children()
            for each in multiprocessing.active_children():
                os.kill(each.pid, signal.SIGKILL)
                each.join()
        for i in range(M):
            assert bits(data.at(step)[i]) == expected[step][i]
    data.close()
    told = capfd.readouterr().err
    assert told.count("are lost and are started again") == 2
    assert told.count("are lost and are not started again") == 1
    assert multiprocessing.active_children() == []


def test_processes_that_are_killed_amid_what_they_send_stop_nobody():
    """What they send is longer than a pipe holds, so each stands in the midst of it."""
    data = _data(Long(SAMPLES))
    data.expect(0, 0, M)
    assert set(data.at(0)[0]) == {LONG}
    for each in multiprocessing.active_children():
        os.kill(each.pid, signal.SIGKILL)
        each.join()
    assert [set(microbatch) for microbatch in data.at(0)[1:]] == [{LONG}] * (M - 1)
    data.close()


def killed(script: str) -> list[int]:
    """A training process is killed as soon as it has begun two others; their pids."""
    path = os.pathsep.join([str(Path(__file__).parent), str(Path.cwd()), *sys.path])
    parent = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )
    try:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(lives, pids))
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    return pids


def test_processes_end_with_a_training_process_that_is_killed():
    """Both are in the middle of a sample, where they do not look whether their parent is there."""
    pids = killed(KILLED)
    until("their end", lambda: not any(map(lives, pids)))


def test_a_process_whose_training_process_is_gone_before_it_looks_ends():
    """What tells it of that end is a pipe that the other process has open, too."""
    first, second = sorted(killed(KILLED.replace("\nclass", LATE + "\nclass")))
    try:
        until("its end", lambda: not lives(first))
    finally:
        for pid in (first, second):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class OneFile(Drawn):
    """A file that is open before the processes are; in these, another seeks before they read."""

    def __init__(self, path: Path, samples: int) -> None:
        super().__init__(samples)
        path.write_bytes(bytes(range(samples)))
        self.file = path.open("rb", buffering=0)
        self.sought, self.moved = multiprocessing.Event(), multiprocessing.Event()

    def __getitem__(self, index: int) -> int:
        self.file.seek(index)
        if torch.utils.data.get_worker_info() is not None:
            self.sought.set()
            self.moved.wait()
        return self.file.read(1)[0]


def test_a_file_that_was_open_before_has_a_place_in_each_process(tmp_path):
    dataset = OneFile(tmp_path / "samples", SAMPLES)
    data = _data(dataset, shuffle=False)
    data.expect(0, 0, 1, end=1)
    assert dataset.sought.wait(60)
    dataset.file.seek(SAMPLES // 2)
    dataset.moved.set()
    assert data.at(0)[0].tolist() == [0, 1]
    assert dataset.file.tell() == SAMPLES // 2
    data.close()
    dataset.file.close()


class OneBuffer(Drawn):
    """Every sample is the same tensor, filled anew, with a part of it that is a number."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.buffer = torch.zeros(3)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"whole": self.buffer.fill_(index), "part": self.buffer[1]}


def test_a_data_set_that_fills_one_buffer_does_not_change_what_it_has_sent():
    data = _data(OneBuffer(SAMPLES), 1, shuffle=False, collate_fn=lambda samples: samples[-1])
    for step in range(4):
        data.expect(step, 0, M, end=4)
        found = [data.at(step)[i] for i in range(M)]
        assert [(*each["whole"].tolist(), float(each["part"])) for each in found] == [
            (8 * step + 2 * i + 1,) * 4 for i in range(M)
        ]
    data.close()


def test_a_file_that_was_read_in_part_goes_on_from_its_place_before_the_fork(tmp_path):
    """The training process reads on before the other one is ready, whose buffer knows nothing of that."""
    path = tmp_path / "samples"
    path.write_bytes(LONG)
    with path.open("rb") as file:
        assert file.read(1) == LONG[:1]
        known, (wait, go) = places(), os.pipe()
        child = os.fork()
        if not child:
            os.read(wait, 1)
            take_own_places(known)
            os._exit(file.read(FAR) != LONG[1 : FAR + 1])
        os.lseek(file.fileno(), 12345, os.SEEK_SET)
        os.write(go, b"x")
        assert os.waitpid(child, 0)[1] == 0
        for end in (wait, go):
            os.close(end)


class OnlyHere(Drawn):
    def __getitem__(self, index: int) -> int:
        if torch.utils.data.get_worker_info() is not None:
            raise ConnectionError("one at a time")
        return index


def test_what_fails_in_another_process_is_fetched_here_and_said_once(capfd):
    data = _data(OnlyHere(SAMPLES), shuffle=False)
    for step in range(3):
        data.expect(step, 0, 1)
        assert data.at(step)[0].tolist() == [8 * step, 8 * step + 1]
    data.close()
    assert capfd.readouterr().err.count("ConnectionError: one at a time") == 1


def test_what_cannot_be_sent_is_fetched_here():
    data = _data(Drawn(SAMPLES), collate_fn=lambda samples: lambda: len(samples))
    data.expect(0, 0, M)
    assert [data.at(0)[i]() for i in range(M)] == [2, 2, 2, 2]
    data.close()


@pytest.fixture
def spawned():
    torch.multiprocessing.set_start_method("spawn", force=True)
    yield
    torch.multiprocessing.set_start_method(None, force=True)


class Later(Drawn):
    """Its later samples have something that no process can send."""

    def __init__(self, samples: int, graph: bool) -> None:
        super().__init__(samples)
        self.graph = graph

    def __getitem__(self, index: int):
        whole = torch.full((3,), float(index)), np.full(3, index)
        if index < SAMPLES // 2:
            return whole
        return *whole, (torch.ones(1, requires_grad=True) * 2 if self.graph else lambda: index)


@pytest.mark.parametrize("graph", [False, True])
def test_what_cannot_be_sent_later_on_is_fetched_here(graph, capfd):
    data = _data(Later(SAMPLES, graph), shuffle=False, collate_fn=list)
    found = []
    for step in range(SAMPLES // BATCH):
        data.expect(step, 0, M)
        found += [each for i in range(M) for each in data.at(step)[i]]
    assert [int(each[1][0]) for each in found] == [*range(SAMPLES)]
    assert [len(each) for each in found] == [2] * (SAMPLES // 2) + [3] * (SAMPLES // 2)
    assert "failed where this one did not" in capfd.readouterr().err
    data.close()


def test_processes_are_forked_where_python_itself_would_not_and_nobody_has_asked(
    spawned, monkeypatch
):
    """From Python 3.14 on its own way is another one, which is set by the first that asks for it."""
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["spawn", "fork"])
    data = _data(Drawn(SAMPLES), collate_fn=lambda samples: samples)  # refused by all other ways
    data.expect(0, 0, M)
    data.close()


def test_lambda_is_refused_where_the_script_asked_for_spawn(spawned):
    data = _data(Drawn(SAMPLES), collate_fn=lambda samples: samples)
    with pytest.raises(
        Misuse, match=r"num_workers=2.*'spawn'.*lambda.*define what is named"
    ) as refused:
        data.expect(0, 0, M)
    assert "\n" not in str(refused.value)
    assert isinstance(refused.value.__cause__, pickle.PicklingError | AttributeError)


def test_processes_are_spawned_where_the_script_asked_for_it(spawned):
    expected = plain(Data(Owner(), Drawn(SAMPLES), batch_size=BATCH, microbatches=M), 2)
    data = _data(Drawn(SAMPLES), processes=1)
    for step in range(2):
        data.expect(step, 0, M)
        assert [bits(data.at(step)[i]) for i in range(M)] == expected[step]
    data.close()
