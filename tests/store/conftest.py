"""Every sink there is, as real as this machine can have it."""

from pathlib import Path

import pytest
from memory_sink import MemorySink
from s3_server import S3Server, s3_sink

from agent.store.places.objects import ObjectSink, Retries
from agent.store.places.sinks import DiskSink

SINKS = ["memory", "disk", "object-file", "object-s3"]


@pytest.fixture
def hurried(monkeypatch):
    """Retries that do not wait long."""
    monkeypatch.setattr(Retries, "pause_s", 0.001)
    monkeypatch.setattr(Retries, "pause_s_max", 0.002)


@pytest.fixture(params=SINKS)
def sink(request, tmp_path: Path, hurried):
    """Each sink in turn."""
    if request.param == "memory":
        yield MemorySink()
    elif request.param == "disk":
        yield DiskSink(tmp_path / "disk")
    elif request.param == "object-s3":
        with S3Server() as server:
            yield s3_sink(server)
    else:
        from obstore.store import LocalStore

        (tmp_path / "objects").mkdir()
        yield ObjectSink(LocalStore(tmp_path / "objects"), request.param)


@pytest.fixture
def disk(tmp_path: Path):
    return DiskSink(tmp_path / "disk")
