"""What Prometheus reads: well-formed, bounded, and all that the dashboard and the alerts ask for."""

import json
import re
from pathlib import Path

import msgspec
import pytest
import yaml

from orchestrator.history import metrics
from orchestrator.simulated.runs import play
from orchestrator.simulated.scenario import month
from orchestrator.state import State
from orchestrator.view import JobView, View
from orchestrator.view_builder import view_of

MONITORING = Path(__file__).parents[3] / "docker/monitoring"
LINE = re.compile(r'([a-z_]+)(\{(?:[a-z]+="(?:[^"\\\n]|\\["\\n])*",?)*\})? (-?[0-9.e+-]+)')
NAME = re.compile(r"\bspot_[a-z_]+\b")


@pytest.fixture(scope="module")
def view() -> View:
    states: list[State] = []
    play(month(0.05, 4, seed=3), watch=lambda state: states.append(state) if not states else None)
    return view_of(states[0], states[0].now_s)


def shown(text: str) -> dict[str, list[str]]:
    """The lines of each metric, checked to be what the text format allows."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            assert name not in found and kind in ("gauge", "counter")
            found[name] = []
        elif not line.startswith("# HELP "):
            match = LINE.fullmatch(line)
            assert match, line
            found[match[1]].append(line)
    return found


def test_the_text_is_well_formed_and_says_what_the_view_says(view):
    found = shown(metrics.text(view))
    assert found["spot_up"] == ["spot_up 1"]
    assert found["spot_spent_usd"] == [f"spot_spent_usd {view.cost.spent_usd!r}"]
    assert len(found["spot_pool_held"]) == len(view.pools)
    held = sum(float(line.split()[-1]) for line in found["spot_machines"])
    assert held == sum(machine.ended_at_s is None for machine in view.machines)
    assert set(found) <= metrics.names()


def test_names_of_jobs_give_no_orders_and_their_number_is_bounded(view):
    evil = msgspec.structs.replace(
        view.jobs[0], id='a"} 1\nspot_up 0 \\' + "x" * 500, loss=float("nan")
    )
    many: tuple[JobView, ...] = (evil,) * 400
    found = shown(metrics.text(msgspec.structs.replace(view, jobs=many)))
    assert found["spot_up"] == ["spot_up 1"]
    assert len(found["spot_job_step"]) == metrics.JOBS_MAX
    assert "spot_job_loss" not in found
    assert max(len(line) for lines in found.values() for line in lines) < 300


def test_without_a_view_it_says_so():
    assert shown(metrics.text(None)) == {"spot_up": ["spot_up 0"]}


def asked() -> list[str]:
    board = json.loads((MONITORING / "dashboard.json").read_text())
    rules = yaml.safe_load((MONITORING / "alerts.yml").read_text())
    found = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    return found + [rule["expr"] for group in rules["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("expression", asked())
def test_every_metric_that_is_asked_for_is_there(expression):
    used = set(NAME.findall(expression))
    assert used and used <= metrics.names()
    assert expression.count("(") == expression.count(")")
    for status in re.findall(r'status=~?"([A-Z|]+)"', expression):
        assert set(status.split("|")) <= set(metrics.STATUSES)


def test_rules_say_what_is_wrong_and_panels_do_not_overlap():
    rules = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"][0]["rules"]
    assert all(rule["annotations"]["summary"] and rule["labels"]["severity"] for rule in rules)
    taken: set[tuple[int, int]] = set()
    for panel in json.loads((MONITORING / "dashboard.json").read_text())["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken and at["x"] + at["w"] <= 24
        taken |= cells
