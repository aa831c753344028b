"""A notebook does what the command line does, with values in place of lines."""

import json

import pytest

from orchestrator import Client
from orchestrator.client import NotRunning
from orchestrator.errors import OrchestratorError
from orchestrator.history.reader import History
from orchestrator.wishes import Refused

pytestmark = pytest.mark.processes
WAITS = "import time\nprint('wait')\n"


def test_without_a_manager_it_says_how_to_start_one(shell):
    with pytest.raises(NotRunning, match="orchestrator up"):
        Client(manager__state_dir=shell.places.state_dir)


def test_a_notebook_submits_waits_streams_and_changes(housed, monkeypatch, tmp_path):
    """One house for all of it: the job is one of the command line too, and refusals are its sentences."""
    monkeypatch.chdir(housed.folder)
    client = Client()
    done = client.submit(housed.script("quick.py"), "--lr", "0.1", budget_usd=3.0, slots_max=2)
    shown = list(done.stream())
    assert (shown[-1].status, shown[-1].budget_usd) == ("SUCCEEDED", 3.0)
    assert shown[-1].argv == ("--lr", "0.1")
    assert done.wait(1.0).step == 8
    assert done.logs() == ["hello from the script"] * len(done.logs())
    assert housed("status", done.id, "--json").json["job"]["id"] == done.id
    assert (done.metrics(), done.checkpoints()) == ({"step": []}, [])
    with pytest.raises(Refused, match="has not stored step 3, or not any more; there are: none"):
        done.resume_from(3)
    with pytest.raises(Refused, match="has ended already"):
        done.cancel()

    going = client.submit(housed.script("waits.py", WAITS))
    assert client.job().id == going.id
    with pytest.raises(TimeoutError, match=f"{going.id} has not ended within 0 s"):
        going.wait(0.0)
    going.change(budget_usd=7.0)
    assert next(now for now in going.stream() if now.budget_usd == 7.0)
    going.cancel()
    assert going.wait(60.0).status == "CANCELLED"
    with pytest.raises(OrchestratorError, match="no such file"):
        client.submit("nothing.py")
    assert {done.id, going.id} <= {job.id for job in client.jobs()}

    settings = tmp_path / "other.toml"
    settings.write_text(
        f"[manager]\nstate_dir = '{housed.places.state_dir}'\n[job]\nmax_preemptions = 7\n"
    )
    theirs = Client(settings, job__slots_max=3, budget__on_demand_allowed=True).submit(
        housed.folder / "waits.py", "--steps", 500, "--lr", 1e-3, max_failures=2, exact=False
    )
    kept = next(spec for spec in submitted_to(housed) if spec["job"] == theirs.id)
    assert (kept["max_preemptions"], kept["slots_max"], kept["max_failures"]) == (7, 3, 2)
    assert (kept["exact"], kept["argv"]) == (False, ["--steps", "500", "--lr", "0.001"])
    theirs.cancel()
    with pytest.raises(OrchestratorError, match="an amount in US dollars"):
        client.submit(housed.folder / "waits.py", budget_usd=-1.0)
    with pytest.raises(OrchestratorError, match="at most 3,650 days from now"):
        client.submit(housed.folder / "waits.py", deadline_s=float("inf"))


def submitted_to(housed):
    """The orders in the manager's journal."""
    rows = (json.loads(row[b"e"]) for _, row in housed.client()._redis.xrange("orch:journal"))
    return [event["spec"] for event in rows if event["type"] == "JobSubmitted"]


def test_the_past_is_there_as_data(housed, monkeypatch):
    """Without a history every answer is empty; with one it is what the history says."""
    monkeypatch.chdir(housed.folder)
    client = Client()
    history = History.open(housed.places)
    assert client.cost("job") == history.money(by="job")
    assert client.events() == history.events()
    found = client.footprint(last_s=60.0, points=10)
    assert len(found.at_s) == len(found.steps_per_s) == 10
