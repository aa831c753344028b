"""Money and the past from the command line: what a history holds is what the commands say."""

import csv
import io
from datetime import datetime

import msgspec
import pytest

from orchestrator.cli.money.top import screen
from orchestrator.formatting import percent, usd
from orchestrator.history.outside import focus
from orchestrator.history.reader import History
from orchestrator.history.records import BYS, Happening
from orchestrator.history.writer import Writer
from orchestrator.simulated.runs import play
from orchestrator.simulated.scenario import month
from orchestrator.view_builder import view_of


@pytest.fixture(scope="module")
def past(tmp_path_factory):
    """A day and a bit of two jobs, written as the recorder does; and what the ledger says of them."""
    from orchestrator.brain.holdings import ledger
    from orchestrator.history.meter import reading_of

    path = tmp_path_factory.mktemp("past") / "history.db"
    made, states = Writer(path), []

    def watch(state):
        states[:] = [state]
        if state.now_s < made.seen_s + 120.0:
            return
        view = view_of(state, state.now_s)
        made.take(reading_of(state, state.now_s))
        made.note("spent_usd", view.at_s, view.cost.spent_usd)
        for job in view.jobs:
            made.show(job)
        made.seen_s = view.at_s

    scenario = msgspec.structs.replace(month(1.2, 4, seed=3), job_slots=2, jobs=2)
    play(scenario, watch=watch)
    made.seen_s = 0.0
    watch(states[0])
    for number, said in enumerate(states[0].sentences):
        made.tell(
            Happening(
                id=f"{number}-0",
                at_s=said.at_s,
                kind="eviction" if "taken" in said.because else "note",
                job="job-0",
                who=said.who,
                what=said.what,
                because=said.because,
            )
        )
    made.flush(last=True)
    made.close()
    (state,) = states
    spent = {job.id: ledger.spent_usd(job.account, state.now_s) for job in state.jobs.values()}
    return path.read_bytes(), spent


@pytest.fixture
def remembering(shell, past):
    shell.places.make()
    shell.places.history.write_bytes(past[0])
    return shell


@pytest.mark.parametrize("by", BYS)
def test_cost_by_anything_adds_up_to_the_ledger(remembering, past, by):
    spent = past[1]
    answer = remembering("cost", "--by", by, "--json").json
    assert answer["spent_usd"] == pytest.approx(sum(spent.values()), abs=0.01)
    assert sum(line["usd"] for line in answer["lines"]) == pytest.approx(answer["spent_usd"])
    text = remembering("cost", "--by", by).out
    assert f"${answer['spent_usd']:,.2f}" in text
    one = remembering("cost", "job-1", "--by", by, "--json").json
    assert one["spent_usd"] == pytest.approx(spent["job-1"], abs=0.01)


@pytest.mark.parametrize("job", [(), ("job-1",)])
def test_a_figure_is_made_of_lines_of_the_ledger_to_the_cent(remembering, job):
    figures = remembering("cost", *job, "--by", "cause", "--json").json["lines"]
    held = {one.token: one for one in History.open(remembering.places).machines()}
    assert {"useful", "waiting"} <= {figure["key"] for figure in figures}
    for figure in figures:
        answer = remembering("cost", *job, "--of", figure["key"], "--json").json
        entries = answer["entries"]
        assert answer["spent_usd"] == pytest.approx(figure["usd"], abs=0.005)
        assert sum(entry["usd"] for entry in entries) == pytest.approx(answer["spent_usd"])
        assert {entry["cause"] for entry in entries} == {figure["key"]}
        assert {entry["job"] for entry in entries} <= ({*job} or {"", "job-0", "job-1"})
        for entry in entries:
            if entry["token"]:
                assert entry["machine"] == held[entry["token"]].machine
    text = remembering("cost", *job, "--of", figures[0]["key"]).out
    assert f"${figures[0]['usd']:,.2f}" in text
    mixed = remembering("cost", "--of", "useful", "--by", "day")
    assert (mixed.code, "leave those out" in mixed.line) == (2, True)


def test_days_are_counted_from_a_moment(remembering):
    days = remembering("cost", "--by", "day", "--json").json["lines"]
    assert [line["key"] for line in days] == sorted(line["key"] for line in days)
    assert len(days) >= 2
    none = remembering("cost", "--by", "day", "--since", "2h", "--json").json  # 2 h before now
    assert none["lines"] == [] and none["spent_usd"] == 0
    assert "nothing has been spent" in remembering("cost", "--since", "2h").out
    wrong = remembering("cost", "--since", "yesterday")
    assert (wrong.code, wrong.line.startswith("--since yesterday: write 90m")) == (2, True)


def test_two_jobs_are_compared(remembering, past):
    spent = past[1]
    answer = remembering("compare", "job-0", "job-1", "--json").json["jobs"]
    for each in answer:
        assert sum(each["causes"].values()) == pytest.approx(spent[each["id"]], abs=0.01)
        assert each["job"]["step"] > 0 and each["usd_per_1000_steps"] > 0
    text = remembering("compare", "job-0", "job-1").out
    assert "machines taken away" in text and "useful" in text
    wrong = remembering("compare", "job-0", "nothing")
    assert (wrong.code, "the history has no job nothing; it has: job-" in wrong.line) == (2, True)


@pytest.mark.parametrize(
    "words",
    [
        ("cost", "NAME"),
        ("cost", "NAME", "--of", "useful"),
        ("export", "--job", "NAME"),
        ("events", "NAME", "--since", "999d"),
    ],
)
def test_a_job_of_the_past_is_named_as_one_of_now(remembering, words):
    """A name that is no job's, or only begins one, was answered as if that job had cost nothing."""

    def ask(name):
        return remembering(*(name if word == "NAME" else word for word in words))

    assert ask("job-").line.startswith("job- may be any of: job-")
    assert "the history has no job jub-1; it has: job-" in ask("jub-1").line
    assert ask("jub-1").code == 2
    assert ask("job-1").code == 0


def test_an_export_has_the_columns_of_focus_and_adds_up(remembering, past):
    rows = list(csv.DictReader(io.StringIO(remembering("export").out)))
    assert tuple(rows[0]) == focus.COLUMNS
    assert sum(float(row["BilledCost"]) for row in rows) == pytest.approx(
        sum(past[1].values()), abs=0.01
    )
    useful = [row for row in rows if row["x_Cause"] == "useful"]
    assert all(float(row["ListCost"]) >= float(row["BilledCost"]) for row in useful)
    assert {row["PricingCategory"] for row in useful} <= {"Dynamic", "Standard"}
    assert all(row["ChargePeriodStart"] < row["ChargePeriodEnd"] for row in rows)
    said = remembering("export", "spent.csv", "--job", "job-0")
    assert said.code == 0
    kept = list(csv.DictReader((remembering.folder / "spent.csv").read_text().splitlines()))
    assert {row["x_Job"] for row in kept} == {"job-0"}


def test_export_to_a_folder_that_is_not_there_names_the_file_once(remembering):
    refused = remembering("export", "none/spent.csv")
    assert (refused.code, refused.line.count("none/spent.csv")) == (2, 1)


@pytest.mark.parametrize("by", ["cause", "day"])
def test_the_day_from_which_on_money_is_counted_is_said(remembering, by):
    """Money is kept by whole days: what was asked for the last minutes is that of a day, or of two."""
    day = remembering("cost", "--by", "day", "--json").json["lines"][-1]["key"]
    noon = f"{day}T12:34:56+00:00"
    answer = remembering("cost", "--by", by, "--since", noon, "--json").json
    assert answer["from_s"] == datetime.fromisoformat(f"{day}T00:00:00+00:00").timestamp()
    assert f"from {day} 00:00 UTC on" in remembering("cost", "--by", by, "--since", noon).out
    said = remembering("export", "some.csv", "--since", noon).out
    assert f"in all from {day} 00:00 UTC on, in some.csv" in said


def test_machines_are_shown_whole_or_not_at_all(remembering):
    """All that they ever cost was shown as if it had been spent since then."""
    wrong = remembering("cost", "--by", "machine", "--since", "2h")
    assert (wrong.code, "in their whole lives" in wrong.line) == (2, True)


def test_top_shows_it_all_once_without_a_terminal(remembering):
    """Where nothing runs it says so; the screen itself has money, jobs, machines and events."""
    assert remembering("top").code == 3
    lines = History.open(remembering.places).money()
    assert [str(part) for part in screen(None, lines, remembering.places)]


def test_events_of_the_past_are_found_by_kind(remembering):
    found = remembering("events", "--kind", "eviction", "-n", "5", "--json").json["events"]
    assert 0 < len(found) <= 5
    assert {one["kind"] for one in found} == {"eviction"}
    assert "taken" in remembering("events", "--kind", "eviction").out
    assert "nothing such" in remembering("events", "--since", "1s").out
    assert remembering("events", "--since", "1h", "-f").code == 2


def test_less_than_is_shown_has_no_sign():
    assert (usd(-4e-7), percent(-4e-7, 1.0)) == ("$0.00", "0 %")
    assert (usd(-6e-7), percent(-0.01, 1.0)) == ("-$0.000001", "-1 %")
