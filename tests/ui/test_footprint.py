"""The first line and the footprint over time: the numbers, and what a person sees of them."""

import gzip
from importlib.resources import files
from itertools import pairwise
from math import isnan

import httpx
import msgspec
import pytest
from msgspec.structs import replace
from past_hour import LIVE, PAST_S, T0, write_past

from orchestrator.dashboard.comparison import compared
from orchestrator.dashboard.past import (
    POOLS_SHOWN_MAX,
    Asked,
    counted_at,
    curves,
    footprint,
    held_at,
)
from orchestrator.dashboard.summary import summary_of
from orchestrator.history import store
from orchestrator.history.reader import History
from orchestrator.history.records import Point
from orchestrator.paths import Places

DRAWN = f"{LIVE} && document.querySelectorAll('#footprint canvas').length == 3"
PAGE_BYTES_MAX = 150_000


@pytest.fixture
def page(page):
    page.wait_for(DRAWN)
    return page


@pytest.fixture
def past(tmp_path):
    write_past(Places(tmp_path))
    return History.open(Places(tmp_path))


def point(at_s: float, last: float) -> Point:
    return Point(at_s=at_s, mean=last, least=last, most=last, last=last)


# --- the first line ------------------------------------------------------------------------------


def test_the_summary_is_the_ledger_and_two_paces(make):
    """What is spent and reserved comes from the ledger as it is; what is to come lies between the pace now and the mean."""
    view = make.view(jobs=(make.job(steps_lost=12),))
    said = summary_of(view)
    assert (said.spent_usd, said.committed_usd, said.saved_usd) == (0.2451, 0.0312, 0.4969)
    assert said.left_usd == pytest.approx(5.0 - 0.2451 - 0.0312)
    assert said.work_usd == pytest.approx(1000 * 0.1556 * 0.231 / 3600)
    assert said.work_mean_usd == pytest.approx(1000 * 0.184 / 2412)
    assert (said.lost_steps, said.lost_s) == (12, pytest.approx(12 * 0.231))
    assert said.lost_usd == pytest.approx(12 * 0.184 / 2412)
    left = 4000 - 2412
    assert said.finish_s.least == pytest.approx(T0 + left * 0.231)
    assert said.finish_s.most == pytest.approx(T0 + left * 640 / 2412)
    assert said.final_usd.least == pytest.approx(0.2451 + left * 0.1556 * 0.231 / 3600)
    assert said.final_usd.most == pytest.approx(0.2451 + left * 0.184 / 2412)


def test_the_paces_of_a_job_are_those_of_its_own_steps(make):
    """One that goes on from another's step 2,400 has done 12, and would be done at once if all counted as its own."""
    said = summary_of(make.view(jobs=(make.job(begun_step=2_400, steps_lost=3),)))
    left = 4000 - 2412
    assert said.finish_s.least == pytest.approx(T0 + left * 0.231)
    assert said.finish_s.most == pytest.approx(T0 + left * 640 / 12)
    assert said.work_mean_usd == pytest.approx(1000 * 0.184 / 12)
    assert said.lost_usd == pytest.approx(3 * 0.184 / 12)
    fresh = summary_of(make.view(jobs=(make.job(begun_step=2_412),)))
    assert (fresh.finish_s, fresh.final_usd) == (None, None)


def test_what_cannot_be_known_is_not_guessed(make):
    """A job that boots has no pace, so the end of all is unknown; without a job there is no end, and the cost stays."""
    booting = make.job(id="other", status="PROVISIONING", step_s=0.0, step=0, steps_total=0)
    said = summary_of(make.view(jobs=(make.job(), booting)))
    assert (said.finish_s, said.final_usd) == (None, None)
    assert said.work_of == "gpt-7f3a"
    idle = summary_of(make.view(jobs=()))
    assert (idle.finish_s, idle.work_usd, idle.final_usd.least) == (None, None, 0.2451)
    free = make.view()
    assert summary_of(replace(free, cost=replace(free.cost, budget_usd=None))).left_usd is None


# --- the history on one grid ---------------------------------------------------------------------


def test_a_value_holds_until_the_next_one():
    found = held_at([point(10, 1.0), point(20, 3.0)], [5, 10, 15, 20, 99])
    assert found[1:] == [1.0, 1.0, 3.0, 3.0]
    assert isnan(found[0])


def test_a_count_grows_between_points_and_stands_where_none_are():
    """A value that does not change is not kept, so a gap is a pause and no slow growth."""
    found = counted_at(
        [point(0, 0), point(10, 10), point(20, 20), point(60, 30)], [0, 5, 20, 40, 50, 55, 60]
    )
    assert found == [0, 5, 20, 20, 20, 25, 30]
    assert all(map(isnan, counted_at([], [1, 2])))


def test_a_count_that_nobody_kept_for_a_while_grew_meanwhile():
    """All steps of an hour without a history were shown as done in its last ten seconds."""
    points = [point(0, 0), point(10, 10), point(20, 20), point(3620, 3620), point(3630, 3630)]
    assert counted_at(points, [20, 1820, 3620]) == [20, 1820, 3620]


def test_the_footprint_is_what_the_history_says(past):
    """Machines by pool and market, the pace with its pause, cost of work, layouts and marks of the whole hour."""
    found = footprint(past, Asked(), 361)
    assert (found.from_s, found.to_s, len(found.at_s)) == (T0 - PAST_S, T0, 361)
    small, large = found.held
    assert (small.pool, small.machines[0], small.machines[-1]) == (
        "local/local-a/local.small/spot",
        2,
        1,
    )
    assert (large.machines[0], large.machines[-1]) == (0, 1)
    assert found.steps_per_s[100] == pytest.approx(1.0)
    assert found.steps_per_s[200] is None, "the training stood still"
    assert found.work_usd[100] == pytest.approx(1000 * 0.12 / 3600)
    assert found.work_usd[200] is None
    assert [shape.label for shape in found.shapes] == ["1x3", "1x2"]
    assert found.shapes[0].to_s == found.shapes[1].from_s == T0 - 1800
    assert [mark.kind for mark in found.marks] == ["notice", "eviction", "layout", "checkpoint"]


def remember(file, *jobs) -> None:
    for job in jobs:
        row = (job.id, job.status, job.submitted_at_s, job.ended_at_s, msgspec.json.encode(job))
        file.execute("INSERT OR REPLACE INTO jobs VALUES (?, ?, ?, ?, ?)", row)


def test_steps_that_another_job_has_done_are_nobodys_pace(past, make, tmp_path):
    """A job that goes on from step 5,000 is at no step before its first one, and then at 5,001."""
    before = footprint(past, Asked(), 361).steps_per_s
    file = store.writing(tmp_path / "history.db")
    remember(file, make.job(id="branch", step=5_100, begun_step=5_000, submitted_at_s=T0 - 3600))
    write(file, 90, "job/branch/step", {0: 0, 600: 0, 610: 5_001, 1600: 5_100})
    file.close()
    found = footprint(past, Asked(), 361).steps_per_s
    assert max(filter(None, found)) < 2 * max(filter(None, before))
    done = 10 * (sum(filter(None, found)) - sum(filter(None, before)))
    assert done == pytest.approx(100, abs=1)
    (one,) = (each for each in past.jobs() if each.id == "branch")
    assert compared(past, one).usd_per_1000_steps == pytest.approx(1000 * 0.184 / 100)


def test_jobs_that_wait_take_no_place_from_one_that_trains(past, make, tmp_path):
    """Twenty newer ones did, so the chart of steps was empty while money was spent on them."""
    before = footprint(past, Asked(), 361).steps_per_s
    file = store.writing(tmp_path / "history.db")
    remember(file, make.job(step=3_000, submitted_at_s=T0 - 3600))
    waiting = (
        make.job(id=f"w-{n}", step=0, status="PENDING", submitted_at_s=T0 - n) for n in range(300)
    )
    remember(file, *waiting)
    file.close()
    found = footprint(past, Asked(), 361)
    assert found.steps_per_s == before
    assert [shape.label for shape in found.shapes] == ["1x3", "1x2"]


def test_any_time_can_be_asked_for(past):
    """The last minutes, a part in the middle, more than is known, and a time before all of it."""
    assert footprint(past, Asked(last_s=600), 60).from_s == T0 - 600
    part = footprint(past, Asked(from_s=T0 - 2000, to_s=T0 - 1700), 60)
    assert (part.from_s, part.to_s) == (T0 - 2000, T0 - 1700)
    assert [mark.kind for mark in part.marks] == ["notice", "eviction", "layout"]
    assert footprint(past, Asked(from_s=0, to_s=1e10), 60).to_s == T0
    assert footprint(past, Asked(from_s=0, to_s=1), 60).from_s == T0 - PAST_S


def test_a_curve_is_the_loss_over_steps_and_a_job_that_goes_back_draws_no_loop(past, tmp_path):
    """The whole life of a job, also before the page was opened; of a step that was done twice, the last time."""
    found = curves(past, ["gpt-7f3a", "nobody"], ["local/local-a/local.small", "nowhere"])
    (points,) = found.losses.values()
    assert points[0] == pytest.approx((0.0, 6.0), abs=20)
    assert points[-1][0] == pytest.approx(3000, abs=60)
    assert all(a[0] < b[0] and a[1] > b[1] for a, b in pairwise(points))
    assert list(found.prices) == ["local/local-a/local.small"]
    file = store.writing(tmp_path / "history.db")
    write(file, 90, "job/back/step", {0: 10, 60: 20, 120: 15, 180: 25})
    write(file, 91, "job/back/loss", {0: 5.0, 60: 4.0, 120: 4.5, 180: 3.0})
    file.close()
    assert curves(past, ["back"], []).losses == {"back": [(10, 5.0), (15, 4.5), (25, 3.0)]}


def write(file, number: int, name: str, values: dict[int, float]) -> None:
    file.execute("INSERT INTO series VALUES (?, ?, ?, ?)", (number, name, T0 - 3600, T0))
    for tier in range(len(store.TIERS)):
        for s, value in values.items():
            row = (number, tier, int(T0) - 3600 + s, *[float(value)] * 4)
            file.execute("INSERT INTO points VALUES (?, ?, ?, 1, ?, ?, ?, ?)", row)


def test_before_there_is_a_history_the_footprint_is_empty(tmp_path):
    found = footprint(History.open(Places(tmp_path)), Asked(last_s=60), 10)
    assert (found.held, found.marks, found.shapes, found.first_s) == ([], [], [], found.last_s)


def test_many_pools_are_a_few_bands(tmp_path):
    """Those held most by name, all others together, and nothing is left out of the sum."""
    places = Places(tmp_path)
    file = store.writing(places.history)
    for number in range(30):
        file.execute(
            "INSERT INTO series VALUES (?, ?, ?, ?)",
            (number, f"held/cloud/z/{number:02}/spot", T0, T0 + 100),
        )
        for tier in range(len(store.TIERS)):
            file.execute(
                "INSERT INTO points VALUES (?, ?, ?, 1, ?, ?, ?, ?)",
                (number, tier, int(T0), *[float(number)] * 4),
            )
    file.close()
    found = footprint(History.open(places), Asked(), 5)
    assert len(found.held) == POOLS_SHOWN_MAX + 1
    assert found.held[-1].pool == "others"
    assert sum(band.machines[0] for band in found.held) == sum(range(30))


# --- on the page ---------------------------------------------------------------------------------


def test_the_page_draws_the_footprint_and_says_why_on_hover(page):
    """Three charts with one time; the tip has the machines and the sentences of the marks under the pointer."""
    page.run(
        "{ const over = document.querySelector('.u-over'), at = over.getBoundingClientRect();"
        "over.dispatchEvent(new MouseEvent('mousemove', { bubbles: true, clientX: at.left + at.width / 2, clientY: at.top + 20 })); }"
    )
    page.wait_for("!document.querySelector('#tip').hidden")
    tip = page.run("document.querySelector('#tip').innerText")
    assert "2 \u00d7 local/local-a/local.small/spot" in tip
    assert "m-73aa is gone: as announced 120 s before" in tip
    assert "one worker of three is gone" in tip
    assert page.complaints == []


def test_the_page_zooms_moves_and_comes_back(page):
    """By the keyboard as by the buttons; the marks in the time shown are a list, too."""
    marks = "document.querySelector('#marks-count').innerText"
    assert page.run(marks) == "4 marks"
    card = "document.querySelector('#footprint-card')"
    press = card + ".dispatchEvent(new KeyboardEvent('keydown', {{ key: '{}', cancelable: true }}))"
    for keys, count in (
        (["+", "+"], "3 marks"),
        (["ArrowRight"], "4 marks"),
        (["ArrowLeft"] * 4, "0 marks"),
        (["Home"], "4 marks"),
    ):
        for key in keys:
            page.run(press.format(key))
        page.wait_for(f"{marks} == '{count}'")
    page.run("[...document.querySelectorAll('#ranges button')][0].click()")
    page.wait_for(f"{marks} == '0 marks'")
    assert page.run("document.querySelectorAll('#ranges [aria-pressed=true]').length") == 1


def test_a_link_leads_to_a_moment(page, house):
    """Its time is shown with what is around it, what happened then stands out, and one press leads back."""
    page.open("about:blank")
    page.open(f"{house.link}&t={T0 - 1800:.3f}")
    page.wait_for("document.querySelectorAll('#marks .here').length == 2")
    assert page.run("document.querySelector('#marks-box').open")
    assert page.run("location.hash") == f"#t={T0 - 1800:.3f}"
    page.run("document.querySelector('#moment-leave').click()")
    page.wait_for("document.querySelector('#moment').hidden && !location.hash")


def test_the_whole_page_is_small():
    """Everything that a browser loads, compressed as it would be sent through a tunnel that does."""
    shown = [
        file.read_bytes() for file in files("orchestrator.dashboard").joinpath("static").iterdir()
    ]
    assert sum(len(gzip.compress(content)) for content in shown) <= PAGE_BYTES_MAX


def test_what_is_asked_for_is_bounded(house):
    headers = {"Authorization": f"Bearer {house.key}"}
    with httpx.Client(base_url=house.url, headers=headers) as client:
        for words in (
            {"points": 1},
            {"points": 100_000},
            {"from_s": -1},
            {"from_s": "nan"},
            {"last_s": 0},
        ):
            assert client.get("/api/footprint", params=words).status_code == 422, words
