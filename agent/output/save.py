"""`session.save(path)`: write weights or an object whole into the output folder."""

import os
from collections.abc import Mapping
from pathlib import Path
from pickle import PicklingError
from typing import Any, Protocol

import torch

from agent.errors import Misuse
from agent.output.files import draft_of, place

WHO = "session.save(path)"


class Saver(Protocol):
    """The part of a session that `save` needs."""

    @property
    def output(self) -> Path: ...

    @property
    def objects(self) -> Mapping[str, Any]: ...


def save(session: Saver, path: str | os.PathLike[str], thing: object = None) -> Path:
    """Write the model's weights, or `thing`, as torch does, and return where the file is.

    Every worker must call it alike, because if each has only its own layers, all are asked for
    theirs. Each writes, and the storage keeps one: a file of the leader alone would be lost with
    it, as a committed step is not done again.
    """
    target = place(session.output, path, WHO)
    write(target, _state_of(session, thing))
    return target


def _state_of(session: Saver, thing: object) -> Any:
    """Return what torch shall save: a model's tensors alone, so that loading needs no code."""
    if thing is not None:
        return thing.state_dict() if hasattr(thing, "state_dict") else thing
    models = {k: v for k, v in session.objects.items() if isinstance(v, torch.nn.Module)}
    states = {name: model.state_dict() for name, model in models.items()}
    return next(iter(states.values())) if len(states) == 1 else states


def write(target: Path, state: Any) -> None:
    """Write beside the target, then rename into its place."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Misuse(f"{WHO}: {target.parent} cannot be made: {error.strerror}") from error
    try:
        with draft_of(target) as draft:
            with draft.open("xb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(target)
    except (TypeError, AttributeError, PicklingError, IsADirectoryError) as error:
        raise Misuse(f"{WHO}: {target.name} cannot be written: {error}") from error
