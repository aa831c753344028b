"""Where the newest steps of jobs lie after `down`, with warnings if they may be lost."""

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from agent.errors import CheckpointError
from agent.keeper.storage.memory_log import kept, root_of
from agent.keeper.storage.offsite import Storage
from agent.store.archive import Archive
from agent.store.errors import Unavailable
from agent.store.places.sinks import DiskSink
from orchestrator.config import Config
from orchestrator.paths import Places
from orchestrator.view import View

LATELY_S = 3600.0  # jobs that ended earlier have been copied, or an earlier warning said so
JUST_NOW_S = 300.0  # jobs ended by this `down`; the states of others may have been deleted since


class Uncopied(msgspec.Struct, frozen=True):
    """A job whose newest state has not been copied to the storage."""

    job: str
    step: int
    folder: Path
    there: str


class Lost(msgspec.Struct, frozen=True):
    """Steps that were committed and are not stored anywhere any more."""

    job: str
    step: int
    left: int
    why: str = "the disk did not take them, nor did this machine's memory"


class Leaving(msgspec.Struct, frozen=True):
    in_memory: tuple[Path, ...] = ()
    uncopied: tuple[Uncopied, ...] = ()
    lost: tuple[Lost, ...] = ()

    def texts(self, config: Config) -> Iterator[str]:
        for folder in self.in_memory:
            yield (
                f"the newest steps of {folder.name} are not in {Places(config.state_dir).checkpoints} yet: they are in "
                f"{folder}, in this machine's memory, and gone if it goes down; see that there is room on the disk, then: "
                "orchestrator up"
            )
        for one in self.uncopied:
            yield (
                f"the state of {one.job} at step {one.step} is not in {config.storage.checkpoint_url} ({one.there}): it is "
                f"in {one.folder} on this machine only; before this machine goes, copy that folder, or resume the job "
                "until it is copied"
            )
        for each in self.lost:
            yield (
                f"steps {each.left} to {each.step} of {each.job} are lost: {each.why}; resumed, it goes on from step "
                f"{each.left}"
            )


def found(config: Config, places: Places, view: View | None) -> Leaving:
    """Return where the newest steps lie; `view` is the last view of the ended house."""
    in_memory = tuple(kept(root_of(places.checkpoints)))
    names, now_s = {folder.name for folder in in_memory}, time.time()
    lost, uncopied, silent = list[Lost](), list[Uncopied](), ""
    for job in view.jobs if view else ():
        ago_s = now_s - (job.ended_at_s or now_s)
        if ago_s > LATELY_S:
            continue
        shelf = Archive(DiskSink(places.checkpoints / job.id), job.id, ours=False)  # only looked at
        try:
            here = _newest(shelf)
        except CheckpointError:  # resuming the job will report it
            continue
        reached, state = here or (0, 0)
        if reached < job.step and ago_s < JUST_NOW_S and job.id not in names:
            lost.append(Lost(job.id, job.step, reached, *shelf.damage()[:1]))
        if not state:
            continue
        try:
            there = silent or _without(config, job.id, state)
        except (CheckpointError, OSError) as error:
            there = str(error).splitlines()[0]
            if isinstance(error, Unavailable):  # do not ask again, because this may take minutes
                silent = there
        if there:
            uncopied.append(Uncopied(job.id, state, Path(shelf.sink.name), there))
    return Leaving(in_memory, tuple(uncopied), tuple(lost))


def _without(config: Config, job: str, state: int) -> str:
    """Return what the storage has instead of this state, or "" if it has the state."""
    if config.storage.checkpoint_url is None:
        return ""
    there = _newest(Storage(url=config.storage.checkpoint_url, every_s=0.0).archive(job))
    if there is None:
        return "nothing of it is there"
    return "" if there[1] >= state else f"that of step {there[1]} is"


def _newest(shelf: Archive) -> tuple[int, int] | None:
    """Return the step that the newest version reaches, and the step of the state in it."""
    newest = shelf.newest()
    return None if newest is None else (newest.version, newest.version - newest.redo)
