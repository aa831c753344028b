"""Jobs, from the command line, with a real Redis, a real local cloud and the real brain."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from shells import PROGRAM

from agent.keys import VIEW
from cloud.clock import ticks
from orchestrator.cli import jobs

pytestmark = pytest.mark.processes

WAITS = "x = 'wait'\n"
FAILS = "raise ValueError('on purpose')\n"


@pytest.fixture
def submitted(housed):
    """A job that trains until it is cancelled, and is cancelled when the test is over."""
    housed.script("long.py", WAITS)
    job = housed("submit", "long.py", "--json").json["id"]
    yield job
    housed("cancel", job)


def test_a_job_that_succeeds_is_followed_to_its_end(housed):
    """Plain lines without a terminal, the result, the next command, exit code 0."""
    housed.script("ok.py")
    answer = housed("submit", "ok.py", "--follow", "--", "--steps", "4")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.startswith("submitted ok-")
    assert "SUCCEEDED step 8/8 · loss 0.5000" in answer.out
    assert "the trained model is in /m.safetensors" in answer.out
    assert answer.out.splitlines()[-1] == "Next: orchestrator cost"


def test_the_scripts_own_words_reach_the_job(housed, submitted):
    """Everything after -- is the script's; options before it are ours, and the settings the default."""
    housed.script("args.py", WAITS)
    options = (
        "--slots-max 2 --budget 3 --deadline 2h --nan skip --max-failures 1 --haste 2"
        " --max-preemptions 9 --no-exact --json -- --lr 0.1 --json"
    )
    job = housed("submit", "args.py", *options.split()).json["id"]
    entries = [json.loads(e) for e in _journal(housed)]
    spec = next(
        e["spec"] for e in entries if e["type"] == "JobSubmitted" and e["spec"]["job"] == job
    )
    assert spec["argv"] == ["--lr", "0.1", "--json"]
    assert (spec["slots_min"], spec["slots_max"], spec["budget_usd"]) == (1, 2, 3.0)
    assert (spec["nan"], spec["max_failures"], spec["max_preemptions"]) == ("skip", 1, 9)
    assert (spec["deadline_s"] > 0, spec["haste"], spec["exact"]) == (True, 2.0, False)
    housed("cancel", job)


def test_a_deadline_holds_though_somebody_has_set_the_clock(housed):
    """Since then the manager counts an hour more than the wall shows: two hours from now are two hours for it."""
    note = housed.places.house
    text, house = note.read_bytes(), json.loads(note.read_bytes())
    ahead = {**house, "clock_zero_s": time.time() - ticks() + 3600.0}
    note.write_text(json.dumps(ahead))
    housed.script("due.py", WAITS)
    began_s = time.time()
    try:
        job = housed("submit", "due.py", "--deadline", "2h", "--json").json["id"]
    finally:
        note.write_bytes(text)
    entries = [json.loads(e) for e in _journal(housed)]
    (spec,) = (
        e["spec"] for e in entries if e["type"] == "JobSubmitted" and e["spec"]["job"] == job
    )
    hours = 3 * 3600.0
    assert began_s + hours - 1.0 <= spec["deadline_s"] <= time.time() + hours + 1.0
    housed("cancel", job)


def _journal(housed):
    rows = housed.client()._redis.xrange("orch:journal")
    return [row[b"e"] for _, row in rows]


def test_a_script_that_raises_gives_its_own_traceback_and_100(housed):
    """The last thing before the verdict is what Python said, with the line in the script."""
    housed.script("bad.py", FAILS)
    answer = housed("submit", "bad.py", "--follow")
    assert answer.code == 100
    assert 'Traceback (most recent call last):\n  File "s.py", line 1' in answer.out
    assert "ValueError: on purpose\nbad-" in answer.out
    document = housed("submit", "bad.py", "--follow", "--json")
    assert document.code == document.json["exit_code"] == 100
    assert document.json["traceback"].endswith("ValueError: on purpose")
    assert document.json["job"]["status"] == "FAILED"


@pytest.mark.parametrize("shown", [None, b'{"of": "another version"}'])
def test_before_a_manager_has_said_anything_no_job_is_taken_for_gone(late_house, shown):
    """After an upgrade a person was told to submit again what only had to be resumed."""
    if shown:
        late_house.client()._redis.set(VIEW, shown)
    for words in (
        ("resume",),
        ("cancel",),
        ("resume", "train"),
        ("logs",),
        ("change", "--budget", "1"),
    ):
        answer = late_house(*words)
        assert answer.code == 1
        assert answer.line == "the manager has not said anything yet; look again in a moment"


def test_a_manager_that_is_starting_is_waited_for_and_not_by_down_by_force(late_house):
    """Right behind `up` it has not said anything yet: that is said, and it is not away. By force the process is told to end
    at once, whatever the manager does.
    """
    process = late_house.start("submit", late_house.script("wait.py", WAITS))
    assert "the manager is starting" in process.stdout.readline()
    (late_house.folder / "hold").unlink()
    answer = late_house.ended(process)
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.startswith("submitted wait-")
    assert "away" not in answer.out
    ended = late_house("down", "--force")
    assert (ended.code, "down in" in ended.out) == (0, True), ended.out + ended.err


def test_a_budget_that_buys_nothing_is_refused_with_the_arithmetic(housed):
    """At submit, before anything is bought, with exit code 101."""
    asked, arithmetic = ("submit", housed.script("ok.py"), "--budget", "0.0001"), "too small for"
    plain, document = housed(*asked), housed(*asked, "--json")
    assert (plain.code, plain.out.startswith("refused: budget: ")) == (101, True)
    assert arithmetic in plain.out.replace("\n", " ")
    assert document.json["exit_code"] == 101
    assert arithmetic in document.json["job"]["because"]
    resumed = housed("resume", document.json["id"], "--json")
    assert (resumed.code, resumed.json["job"]["status"]) == (101, "FAILED")
    assert resumed.json["job"]["ended_at_s"] > document.json["job"]["ended_at_s"]


def test_a_job_is_cancelled_and_resumed(housed, submitted):
    """By how its id begins; what has ended cannot be cancelled, what runs cannot be resumed."""
    running = housed("resume", submitted)
    assert "only what failed or was cancelled is resumed" in running.line
    assert "--budget 0: a number above 0" in housed("change", "--budget", "0").line
    assert "above 0, to 1,000,000,000" in housed("change", "--budget", "1e12").line
    assert (
        "an amount in US dollars from 0 to 1,000,000,000"
        in housed("submit", "long.py", "--budget", "1e12").line
    )
    assert "nothing to change" in housed("change", submitted).line
    rich = housed("change", submitted, "--budget", "12.5", "--deadline", "30", "--json").json["job"]
    assert rich["budget_usd"] == 12.5
    assert rich["deadline_s"] - time.time() == pytest.approx(30 * 3600, abs=300)
    later = housed("change", submitted, "--deadline", "90m", "--json").json["job"]
    assert later["deadline_s"] - time.time() == pytest.approx(90 * 60, abs=300)
    wrong = housed("change", submitted, "--deadline", "soon")
    assert (wrong.code, "--deadline soon: write 90m, 2h" in wrong.line) == (2, True)
    free = housed("change", submitted, "--budget", "none")
    assert "It may spend without a limit." in free.out
    cancelled = housed("cancel", submitted[:-1], "--json")
    assert cancelled.json["job"]["status"] in {"CANCELLED", "DRAINING"}
    assert "has ended already: CANCELLED" in housed("cancel", submitted).line
    resumed = housed("resume", submitted, "--json")
    assert resumed.json["job"]["status"] not in {"CANCELLED", "FAILED"}


def test_a_job_that_is_not_there_is_named_with_those_that_are(housed, submitted):
    """The line lists the newest jobs; a beginning that fits several is no name."""
    none = housed("logs", "nobody")
    assert (none.code, submitted in none.line) == (2, True)
    housed.script("long-two.py", WAITS)
    second = housed("submit", "long-two.py", "--json").json["id"]
    many = housed("logs", "long")
    assert many.line.startswith("long may be any of: ")
    which = housed("cancel")
    assert (which.code, second in which.line, submitted in which.line) == (2, True, True)
    housed("cancel", second)


def test_every_look_has_a_document(housed, submitted):
    """Status, logs, events and cost: one JSON document each, with the keys that programs rely on."""
    status = housed("status", "--json").json
    assert {"at_s", "epoch", "deployment", "jobs", "machines", "pools", "cost", "events"} <= set(
        status
    )
    assert submitted in [job["id"] for job in status["jobs"]]
    logs = housed("logs", submitted, "--json").json
    assert logs["job"] == submitted
    assert all(set(line) == {"worker", "line"} for line in logs["lines"])
    events = housed("events", "--json", "--last", "3").json["events"]
    assert [set(event) for event in events] == [{"at_s", "who", "what", "because", "job"}] * 3
    cost = housed("cost", "--json").json
    assert set(cost) == {"cost", "jobs", "machines"}
    assert {"spent_usd", "saved_usd", "on_demand_usd", "now_usd_per_h"} <= set(cost["cost"])


def test_one_job_is_looked_at_alone(housed, submitted):
    """`status JOB`: its own money and machines, in words and as a document; an unknown one is named."""
    told = housed("status", submitted, "--json").json
    assert set(told) == {"at_s", "job", "machines", "events"}
    assert told["job"]["id"] == submitted
    assert all(machine["job"] == submitted for machine in told["machines"])
    text = housed("status", submitted[:-1]).out
    assert f"{submitted}  " in text
    assert "on demand $" in text
    assert housed("status", "nobody").line.startswith("there is no job nobody")


def test_events_of_one_job_are_those_of_it_and_its_machines(housed, submitted):
    """By how its id begins; what was done for another is left out. It goes on between two looks."""
    housed.script("ok.py")
    other = housed("submit", "ok.py", "--follow", "--json").json["id"]
    every = housed("events", "-n", "10000", "--json").json["events"]
    own = housed("events", submitted[:-1], "-n", "10000", "--json").json["events"]
    assert {one["who"] for one in every} >= {submitted, other}
    assert submitted in {one["who"] for one in own}
    assert other not in {one["who"] for one in own}
    before = [one for one in every if one["who"] == submitted]
    since = [one for one in own if one["who"] == submitted]
    assert since[: len(before)] == before
    assert "there is no job nobody" in housed("events", "nobody").line


def test_a_sentence_is_one_line_for_whoever_searches_in_it(housed, submitted):
    """In a file or a pipe: each line has a time, and before today a date, too.

    The job goes on between two looks.
    """
    said = housed("events", submitted, "-n", "10000", "--json").json["events"]
    lines = housed("events", submitted, "-n", "10000").out.splitlines()
    assert len(lines) >= len(said)
    at = r"(\d\d:\d\d:\d\d|\d{4}-\d\d-\d\d \d\d:\d\d) \S"
    assert all(re.match(at, line) for line in lines)
    assert max(map(len, lines)) > 100  # no line is broken as wide as a terminal is


def test_who_follows_a_job_is_told_where_its_prints_are(housed):
    """At the start, because the panel has no room for them; only hints come before."""
    housed.script("ok.py")
    job, *lines = housed("submit", "ok.py", "--follow").out.splitlines()
    first = next(line for line in lines if not line.startswith("hint: "))
    assert first == f"prints: orchestrator logs -f {job.split()[1]}"


def test_every_look_has_words(housed, submitted):
    """The same for a person: who, what, why; a note is its reason alone."""
    assert "spent $" in housed("status").out
    events = housed("events", "--last", "100").out
    assert f"{submitted} PENDING: long.py wants 1 to 4 workers" in events
    assert " note: " not in events
    assert "the same on demand" in housed("cost").out


@pytest.mark.parametrize("words", [("status",), ("events",), ("status", "--json")])
def test_an_encoding_without_our_signs_shows_others(housed, submitted, words):
    """In place of each stood a stack trace, also behind a job that had been handed in."""
    said = subprocess.run(
        [PROGRAM, *words],
        cwd=housed.folder,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        encoding="ascii",
        check=False,
    )
    assert (said.returncode, said.stderr) == (0, "")
    assert submitted in said.stdout


def test_the_log_is_followed_to_the_end_of_the_job(housed):
    """`logs -f` of a job that has ended prints all and returns."""
    housed.script("ok.py")
    job = housed("submit", "ok.py", "--follow", "--json").json["id"]
    text = housed("logs", "-f", job).out
    assert "hello from the script" in text
    lines = [json.loads(line) for line in housed("logs", "-f", job, "--json").out.splitlines()]
    assert {"hello from the script"} == {line["line"] for line in lines}


def test_a_plan_asks_the_running_cloud(housed):
    """Prices come from the cloud that is up, and the work from a job that ended; nothing is bought."""
    housed.script("ok.py", "print('planned')\n")
    job = housed("submit", "ok.py", "--json", "--follow", "--", "--lr", "1").json["id"]
    launches = _launches(housed)
    answer = housed("plan", "ok.py", "--json", "--", "--lr", "1").json
    assert answer["source"] == "the running local cloud"
    assert answer["expected_cost_usd"] > 0
    assert (answer["work"]["steps"], answer["work"]["steps_from"]) == (8, job)
    assert answer["work"]["step_s"] > 0
    text = housed("plan", "ok.py", "--", "--lr", "1").out
    assert f"work: 8 steps (as {job} had it)" in text
    assert text.splitlines()[-1] == "Next: orchestrator submit ok.py --follow -- --lr 1"
    assert _launches(housed) == launches


def test_a_plan_takes_no_other_jobs_word_for_it(housed):
    """Other arguments, or other bytes under the same name, are other work: it is asked for."""
    housed.script("ok.py", "print('one')\n")
    housed("submit", "ok.py", "--follow")
    assert housed("plan", "ok.py", "--json").json["work"]["steps"] == 8
    assert housed("plan", "ok.py", "--json", "--", "--more").json["work"]["steps"] is None
    told = housed("plan", "ok.py", "--steps", "5", "--json").json["work"]
    assert (told["steps"], told["steps_from"]) == (5, "as told")
    housed.script("ok.py", "print('another')\n")
    assert "give --steps and --step-s" in housed("plan", "ok.py").out


def test_what_goes_along_is_shown_and_part_of_what_is_planned(housed):
    """Count, bytes and names before the order; a plan knows the job by all of its files."""
    housed.script("several.py", "import neighbour\nprint('several')\n")
    housed.script("neighbour.py", "x = 1\n")
    housed.script("rate.txt", "0.1")
    answer = housed("submit", "several.py", "--with", "rate.txt", "--follow")
    assert answer.out.splitlines()[0] == "goes along 2 files, 9 bytes: neighbour.py, rate.txt"
    document = housed("submit", "several.py", "--with", "rate.txt", "--json").json
    assert document["along"]["files"] == {"neighbour.py": 6, "rate.txt": 3}
    asked = ("plan", "several.py", "--with", "rate.txt", "--json")
    assert housed(*asked).json["work"]["steps"] == 8
    assert housed("plan", "several.py", "--json").json["work"]["steps"] is None
    text = housed(*asked[:-1]).out
    assert "Next: orchestrator submit several.py --with rate.txt --follow" in text.splitlines()[-1]
    housed.script("neighbour.py", "x = 2\n")
    assert housed(*asked).json["work"]["steps"] is None


def test_scripts_are_kept_within_bounds(housed, submitted, monkeypatch):
    """What a job needs that has not ended stays; of others the newest, and a job whose files are gone says so."""
    housed.script("gone.py", WAITS + "\n# of a job that is cancelled\n")
    gone = housed("submit", "gone.py", "--json").json["id"]
    housed("cancel", gone)
    store, client = housed.client()._redis, housed.client()
    shas = {job.id: job.script_sha for job in client.view().jobs}
    monkeypatch.setattr("orchestrator.client.SCRIPTS_BYTES_MAX", 1)
    newest = client.put_script(b"# the newest")
    assert client.has_script(newest)
    assert client.has_script(shas[submitted])
    assert not client.has_script(shas[gone])
    assert store.zscore("orch:scripts", shas[gone]) is None
    assert "is not kept any more, or is damaged; submit it again" in housed("resume", gone).line


def test_a_script_that_is_damaged_where_it_is_kept_is_not_resumed(housed):
    """No machine is bought for what fails on every worker; the line says what to do."""
    housed.script("bent.py", WAITS + "\n# of a job whose script is damaged\n")
    bent = housed("submit", "bent.py", "--json").json["id"]
    housed("cancel", bent)
    client = housed.client()
    (sha,) = (job.script_sha for job in client.view().jobs if job.id == bent)
    assert client.has_script(sha)
    client._redis.setrange(f"orch:script:{sha}", 0, b"?")
    assert (
        "is damaged; submit it again: orchestrator submit bent.py --from"
        in housed("resume", bent).line
    )


def _launches(housed):
    rows = housed.client()._redis.xrange("orch:journal")
    return sum(b'"type":"Launch"' in row[b"a"] for _, row in rows)


def test_the_journal_of_a_running_manager_is_decided_the_same_again(housed, submitted, until):
    """Read while it grows, saved as a file, and replayed from there too."""
    assert _status_of(housed, submitted)  # so that there is a job in it

    def saves_ten_events():
        """A snapshot may shorten what the journal still holds as events."""
        running = housed("tools", "replay", "--save", "incident.jsonl", "--json")
        assert (running.code, running.err) == (0, "")
        return running.json["events"] > 10

    until(saves_ten_events)
    again = housed("tools", "replay", "incident.jsonl")
    assert (again.code, "every decision is the same" in again.out) == (0, True)


@pytest.mark.parametrize("command", ["cancel", "resume", "change", "logs"])
def test_an_empty_name_is_no_job(housed, submitted, command):
    """As of a shell's variable that is not set: it was taken for the only job that runs."""
    more = ["--budget", "5"] if command == "change" else []
    answer = housed(command, "", *more)
    assert (answer.code, answer.line) == (
        2,
        "a job's name is empty; leave it out, or name one",
    )
    assert _status_of(housed, submitted) not in {"CANCELLED", "DRAINING"}


def test_a_budget_that_is_not_in_force_where_it_runs_is_said(housed):
    """It was written into the file after `up`, and a person believed that it binds."""
    housed.script("spends.py", WAITS)
    answer = housed("submit", "spends.py", "--set", "budget.total_usd=5")
    assert housed("cancel", "spends-").code == 0
    assert "budget.total_usd is 5.0 in the settings now, and not set where it runs" in answer.out
    assert "hint: nothing bounds what it may spend" in answer.out
    planned = housed("plan", "spends.py", "--set", "budget.total_usd=0.001")
    assert "refused: budget: " in planned.out  # by settings that are not in force
    assert "budget.total_usd is 0.001 in the settings now, and not set where it" in planned.out


def test_a_change_is_made_where_stdin_is_closed(housed, submitted, monkeypatch):
    """As by a service: there is nobody to ask, and it was a traceback."""
    monkeypatch.setattr(sys, "stdin", None)
    assert housed("change", submitted, "--budget", "9").code == 0


def test_change_without_a_name_is_of_the_job_that_costs(housed, submitted):
    """A later one has failed: its budget was lowered, and the other went on with its own."""
    housed.script("fails.py", FAILS)
    failed = housed("submit", "fails.py", "--max-failures", "0", "--follow")
    assert failed.code == 100
    answer = housed("change", "--budget", "9")
    assert answer.code == 0
    assert answer.out.startswith(f"{submitted}: It may spend $")
    assert "nothing would change" in housed("what-if", "--budget", "9").out


def test_what_if_refuses_a_budget_below_what_is_owed_as_a_change_does(housed, submitted, until):
    """It said that nothing is sold at a price that could be paid."""
    until(lambda: housed.client().view().cost.reserved_usd > 0)
    for command in ("what-if", "change"):
        refused = housed(command, submitted, "--budget", "0.0000001")
        assert (refused.code, "has spent or reserved $" in refused.line) == (1, True)


def test_a_cancel_that_nobody_has_heard_yet_says_so(housed, submitted, monkeypatch):
    """The job trains and costs money until the manager is back."""
    monkeypatch.setattr(jobs, "TAKEN_S_MAX", 0.2)
    pid = housed.client().house().pid
    signal_to(pid, signal.SIGSTOP)
    try:
        answer = housed("cancel", submitted)
    finally:
        signal_to(pid, signal.SIGCONT)
    assert answer.code == 0
    assert "the manager is away, so nothing has changed yet" in answer.out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("words", [("logs", "-f"), ("status", "--watch"), ("events", "-f")])
def test_ctrl_c_ends_the_looking_and_nothing_else(housed, submitted, words, number, until):
    """A real signal while something is shown again and again: exit code 130, the job goes on."""
    looking = housed.start(*words)
    assert looking.stdout.read(1) != ""
    looking.send_signal(number)
    answer = housed.ended(looking)
    assert (answer.code, answer.err) == (130, "")
    assert _status_of(housed, submitted) not in {"CANCELLED", "FAILED"}


def test_ctrl_c_while_following_leaves_the_job_running(housed, until):
    """The order was handed in whole; the last lines say how to see it again and how to stop it."""
    housed.script("long.py", WAITS)
    following = housed.start("submit", "long.py", "--follow")
    job = following.stdout.readline().split()[1]
    following.send_signal(signal.SIGINT)
    answer = housed.ended(following)
    assert answer.code == 130
    assert f"{job} was handed in and goes on without you" in answer.out
    assert f"orchestrator cancel {job}" in answer.out
    until(lambda: _status_of(housed, job) == "PROVISIONING")
    housed("cancel", job)


def test_ctrl_c_while_the_manager_is_away_leaves_one_whole_order(housed, until):
    """The manager is stopped, the order is in its inbox, the person gives up waiting: the job is
    there once, and whole, when the manager is back.
    """
    pid = housed.client().house().pid
    housed.script("long.py", WAITS)
    before = _jobs(housed)
    signal_to(pid, signal.SIGSTOP)
    waiting = housed.start("submit", "long.py", "--json")
    until(lambda: housed.client()._redis.xlen("orch:inbox") > 0)
    waiting.send_signal(signal.SIGINT)
    answer = housed.ended(waiting)
    signal_to(pid, signal.SIGCONT)
    assert answer.code == 130
    job = answer.json["id"]
    until(lambda: _status_of(housed, job) == "PROVISIONING")
    assert _jobs(housed) - before == {job}
    housed("cancel", job)


def _jobs(housed):
    return {one["id"] for one in housed("status", "--json").json["jobs"]}


def signal_to(pid: int, number: int) -> None:
    os.kill(pid, number)


def _status_of(housed, job):
    found = [one["status"] for one in housed("status", "--json").json["jobs"] if one["id"] == job]
    return found[0] if found else None
