"""Looking ahead: a plan buys nothing, and a simulated month can be had again byte for byte."""

import json
import re
from xml.etree import ElementTree

import msgspec
import pytest

from agent.keeper.storage.sharding import Replay
from agent.profile import Link, Network, Profile, Section
from orchestrator import preview
from orchestrator.cli import plan
from orchestrator.cli.submit import job_spec
from orchestrator.config import Config
from orchestrator.preview import Model

LINK = Link(bandwidth_bytes_per_s=1e9, latency_s=1e-5)
SVG = "{http://www.w3.org/2000/svg}"


def measured(memory: float) -> Profile:
    """Four equal sections of a hundred bytes of weights each, as a worker would have found them."""
    each = Section(
        name="block",
        forward_s=(1e-3,),
        backward_s=(2e-3,),
        activation_bytes=8.0,
        parameter_bytes=100.0,
        optimizer_bytes=200.0,
    )
    return Profile(
        model="deep.py",
        microbatch_sizes=(1,),
        network=Network(intra=LINK, inter=LINK, reduce_intra=LINK, reduce_inter=LINK),
        memory_bytes=memory,
        exchanged=0.5,
        sections=(each,) * 4,
    )


def test_a_plan_shows_every_offer_and_marks_what_would_be_bought(shell):
    """Without any house: the market is drawn from its seed, and nothing is started or written."""
    shell.script("train.py")
    answer = shell("plan", "train.py", "--steps", "400", "--step-s", "1.5", "--json")
    assert answer.code == 0
    offers = answer.json["offers"]
    chosen = [one for one in offers if one["chosen"]]
    assert sum(one["chosen"] * one["slots"] for one in chosen) == 4
    cheapest = min(one["expected_usd_per_slot_h"] for one in offers)
    assert {one["expected_usd_per_slot_h"] for one in chosen} == {cheapest}
    assert {one["market"] for one in offers} == {"spot", "on_demand"}
    assert 0 < answer.json["expected_cost_usd"] < 0.1
    assert answer.json["expected_s"] > 400 * 1.5 / 4
    assert [path.name for path in shell.folder.iterdir()] == ["train.py"]


def large(optimizer_bytes: float) -> Model:
    sections = tuple(
        msgspec.structs.replace(one, parameter_bytes=1e9, optimizer_bytes=optimizer_bytes)
        for one in measured(1e12).sections
    )
    profile = msgspec.structs.replace(measured(1e12), sections=sections)
    return Model(job="j", profile=profile, microbatches=8, stages_max=4, uncuttable="")


def test_a_plan_says_what_a_loss_of_everything_costs(tmp_path):
    """Of a state that workers write into the store: what is allowed, or what their network allows."""
    config = Config(storage={"checkpoint_url": tmp_path.as_uri()})
    spec = job_spec(config, tmp_path / "train.py", ())
    found = preview._replay(config, spec, large(2e9), 8, 4.0)
    assert found == Replay(writes_s=15.0, mean_s=37.5, most_s=64.0)
    said = plan._replayed(found, spec.max_replay_s).plain
    assert "1 min 4 s are trained again at most, 38 s on average" in said
    assert "a snapshot into storage.checkpoint_url in 15 s" in said
    hasty = msgspec.structs.replace(spec, max_replay_s=20.0)
    found = preview._replay(config, hasty, large(2e9), 8, 4.0)
    assert found.most_s == 34.0
    assert "job.max_replay_s = 20 is not kept" in plan._replayed(found, 20.0).plain


def test_a_plan_says_what_a_loss_costs_where_the_gradients_stay_with_the_workers(tmp_path):
    """Without a store the state passes the manager's machine: beside the training, and not in every step."""
    spec = job_spec(Config(), tmp_path / "train.py", ())
    two = preview._replay(Config(), spec, large(2e9), 2, 600.0)
    assert (two.stored, two.writes_s) == (False, 9.6), "they are large, and two have the model"
    assert two.most_s == pytest.approx(10 * 600.0 + 9.6 + 600.0)
    quick = preview._replay(Config(), spec, large(0.0), 1, 3.0)
    assert quick.most_s == pytest.approx(60.0 + 3.0), "each step would wait for more than it takes"
    said = plan._replayed(quick, spec.max_replay_s).plain
    assert "a snapshot is at the manager's machine in 3 s, and no step waits" in said
    assert preview._replay(Config(), spec, large(0.0), 1, 300.0) is None


def test_a_plan_says_what_the_managers_machine_lacks_memory_for(tmp_path, monkeypatch):
    monkeypatch.setattr(preview, "machine_bytes", lambda: 4 << 30)
    near, far = Config(), Config(storage={"checkpoint_url": tmp_path.as_uri()})
    spec = job_spec(near, tmp_path / "train.py", ())
    said = preview._crowded(near, spec, large(2e9), 600.0)
    assert "and has 4.00 GiB in all: set storage.checkpoint_url, and workers" in said
    assert not preview._crowded(far, spec, large(2e9), 600.0)
    always = msgspec.structs.replace(spec, sums="always")
    assert 'leave job.sums at "auto"' in preview._crowded(far, always, large(2e9), 600.0)
    monkeypatch.setattr(preview, "machine_bytes", lambda: 256 << 30)
    assert not preview._crowded(near, spec, large(2e9), 600.0)


def test_a_plan_says_nothing_of_it_where_no_step_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(preview, "machine_bytes", lambda: 256 << 30)
    config = Config(storage={"checkpoint_url": tmp_path.as_uri()})
    spec = job_spec(config, tmp_path / "train.py", ())
    careful = msgspec.structs.replace(spec, sums="always")
    assert preview._replay(config, careful, large(2e9), 8, 4.0) is None
    assert preview._replay(config, spec, large(2e9), 1, 4000.0) is None, "the keeper costs little"
    assert preview._replay(config, spec, None, 8, 4.0) is None, "nothing is known of the model"


def test_a_plan_for_a_person_ends_with_the_next_command(shell):
    """A table, the reason, the runner-up, the expectation; without the work it asks for it."""
    shell.script("train.py")
    text = shell("plan", "train.py", "--steps", "400", "--step-s", "1.5").out
    assert "\nbuy " in text
    assert "next best: " in text
    assert "expected: $0.0" in text
    assert "work: 400 steps (as told), 1.5 s for one on one slot (as told)" in text
    assert text.splitlines()[-1] == "Next: orchestrator submit train.py --follow"
    assert "give --steps and --step-s" in shell("plan", "train.py").out


def test_a_plans_next_command_keeps_the_bounds_that_it_was_made_with(shell):
    """Who plans with a budget and goes on with the line shown has not lost the budget."""
    shell.script("train.py")
    bounds = ("--budget", "2.5", "--deadline", "90m")
    text = shell("plan", "train.py", *bounds).out
    expected = "Next: orchestrator submit train.py --budget 2.5 --deadline 90m --follow"
    assert text.splitlines()[-1] == expected


def test_a_plan_names_the_day_of_an_end_that_is_far_away(shell):
    """A time of day alone would be read as today's; what no calendar reaches is said in words."""
    shell.script("train.py")
    text = shell("plan", "train.py", "--steps", "1000000", "--step-s", "1").out
    assert re.search(r"done in \d+ days \d+ h \(at \d{4}-\d\d-\d\d \d\d:\d\d\)", text)
    answer = shell("plan", "train.py", "--steps", "1000000000", "--step-s", "900000")
    assert (answer.code, "(at after the year 9999)" in answer.out) == (0, True)


@pytest.mark.parametrize(("step_s", "slack"), [("0.05", 0.01), ("0.8", 0.2), ("20", 0.2)])
def test_a_plan_expects_what_its_machines_cost_while_they_start_and_work(shell, step_s, slack):
    """A job of four seconds, of a minute and of half an hour: the price per hour times the time until it is done,
    and what evictions are expected to cost. A budget has to hold more back than the shortest costs."""
    shell.script("train.py")
    work = ("plan", "train.py", "--steps", "300", "--step-s", step_s)
    answer = shell(*work, "--json").json
    usd_per_h = sum(one["chosen"] * one["usd_per_h"] for one in answer["offers"])
    while_held = usd_per_h * answer["expected_s"] / 3600
    assert while_held * 0.999 <= answer["expected_cost_usd"] <= while_held * (1 + slack)
    alone = [one for one in answer["offers"] if one["machines"]]
    for one in alone:
        held = one["machines"] * one["usd_per_h"] * one["expected_s"] / 3600
        assert one["expected_cost_usd"] >= held * 0.999
    assert answer["budget_least_usd"] > 0
    least = f"a budget has to be ${answer['budget_least_usd']:.4f} at least: "
    assert least in shell(*work, "--budget", "1").out.replace("\n", " ")
    assert "a budget has to be" not in shell(*work).out  # nobody asked


@pytest.mark.parametrize(
    ("bound", "words"),
    [
        (("--budget", "0.05"), "a budget of $0.0500 ends before that: it takes $0.0"),
        (("--set", "budget.total_usd=0.05"), "budget.total_usd, of which $0.0500 are left, ends"),
        (("--budget", "0.08"), ""),
        ((), ""),
    ],
)
def test_plan_with_a_budget_below_cost_and_reserve_says_so(shell, bound, words):
    """Before anything is spent: the job would fail on its way, with most of the money gone."""
    shell.script("train.py")
    answer = shell("plan", "train.py", "--steps", "10000", "--step-s", "0.5", *bound)
    said = answer.out.replace("\n", " ")
    assert answer.code == 0
    assert words in said
    assert ("ends before that" in said) == bool(words)


def test_a_plan_shows_what_would_be_bid(shell):
    """Where the rule asks for bids every spot offer has one; elsewhere there is neither a bid nor a column."""
    shell.script("train.py")
    assert " bid " not in shell("plan", "train.py").out
    shell.folder.joinpath("orchestrator.toml").write_text('[local]\nbilling = "aws_2016"\n')
    offers = shell("plan", "train.py", "--json").json["offers"]
    assert all((o["bid_usd_per_h"] is not None) == (o["market"] == "spot") for o in offers)
    assert all(o["bid_usd_per_h"] >= o["usd_per_h"] for o in offers if o["market"] == "spot")
    assert " bid " in shell("plan", "train.py").out


def test_a_plan_heeds_the_limits(shell):
    """No budget is refused with the arithmetic; a deadline that only on-demand meets buys that."""
    shell.script("train.py")
    refused = shell("plan", "train.py", "--budget", "0", "--json")
    assert refused.code == 101
    assert "it buys no step" in refused.json["refused"]
    work = ("--steps", "1000", "--step-s", "14", "--json")
    hasty = shell("plan", "train.py", "--deadline", "62m", *work).json["offers"]
    assert {one["market"] for one in hasty if one["chosen"]} == {"on_demand"}
    calm = shell("plan", "train.py", *work).json["offers"]
    assert {one["market"] for one in calm if one["chosen"]} == {"spot"}


@pytest.mark.processes
def test_a_plan_of_a_measured_script_shows_its_layouts_and_draws_the_step(housed):
    """The layout for the machines that would be bought, what else was compared, and one bar an action."""
    housed.script("deep.py", "x = 'deep'\n")
    before = housed("plan", "deep.py", "--gantt", "step.svg")
    assert (before.code, len(before.err.splitlines())) == (1, 1)
    assert "submit it once" in before.line
    assert "layout: no job of this very deep.py" in housed("plan", "deep.py").out
    job = housed("submit", "deep.py", "--follow", "--json").json["id"]
    profile = msgspec.json.encode(measured(memory=700.0))  # four times 400 do not fit into one
    housed.client()._redis.set(f"orch:job:profile:{job}", profile)
    text = housed("plan", "deep.py").out
    assert f"(from what {job} measured)" in text
    assert "slower" in text
    halved = "exchange: 200 bytes of gradients a step, in bfloat16; float32 would be 400 bytes"
    assert halved in " ".join(text.split())
    answer = housed("plan", "deep.py", "--gantt", "step.svg", "--json")
    assert (answer.code, answer.err) == (0, "")
    layout = answer.json["layout"]
    assert (layout["sum_bytes"], layout["float32_bytes"]) == (200, 400)
    chosen, *others = layout["compared"]
    depth, width = map(int, chosen["layout"].split("x"))
    assert (chosen["chosen"], depth * width <= 4, depth >= 3) == (True, True, True)
    assert [one["chosen"] for one in others] == [False] * len(others) != []
    assert min(one["step_s"] for one in others) >= chosen["step_s"]
    root = ElementTree.fromstring((housed.folder / "step.svg").read_text())
    bars = [title.text for title in root.iter(f"{SVG}title")]
    assert sum(bar.startswith("forward of") for bar in bars) == depth * 4
    refused = housed("plan", "deep.py", "--gantt", "nowhere/step.svg")
    assert (refused.code, refused.line) == (
        2,
        "--gantt nowhere/step.svg: No such file or directory",
    )


def test_without_a_manager_a_plan_says_where_layouts_are_known(shell):
    """What was measured lies with the manager; the timeline is refused in one line."""
    shell.script("train.py")
    assert (
        "layout: what was measured of a model is with the manager" in shell("plan", "train.py").out
    )
    refused = shell("plan", "train.py", "--gantt", "step.svg")
    assert refused.code == 1
    assert refused.line.startswith("--gantt step.svg: what was measured of a model")


def test_plans_of_one_seed_are_alike(shell):
    """The market is a function of its seed: the same offers again, others for another seed."""
    shell.script("train.py")

    def offers(seed: int) -> str:
        answer = shell("plan", "train.py", "--set", f"local.seed={seed}", "--json")
        return json.dumps(answer.json["offers"])

    assert offers(7) == offers(7) != offers(8)


def test_the_figures_of_a_simulation_are_a_table(shell):
    """For a person; without faults besides evictions a lost step would be a fault of ours."""
    text = shell("tools", "simulate", "--days", "0.2", "--instances", "5").out
    lines = dict(line.split("  ", 1) for line in text.splitlines() if "  " in line)
    assert lines["steps lost"].strip() == "0"
    assert int(lines["evictions"].strip()) > 0


def test_a_simulated_journal_is_decided_the_same_again(shell):
    """The file of a simulation is an incident like any other; a changed one is told from it."""
    shell("tools", "simulate", "--days", "0.1", "--instances", "3", "--journal", "month.jsonl")
    assert "every decision is the same" in shell("tools", "replay", "month.jsonl").out
    journal = shell.folder / "month.jsonl"
    journal.write_text(journal.read_text().replace('"market":"spot"', '"market":"on_demand"', 1))
    changed = shell("tools", "replay", "month.jsonl")
    assert (changed.code, "decided otherwise now: entry " in changed.line) == (1, True)


def test_a_backtest_writes_its_page(shell):
    """On the drawn markets, with few starts; the page is where it was asked for."""
    words = "tools backtest --strategy ours --starts 3 --hours 4 --market capacity"
    answer = shell(*words.split(), "--report", "page.html", "--json")
    assert (answer.code, answer.err) == (0, "")
    assert answer.json["report"] == str(shell.folder / "page.html")
    (market,) = answer.json["markets"]
    (ours,) = market["strategies"]
    assert ours["strategy"] == "ours"
    assert ours["cost_usd_low"] <= ours["cost_usd"] <= ours["cost_usd_high"]
    assert ours["to_bound_median"] >= 1.0
    assert {row["strategy"]: row["missed"] for row in market["deadlines"][0]["strategies"]}[
        "ours"
    ] == 0
    assert "<svg" in (shell.folder / "page.html").read_text()
