"""Small states as the keeper holds them."""

from pathlib import Path

import torch

from agent.keeper.storage.backup import Backup, LoggedSum, Saved
from agent.keeper.storage.offsite import Storage
from agent.keeper.storage.vault import Place, Vault
from agent.messages import JobOrder, Report
from agent.store.archive import Archive
from agent.store.layers import LiveLayer, collect
from agent.store.places.sinks import DiskSink


def held(objects: dict[str, object], version: int) -> Backup:
    """What the keeper would hold of these objects."""
    live: list[LiveLayer] = collect(objects).finish()  # type: ignore[arg-type]
    bodies = {
        layer.form.name: memoryview(bytearray().join(layer.pieces(0, layer.form.layer_bytes)))
        for layer in live
    }
    forms = tuple(layer.form for layer in live)
    return Backup(generation=1, version=version, layers=forms, bodies=bodies)


def saved(version: int, redo: int = 0) -> Saved:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU(), torch.nn.Linear(2, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(version)
    sums = tuple(LoggedSum(version + n, b"\1", memoryview(bytes([n] * 100))) for n in range(redo))
    return Saved(held({"model": model}, version), sums)


def same(one: Saved | None, other: Saved) -> bool:
    assert one is not None
    bodies = {name: bytes(body) for name, body in one.backup.bodies.items()}
    sums = [(s.step, s.present, bytes(s.body)) for s in one.redo]
    return (
        one.reached == other.reached
        and one.backup.version == other.backup.version
        and bodies == {name: bytes(body) for name, body in other.backup.bodies.items()}
        and sums == [(s.step, s.present, bytes(s.body)) for s in other.redo]
    )


def disk(folder: Path) -> Archive:
    return Archive(DiskSink(folder), "job")


def vault_of(
    folder: Path, said: list[Report], storage: Storage | None = None, **order: object
) -> Vault:
    order = {"job": "job", "script": "train.py", "script_sha": "", **order}
    place = Place(checkpoints=folder, storage=storage)
    return Vault(JobOrder(**order), place, said.append)  # type: ignore[arg-type]
