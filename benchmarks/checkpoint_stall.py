"""How long does a checkpoint hold up training? Ours beside torch.distributed.checkpoint, interleaved.

The same model trains in one process; in each round every contender takes one checkpoint, in shuffled order,
with as many undisturbed steps before it. *Blocked* is the time that the training thread spends in the
contender's calls, waits before the optimizer's update included. *Extra* is by how much the steps from the
checkpoint until it is written take longer than as many undisturbed ones: that also counts what the
background work takes from the cores.
"""

import random
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from _checkpoints import GIB, machine, middle, place, show
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from agent.store.archive import Archive, assemble, write_parts
from agent.store.encoding.format import File, Layer, file_of
from agent.store.layers import collect, share_of
from agent.store.memory import Again, Copying
from agent.store.places.sinks import DiskSink

WIDTH, LAYERS, BATCH = 1024, 22, 96
ROUNDS, STEPS_BETWEEN = 5, 2
INTERVAL_S = 60.0


class Training:
    def __init__(self) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)  # as in a session; the other core is the background's
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.batch = torch.randn(BATCH, WIDTH)
        self.before_update: Callable[[], None] = lambda: None
        for _ in range(2):
            self.step()
        state = [item for one in self.optimizer.state.values() for item in one.values()]
        self.state_bytes = sum(item.nbytes for item in [*self.model.parameters(), *state])

    def step(self) -> float:
        begun = time.perf_counter()
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        self.before_update()
        self.optimizer.step()
        return time.perf_counter() - begun

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "opt": self.optimizer.state_dict()}


class Ours:
    """As a worker does it: copied beside the next step, and before the update whatever is not copied yet.

    What a worker sends its keeper is written to disk here."""

    def __init__(self, training: Training, folder: Path) -> None:
        self._objects = {"model": training.model, "opt": training.optimizer}
        self._sink = DiskSink(folder / "ours")
        self._archive = Archive(self._sink, "job", keep=1)
        self._archive.take_over(0)
        self._version = 0
        self._copying: Copying | None = None
        self._again = Again()
        self._thread = threading.Thread()

    def begin(self) -> None:
        self._version += 1
        live = collect(self._objects).finish()
        _, pieces = share_of(live, 1, 0)
        self._copying = Copying(lambda: pieces, self._again)
        layers = [layer.form for layer in live]
        self._thread = threading.Thread(target=self._write, args=(layers, self._copying))
        self._thread.start()

    def _write(self, layers: list[Layer], copying: Copying) -> None:
        copying.finish()
        parts = write_parts(self._sink, self._files(layers, copying.whole))
        self._again.give(copying.whole)
        self._archive.commit(assemble("job", self._version, 1, layers, parts))
        self._archive.prune()

    def _files(self, layers: list[Layer], whole: memoryview) -> Iterator[File]:
        at = 0
        for layer in layers:
            end = at + layer.layer_bytes
            yield file_of(layer, self._version, 0, layer.layer_bytes, [whole[at:end]])
            at = end

    def before_update(self) -> None:
        if self._copying is not None:
            self._copying.finish()
            self._copying = None

    def done(self) -> bool:
        return not self._thread.is_alive()

    def close(self) -> None:
        self._thread.join()


class Save:
    """The default: return when everything is written."""

    def __init__(self, training: Training, folder: Path) -> None:
        self._training, self._folder = training, folder / "save"

    def begin(self) -> None:
        save(self._training.state(), checkpoint_id=self._folder, no_dist=True)

    def before_update(self) -> None:
        return None

    def done(self) -> bool:
        return True

    def close(self) -> None:
        return None


class AsyncSave:
    """Return when the state is staged (blocking), or wait for that before the update (staged)."""

    def __init__(self, training: Training, folder: Path, *, staged: bool) -> None:
        self._training, self._folder = training, folder / f"async-{staged}"
        options = StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=False,
            use_async_staging=True,
            use_non_blocking_copy=False,
        )
        self._stager = DefaultStager(options) if staged else None
        self._staging: Any = None
        self._upload: Any = None

    def begin(self) -> None:
        answer = async_save(
            self._training.state(),
            checkpoint_id=self._folder,
            async_stager=self._stager,
            no_dist=True,
        )
        if self._stager is None:
            self._upload = answer
        else:
            self._staging, self._upload = answer.staging_completion, answer.upload_completion

    def before_update(self) -> None:
        if self._staging is not None:
            self._staging.result()
            self._staging = None

    def done(self) -> bool:
        return self._upload is None or self._upload.done()

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()


def disturbed(training: Training, contender: Any) -> tuple[float, float, int]:
    """Steps from a checkpoint until it is written: their time, the blocked time, their number."""
    blocked = 0.0

    def before_update() -> None:
        nonlocal blocked
        begun = time.perf_counter()
        contender.before_update()
        blocked += time.perf_counter() - begun

    training.before_update = before_update
    begun = time.perf_counter()
    contender.begin()
    blocked += time.perf_counter() - begun
    count = 0
    while count < STEPS_BETWEEN or not contender.done():
        training.step()
        count += 1
    took = time.perf_counter() - begun
    training.before_update = lambda: None
    return took, blocked, count


def main() -> None:
    warnings.filterwarnings("ignore", module="torch.distributed")
    training = Training()
    gib = training.state_bytes / GIB
    with place(8 * training.state_bytes) as folder:
        contenders: dict[str, Any] = {
            "torch save": Save(training, folder),
            "torch async_save": AsyncSave(training, folder, staged=False),
            "torch async_save, async staging": AsyncSave(training, folder, staged=True),
            "ours": Ours(training, folder),
        }
        blocked: dict[str, list[float]] = {name: [] for name in contenders}
        extra: dict[str, list[float]] = {name: [] for name in contenders}
        steps: list[float] = []
        for contender in contenders.values():
            disturbed(training, contender)  # first time: memory, files, imports
        draw = random.Random(0)
        for _ in range(ROUNDS):
            for name in draw.sample(sorted(contenders), len(contenders)):
                alone = [training.step() for _ in range(STEPS_BETWEEN)]
                took, held, count = disturbed(training, contenders[name])
                alone += [training.step() for _ in range(STEPS_BETWEEN)]
                steps += alone
                blocked[name].append(held * 1e3 / gib)
                extra[name].append((took - count * statistics.median(alone)) * 1e3 / gib)
        for contender in contenders.values():
            contender.close()
        report(training, blocked, extra, steps, folder)


def report(
    training: Training,
    blocked: dict[str, list[float]],
    extra: dict[str, list[float]],
    steps: list[float],
    folder: Path,
) -> None:
    base = statistics.median(blocked["torch save"])
    rows = []
    for name, held in blocked.items():
        median = statistics.median(held)
        extra_ms = statistics.median(extra[name])
        per_interval = training.state_bytes / GIB / 1e3 / INTERVAL_S
        rows.append(
            (
                name,
                middle(held),
                f"1/{base / median:.3g}",
                middle(extra[name]),
                f"{median * per_interval:.2%} / {max(extra_ms, 0.0) * per_interval:.2%}",
            )
        )
    show(
        "Step stall caused by one checkpoint, per GiB of state",
        (
            "",
            "blocked ms/GiB",
            "of save",
            "extra ms/GiB until written",
            f"every {INTERVAL_S:.0f} s",
        ),
        rows,
        f"state {training.state_bytes / GIB:.2f} GiB, {ROUNDS} rounds, medians (middle half), "
        f"undisturbed step {middle([step * 1e3 for step in steps])} ms",
        machine(folder),
    )


if __name__ == "__main__":
    main()
