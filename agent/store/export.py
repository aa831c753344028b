"""Export a stored version for other tools: a plain `state_dict`, or a torch checkpoint.

weights      one object's tensors under the names of its state_dict: `.safetensors`, or `.pt` for
             `torch.load(path, weights_only=True)`
to_torch     a folder for `torch.distributed.checkpoint`: every module under its name, and every
             optimizer as `{"state": {parameter: {...}}, "param_groups": [...]}`, by parameter name

    python -m agent.store.export .orchestrator/checkpoints/JOB model.pt   (or a URL; or a folder)
"""

import argparse
import fcntl
import json
import os
import re
import shutil
import sys
import tempfile
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as torch_save_checkpoint

from agent.errors import CheckpointError
from agent.store.archive import TRIES, Archive, Mark
from agent.store.encoding import values
from agent.store.encoding.format import REST, Manifest
from agent.store.encoding.plain import described, is_packed
from agent.store.errors import Damaged
from agent.store.layers import memory_of
from agent.store.places.objects import open_sink
from agent.store.places.sinks import Sink
from agent.store.reading import Index, Want, read
from agent.tensors.shards import DTYPES_BY_NAME

METADATA = ".metadata"  # torch's own name; it reads no folder without it
ERRNO = re.compile(r"(?:Errno|os error) (\d+)")
PROBE_BYTES = 1 << 20
PROBES = 64  # what a writer wants at once may be more than one


def weights(sink: Sink, manifest: Manifest, name: str = "model") -> dict[str, torch.Tensor]:
    """Return the tensors of one module; tied ones share their memory."""
    tensors = _tensors(sink, manifest, f"{name}/")
    if not tensors:
        raise CheckpointError(
            f"version {manifest.version} of {manifest.job} holds no object named {name}"
        )
    return {key.removeprefix(f"{name}/"): tensor for key, tensor in tensors.items()}


def save_weights(path: Path, sink: Sink, manifest: Manifest, name: str = "model") -> None:
    """Write one module's weights in the form that the file's suffix names."""
    found = weights(sink, manifest, name)
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    with _written_whole(path, path.parent, draft):
        if path.suffix == ".safetensors":
            from safetensors.torch import save_file

            save_file({key: tensor.clone() for key, tensor in found.items()}, draft)
        else:
            torch.save(found, draft)
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(path)


def to_torch(folder: Path, sink: Sink, manifest: Manifest) -> None:
    """Write the whole state as a checkpoint of torch.distributed, or leave what was there."""
    state, draft = nested(sink, manifest), folder / f".{uuid.uuid4().hex[:8]}"
    with _written_whole(folder, folder, draft):
        with warnings.catch_warnings():
            # torch warns that there is no process group, which is what `no_dist` says.
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            torch_save_checkpoint(state, checkpoint_id=draft, no_dist=True)
        with _alone_in(folder):  # or one writer's data would be under another writer's names
            (folder / METADATA).unlink(missing_ok=True)  # without it nothing here is a checkpoint
            for path in sorted(draft.iterdir(), key=lambda path: path.name == METADATA):
                path.replace(folder / path.name)


@contextmanager
def _written_whole(out: Path, folder: Path, draft: Path) -> Iterator[None]:
    """Remove the draft and, after a failure, new folders; raise the failure in one line."""
    new = [at for at in (folder, *folder.parents) if not at.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except (Exception, CheckpointException) as error:  # each library has errors of its own
        # Determine the reason while there is as little room as the writer had.
        raise CheckpointError(f"{out}: {_why(error, folder)}") from error
    finally:
        _removed(draft)
        for at in new:
            with suppress(OSError):  # something is in it
                at.rmdir()


def _removed(draft: Path) -> None:
    shutil.rmtree(draft, ignore_errors=True)
    with suppress(OSError):  # its folder does not exist
        draft.unlink(missing_ok=True)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Lock a folder, so that in the end only the last writer's files are there."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # not every file system can
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _why(error: BaseException, folder: Path) -> str:
    """Return the system's error; torch's writer hides it, so writing to the folder is tried."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = str(error).strip().splitlines()[-1]
    if (found := ERRNO.search(text)) is not None:
        return os.strerror(int(found[1]))
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            for _ in range(PROBES):
                probe.write(bytes(PROBE_BYTES))
                probe.flush()
    except OSError as refused:
        return refused.strerror or text
    return text


def nested(sink: Sink, manifest: Manifest) -> dict[str, Any]:
    """Return the state as nested mappings, named by parameter."""
    tensors = _tensors(sink, manifest, "")
    content = {layer.name: json.loads(layer.values) for layer in manifest.state}
    rest = content.pop(REST, {})

    def tensor_of(name: str, _: object) -> torch.Tensor:
        return tensors[name]

    states = {key: values.fill(value, tensor_of) for key, value in rest.items()}
    found: dict[str, Any] = {
        key: described(state) if is_packed(state) else state for key, state in states.items()
    }
    for layer in content.values():
        for path, value in layer.items():
            if "state" in value:
                name, _, parameter = path.partition("/")
                one = found.setdefault(name, {"state": {}, "param_groups": []})
                one["state"][parameter] = values.fill(value["state"], tensor_of)
                settings = values.fill(layer[value["settings"]], tensor_of)
                _join_group(one["param_groups"], parameter, settings)
    others = set(found)
    for path, tensor in tensors.items():
        name, _, key = path.partition("/")
        if name not in others:
            found.setdefault(name, {})[key] = tensor
    return found


def _join_group(groups: list[dict[str, Any]], parameter: str, settings: dict[str, Any]) -> None:
    for group in groups:
        if all(_same(group[key], value) for key, value in settings.items()):
            group["params"].append(parameter)
            return
    groups.append({"params": [parameter], **settings})


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _tensors(sink: Sink, manifest: Manifest, prefix: str) -> dict[str, torch.Tensor]:
    """Read the tensors whose names begin with `prefix`.

    A tensor that two objects share lies under the name that it has in the first.
    """
    index, found, wants = Index(manifest.state), dict[str, torch.Tensor](), list[Want]()
    aliases = {
        alias: name
        for layer in manifest.state
        for alias, name in layer.aliases
        if alias.startswith(prefix)
    }
    shared = {*aliases.values()}
    for layer in manifest.state:
        for entry in layer.tensors:
            if entry.name.startswith(prefix) or entry.name in shared:
                tensor = torch.empty(entry.shape, dtype=DTYPES_BY_NAME[entry.dtype])
                found[entry.name] = tensor
                wants.append(index.want(entry.name, memory_of(tensor)))
    read(sink, manifest, wants)
    found |= {alias: found[name] for alias, name in aliases.items() if name in found}
    return {name: tensor for name, tensor in found.items() if name.startswith(prefix)}


def _written(archive: Archive, out: Path) -> Manifest:
    """Write the newest version that can be read to its end.

    A running job may delete a version while it is read; then there is a newer one.
    """
    write = save_weights if out.suffix in (".pt", ".safetensors") else to_torch
    for _ in range(TRIES):
        manifest = _newest(archive)
        try:
            write(out, archive.sink, manifest)
        except Damaged as error:
            archive.set_aside(Mark(manifest.version, manifest.generation), str(error))
        else:
            return manifest
    raise CheckpointError(f"{archive.sink.name}: {TRIES} versions could not be read")


def _newest(archive: Archive) -> Manifest:
    manifest = archive.newest()
    if manifest is None:
        raise CheckpointError(f"{archive.sink.name}: no version of a job lies there")
    return manifest


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m agent.store.export", description="Write a job's newest version for others."
    )
    parser.add_argument(
        "job", help="the folder or URL of a job's versions; its last word is the job"
    )
    parser.add_argument("out", type=Path, help="a file .pt or .safetensors, or a folder for torch")
    options = parser.parse_args()
    place = str(options.job).rstrip("/")
    try:
        archive = Archive(open_sink(place), place.rpartition("/")[2], ours=False)
        manifest = _written(archive, options.out)
    except CheckpointError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    if sys.stdout is None:  # closed
        return 0
    try:
        sys.stdout.write(f"version {manifest.version - manifest.redo} is in {options.out}\n")
        sys.stdout.flush()
    except OSError:  # the reader of stdout is gone; the file is written nevertheless
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
