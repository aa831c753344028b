"""What `down` says of steps that this machine alone has, or nobody."""

import os
import time
from types import SimpleNamespace

import msgspec
import pytest
from s3_server import S3Server
from test_watch import seen

from agent.store.archive import Archive
from agent.store.encoding.format import Manifest
from agent.store.places.objects import Retries
from agent.store.places.sinks import DiskSink
from orchestrator.cli import left_behind, status, up_down
from orchestrator.cli.command import CommandError
from orchestrator.config import Config, Manager, Storage
from orchestrator.paths import Places


def version(folder, step, redo=0, job="gpt-1", behind=0):
    """A state of this many steps, and sums that lead on."""
    archive = Archive(DiskSink(folder / job), job)
    manifest = Manifest(
        job=job, version=step, generation=archive.take_over(behind), layers=(), parts=(), redo=redo
    )
    assert archive.commit(manifest)


@pytest.fixture
def config(tmp_path):
    storage = Storage(checkpoint_url=(tmp_path / "copies").as_uri())
    return Config(manager=Manager(state_dir=str(tmp_path / "state")), storage=storage)


def said(config, **job):
    view = seen(status="CANCELLED", **{"step": 30, "ended_at_s": time.time(), **job})
    return list(left_behind.found(config, Places(config.state_dir), view).texts(config))


def test_all_of_it_is_where_it_should_be(config, tmp_path):
    """Copies are of states: the few steps behind the newest are on the disk only, as is meant."""
    version(Places(config.state_dir).checkpoints, 30, redo=4)
    version(tmp_path / "copies", 26)
    assert not said(config)


def test_a_state_that_is_on_this_machine_only(config, tmp_path):
    version(Places(config.state_dir).checkpoints, 30)
    assert "(nothing of it is there)" in said(config)[0]
    version(tmp_path / "copies", 20)
    (text,) = said(config)
    assert text.startswith("the state of gpt-1 at step 30 is not in file://")
    assert "(that of step 20 is)" in text


def test_a_store_that_does_not_answer_is_not_asked_of_each_job(config, monkeypatch):
    """It is waited for once, and said of all of them."""
    monkeypatch.setattr(Retries, "pause_s", 0.001)
    monkeypatch.setattr(Retries, "pause_s_max", 0.002)
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "REGION"):
        monkeypatch.setenv(f"AWS_{name}", "none")
    config = Config(manager=config.manager, storage=Storage(checkpoint_url="s3://bucket"))
    one = seen(step=30, ended_at_s=time.time())
    others = [msgspec.structs.replace(one.jobs[0], id=f"gpt-{n}") for n in (2, 3)]
    three = msgspec.structs.replace(one, jobs=(*one.jobs, *others))
    places, asked = Places(config.state_dir), list[int]()
    for job in three.jobs:
        version(places.checkpoints, 30, job=job.id)
    with S3Server() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        for view in (one, three):
            server.requests, server.refuse = 0, 10**6
            texts = list(left_behind.found(config, places, view).texts(config))
            assert ["503 Service Unavailable" in text for text in texts] == [True] * len(view.jobs)
            asked.append(server.requests)
    assert asked[0] == asked[1]


def test_steps_that_nobody_has(config, tmp_path):
    """Whoever ended earlier may have been removed since."""
    assert said(config)[0].startswith("steps 0 to 30 of gpt-1 are lost")
    version(Places(config.state_dir).checkpoints, 12)
    version(tmp_path / "copies", 12)
    assert said(config)[0].startswith("steps 12 to 30 of gpt-1 are lost")
    assert not said(config, ended_at_s=time.time() - left_behind.JUST_NOW_S - 1)


def test_steps_of_a_version_that_is_damaged(config, tmp_path):
    """What is wrong with it is said, and to look changes nothing: whoever resumes the job sets it aside."""
    checkpoints = Places(config.state_dir).checkpoints
    for place in (checkpoints, tmp_path / "copies"):
        version(place, 12)
    version(checkpoints, 30, behind=12)
    newest = max((checkpoints / "gpt-1" / "manifests").iterdir())
    newest.write_bytes(newest.read_bytes()[:-9])
    (text,) = said(config)
    assert text.startswith("steps 12 to 30 of gpt-1 are lost: version 30 is damaged: manifests/")
    assert newest.exists()


def test_what_a_manager_ends_of_again_and_again_is_said(config, monkeypatch):
    """While it is waited for, and when nobody waits any longer."""
    monkeypatch.setattr(up_down, "DOWN_S_MAX", 0.1)
    places, shown = Places(config.state_dir), list[str]()
    places.make()
    places.house.touch()
    places.broke_off.write_text("the newest snapshot is damaged")
    client = SimpleNamespace(house=lambda: SimpleNamespace(pid=os.getpid()), view=lambda: None)
    with pytest.raises(CommandError, match=r"within 0 s\. The manager: .* snapshot is damaged\."):
        up_down._wait_until_gone(client, places, None, shown.append)
    places.remove_links()
    assert "again and again: the newest snapshot is damaged" in shown[0]


def test_a_place_that_does_not_answer_is_said_while_it_holds_everything_up(config, monkeypatch):
    """As a cloud that is off in the settings; a person would take `down` for slow."""
    monkeypatch.setattr(up_down, "DOWN_S_MAX", 0.1)
    places, shown = Places(config.state_dir), list[str]()
    places.make()
    places.house.touch()
    line = "aws/us-east-1 does not answer: aws is off in the settings"
    view = msgspec.structs.replace(seen(), costly=(line,))
    client = SimpleNamespace(house=lambda: SimpleNamespace(pid=os.getpid()), view=lambda: view)
    with pytest.raises(CommandError, match=rf"within 0 s\. {line}\. Look with"):
        up_down._wait_until_gone(client, places, None, shown.append)
    places.remove_links()
    assert shown[0] == line
    assert line in [str(part) for part in status.seen(view, places, None)]
