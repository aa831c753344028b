"""`session.save(path)`: the model's weights, or what a script gives, whole into the output folder or not at all."""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from agent.errors import Misuse
from agent.output.files import place

WHO = "session.save(path)"


class Saver(Protocol):
    """The part of a session that this needs."""

    @property
    def output(self) -> Path: ...

    @property
    def leader(self) -> bool: ...

    @property
    def objects(self) -> Mapping[str, Any]: ...


def save(session: Saver, path: str | os.PathLike[str], thing: object = None) -> Path:
    """Write the weights of the model, or `thing`, as torch does; once, whoever repeats the step.

    Every worker calls it alike: where each has only its own layers, all of them are asked for theirs. The one that leads
    writes. Returns where the file is then, or would be.
    """
    target = place(session.output, path, WHO)
    state = _state_of(session, thing)
    if session.leader:
        write(target, state)
    return target


def _state_of(session: Saver, thing: object) -> Any:
    """What torch is given to save: of the model the tensors alone, so that they can be loaded without its code."""
    if thing is not None:
        return thing.state_dict() if hasattr(thing, "state_dict") else thing
    models = {k: v for k, v in session.objects.items() if isinstance(v, torch.nn.Module)}
    states = {name: model.state_dict() for name, model in models.items()}
    return next(iter(states.values())) if len(states) == 1 else states


def write(target: Path, state: Any) -> None:
    """Beside its place, then renamed into it."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Misuse(f"{WHO}: {target.parent} cannot be made: {error.strerror}") from error
    draft = target.parent / f".{secrets.token_hex(4)}.draft"
    try:
        with draft.open("xb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(target)
    except (TypeError, AttributeError, IsADirectoryError) as error:
        raise Misuse(f"{WHO}: {target.name} cannot be written: {error}") from error
    finally:
        draft.unlink(missing_ok=True)
