"""What a person looks into: checkpoints to go on from, a step as predicted and as it was, two jobs side by side."""

import httpx
import msgspec
import pytest

from agent.layout import Layout, Replica
from agent.schedule import Kind
from agent.timeline import Moment, Timeline
from orchestrator.client import Checkpoint
from orchestrator.dashboard.api import ENTRIES_MAX
from orchestrator.dashboard.measured import step_of
from orchestrator.events import JobBranched
from orchestrator.history import store

BODY = "document.querySelector('#study-body').innerText"
AT_S = 1_790_000_000.0


def timeline(step: int) -> Timeline:
    """A step of two workers, four microbatches and one reduction each."""
    workers = ("gpt-7f3a-w-1", "gpt-7f3a-w-2")
    moments = {
        name: (
            Moment(Kind.FORWARD, 0, first, 0.0, 0.1),
            Moment(Kind.BACKWARD, 0, first, 0.1, 0.3),
            Moment(Kind.REDUCE, 0, 0, 0.3, 0.35 + 0.01 * first),
        )
        for first, name in enumerate(workers)
    }
    replicas = tuple(
        Replica(workers=(name,), first=first, count=1) for first, name in enumerate(workers)
    )
    return Timeline(
        job="gpt-7f3a",
        step=step,
        at_s=AT_S,
        layout=Layout(generation=9, microbatches=2, replicas=replicas),
        cuts=(),
        workers=moments,
    )


def checkpoint(step: int) -> Checkpoint:
    return Checkpoint(
        step=step, at_s=AT_S, state_bytes=1_500_000, uri=f"file:///checkpoints/gpt-7f3a#{step}"
    )


def press(page, name: str) -> None:
    page.run(
        f"[...document.querySelectorAll('button')].find(x => x.innerText == {name!r} && x.checkVisibility()).click()"
    )


def test_a_new_job_is_begun_from_a_checkpoint(page, house):
    """The list says what is stored; the press of its button says first what the new job would do and cost."""
    house.source.stored = [checkpoint(2400), checkpoint(2180)]
    press(page, "Checkpoints")
    page.wait_for(f"{BODY}.includes('2,180')")
    assert "1.5 MB" in page.run(BODY)
    page.run("[...document.querySelectorAll('#study-body button')].at(-1).click()")
    would = "document.querySelector('#change-would').innerText"
    page.wait_for(f"{would}.includes('goes on from step 2,180 with the same script')")
    assert "up to $1.00, apart from what this job has spent" in page.run(would)
    assert house.source.posted == []
    press(page, "Begin the new job")
    page.wait_for("!document.querySelector('#change').open")
    [event] = house.source.posted
    assert isinstance(event, JobBranched)
    assert (event.job, event.step, event.from_url) == (
        "gpt-7f3a",
        2180,
        "file:///checkpoints/gpt-7f3a#2180",
    )
    assert event.name.startswith("gpt-")
    assert event.name != "gpt-7f3a"
    assert page.complaints == []


def test_a_step_that_is_not_stored_is_refused_with_those_that_are(house):
    house.source.stored = [checkpoint(2400)]
    with httpx.Client(
        base_url=house.url, headers={"Authorization": f"Bearer {house.key}"}
    ) as client:
        answer = client.post("/api/jobs/gpt-7f3a/resume-from", json={"step": 7})
    assert (answer.status_code, house.source.posted) == (409, [])
    assert answer.json()["error"].endswith("there are: 2,400")


def test_a_step_is_recorded_and_drawn(page, house):
    """Before there is one the page says so; a press has the next step recorded, and shows it when it is there."""
    press(page, "A step")
    page.wait_for("document.querySelector('#study-note').innerText == 'No step was recorded yet.'")
    page.complaints.clear()  # the browser notes the 404
    press(page, "Record a step")
    page.wait_for("document.querySelector('#study-note').innerText.includes('is recorded')")
    assert house.source.asked == ["gpt-7f3a"]
    house.source.recorded = timeline(2413)
    page.wait_for("document.querySelectorAll('#study-body rect').length == 6")
    assert page.run(BODY).splitlines()[-1].startswith("0 to 360 ms")
    label = page.run("document.querySelector('#study-body svg').getAttribute('aria-label')")
    assert label == "measured: 360 ms, 2 workers"
    title = page.run("document.querySelectorAll('#study-body rect title')[2].textContent")
    assert title == "backward, stage 1, microbatch 0: 100 ms to 300 ms"


def test_a_step_of_many_workers_is_bounded():
    wide = timeline(1)
    moments = tuple(Moment(Kind.FORWARD, 0, n, n / 10, n / 10 + 0.1) for n in range(9_000))
    found = step_of(msgspec.structs.replace(wide, workers={"gpt-7f3a-w-1": moments}), None)
    (panel,) = found.panels
    assert (len(panel.bars), panel.left_out) == (4_000, 5_000)
    assert panel.took_s == pytest.approx(900.0)


def remember(places, *jobs) -> None:
    file = store.writing(places.history)
    with store.turn(file):
        for job in jobs:
            row = (job.id, job.status, job.submitted_at_s, job.ended_at_s, msgspec.json.encode(job))
            file.execute("INSERT OR REPLACE INTO jobs VALUES (?, ?, ?, ?, ?)", row)
    file.close()


def test_a_cause_of_money_is_a_link_to_the_lines_that_it_consists_of(page):
    """By keyboard or address: the dearest first, adding up; closing it leaves the address as it was."""
    page.wait_for("document.querySelectorAll('#money a').length == 4")
    page.run("document.querySelector('#money a').focus()")
    page.run("document.activeElement.click()")
    page.wait_for(f"{BODY}.includes('m-88e0')")
    assert page.run("location.hash") == "#of=useful"
    note = page.run("document.querySelector('#study-note').innerText")
    assert note == "$0.170 in all, a line for each machine and job."
    rows = page.run(
        "[...document.querySelectorAll('#study-body tbody tr')].map(row => [...row.cells].map(cell => cell.innerText))"
    )
    assert [(cells[0].splitlines()[0], cells[2:]) for cells in rows] == [
        ("m-19c2", ["gpt-7f3a", "1 h 0 min", "$0.128"]),
        ("m-88e0", ["gpt-7f3a", "48 min 0 s", "$0.042"]),
    ]
    assert rows[0][0].endswith("still held")
    assert rows[1][0].endswith("for 50 min 0 s")
    page.run("document.querySelector('#study').close()")
    page.wait_for("location.hash == ''")
    page.run("location.hash = 'of=nothing'")
    page.wait_for("document.querySelector('#study-note').innerText.includes('other')")
    page.complaints.clear()  # the browser notes the 422


def test_the_lines_of_a_cause_are_bounded_and_say_what_is_left_out(house):
    file = store.writing(house.places.history)
    with store.turn(file):
        for at in range(ENTRIES_MAX):
            row = (f"more-{at}", "gpt-7f3a", "useful", 0.001, 0.1)
            file.execute("INSERT INTO charges VALUES (?, ?, ?, ?, ?)", row)
    file.close()
    headers = {"Authorization": f"Bearer {house.key}"}
    with httpx.Client(base_url=house.url, headers=headers) as client:
        many = client.get("/api/money/useful").json()
        few = client.get("/api/money/useful", params={"job": "nobody"}).json()
        unknown = client.get("/api/money/nothing")
    assert (len(many["entries"]), many["more"], many["usd"]) == (ENTRIES_MAX, True, 0.17)
    dearest = [one["usd"] for one in many["entries"]]
    assert dearest[:3] == [0.128, 0.042, 0.001]
    assert few == {"cause": "useful", "usd": 0, "entries": [], "more": False}
    assert unknown.status_code == 422


def test_two_jobs_stand_side_by_side(page, house, make):
    remember(house.places, *house.source.now.jobs)
    press(page, "Compare")
    page.wait_for(f"{BODY}.includes('Machines taken away')")
    rows = page.run(
        "[...document.querySelectorAll('#study-body tr')].map(row => [...row.cells].map(cell => cell.innerText))"
    )
    shown = {name: cells for name, *cells in rows}
    assert shown[""] == ["gpt-7f3a", "mlp-02cc"]
    assert shown["Steps"] == ["2,412", "500"]
    assert shown["Spent"] == ["$0.184", "$0.061"]
    assert shown["useful"] == ["$0.170", "\N{EN DASH}"]
    assert page.run("document.querySelectorAll('#study-body .losses path').length") == 2
    assert page.complaints == []


def test_a_job_that_the_history_does_not_know_is_said(house):
    with httpx.Client(
        base_url=house.url, headers={"Authorization": f"Bearer {house.key}"}
    ) as client:
        answer = client.get("/api/compare", params={"job": ["gpt-7f3a", "nobody"]})
        alone = client.get("/api/compare", params={"job": "gpt-7f3a"})
    assert (answer.status_code, alone.status_code) == (404, 422)
    assert answer.json()["error"] == "The history has no job nobody."
