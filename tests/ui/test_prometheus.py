"""A real Prometheus with our settings, rules and dashboard: what they ask for is there, and what is wrong is said."""

import itertools
import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import yaml
from waiting import until

from orchestrator.history import metrics
from orchestrator.view import View

ROOT = Path(__file__).parents[2]
RULES = ROOT / "docker/monitoring/alerts.yml"
BOARD = ROOT / "docker/monitoring/dashboard.json"
ALERTS = {rule["alert"]: rule for rule in yaml.safe_load(RULES.read_text())["groups"][0]["rules"]}
OFTEN = {"scrape_interval": "250ms", "scrape_timeout": "250ms", "evaluation_interval": "250ms"}
START_S_MAX = 60.0


def program(name: str) -> str:
    if (found := shutil.which(name)) is None:
        pytest.skip(f"needs the program `{name}` (Debian: apt install prometheus)")
    return found


class Prometheus:
    """A running server, asked over its own HTTP API."""

    def __init__(self, base_url: str) -> None:
        self._http = httpx.Client(base_url=base_url, timeout=30)

    def get(self, path: str, **words: str) -> Any:
        answer = self._http.get(f"/api/v1/{path}", params=words).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def values(self, expression: str) -> list[float]:
        return [float(one["value"][1]) for one in self.get("query", query=expression)["result"]]

    def states(self) -> dict[str, str]:
        """Every alert by its name, as the server has evaluated it last; none that cannot be."""
        (group,) = self.get("rules")["groups"]
        assert {rule["health"] for rule in group["rules"]} <= {"ok", "unknown"}, group["rules"]
        return {rule["name"]: rule["state"] for rule in group["rules"] if rule["health"] == "ok"}

    def close(self) -> None:
        self._http.close()


def configured(folder: Path, url: str, key: str) -> Path:
    """The settings that docs/programs.md shows, with an address, a key and the rules."""
    (shown,) = re.findall(
        r"```yaml\n(scrape_configs:.*?)```", (ROOT / "docs/programs.md").read_text(), re.S
    )
    (folder / "spot.key").write_text(key)
    shown = shown.replace("/etc/prometheus/spot.key", str(folder / "spot.key"))
    settings = yaml.safe_load(shown.replace("127.0.0.1:PORT", url.split("/")[2]))
    settings |= {"global": OFTEN, "rule_files": [str(RULES)]}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
    return folder / "prometheus.yml"


@pytest.fixture
def prometheus(house: Any, tmp_path: Path) -> Iterator[Prometheus]:
    """The server on a port of its own, with a read-only key to the dashboard; ended by its pid."""
    words = [
        program("prometheus"),
        f"--config.file={configured(tmp_path, house.url, house.keys.make('read-only'))}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
        "--web.listen-address=127.0.0.1:0",
    ]
    log = tmp_path / "prometheus.log"
    with log.open("w") as written:
        process = subprocess.Popen(words, stderr=written, stdout=written)
    try:
        (port,) = until(
            "it listens", lambda: re.findall(r'"Listening on" address=\S+:(\d+)', log.read_text())
        )
        made = Prometheus(f"http://127.0.0.1:{port}")
        yield made
        made.close()
    finally:
        process.terminate()
        process.wait(START_S_MAX)


def asked_by_the_board() -> list[str]:
    panels = json.loads(BOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def a_calm_view(make: Any, step: int) -> View:
    """All that the manager can show, with nothing wrong, of this moment."""
    job = make.job(step=step, preemptions=0, steps_lost=0)
    return make.view(jobs=(job,), at_s=time.time())


def a_sick_view(make: Any) -> View:
    """What each rule is about, in one view that is ten minutes old."""
    calm = make.view()
    jobs = (
        make.job(preemptions=12, steps_lost=5, spent_usd=0.95),
        make.job(id="still-01"),
        make.job(id="waits-01", status="RECOVERING"),
        make.job(id="wrong-01", status="FAILED"),
    )
    cost = msgspec.structs.replace(calm.cost, spent_usd=4.9)
    return msgspec.structs.replace(calm, jobs=jobs, cost=cost, at_s=time.time() - 600)


@pytest.mark.processes
def test_a_real_prometheus_has_every_number_and_raises_every_alert(prometheus, house, make):
    """Each expression of the dashboard has a value and no rule is met; then everything is wrong, and each is."""
    step = itertools.count()

    def calm() -> bool:
        house.source.now = a_calm_view(make, next(step))
        targets = prometheus.get("targets")["activeTargets"]
        if [target["health"] for target in targets] != ["up"]:
            return False
        return all(map(prometheus.values, asked_by_the_board())) and set(
            prometheus.states().items()
        ) == {(name, "inactive") for name in ALERTS}

    until("the target is up, every panel has a value, and nothing is wrong", calm)
    known = {name for name in prometheus.get("label/__name__/values") if name.startswith("spot_")}
    assert known == metrics.names()
    kinds = {name: one[0]["type"] for name, one in prometheus.get("metadata").items()}
    assert all(kinds[name] == metrics.kind_of(name) for name in known)
    assert prometheus.values("sum(spot_machines)") == [4]

    house.source.now = a_sick_view(make)
    due = {name: "pending" if "for" in rule else "firing" for name, rule in ALERTS.items()}
    until("every alert is raised, or waits for its time", lambda: prometheus.states() == due)


@pytest.mark.processes
def test_a_manager_that_is_away_is_one_alert(prometheus, house, make):
    """Without a view there is `spot_up 0`, which is the rule's other half."""
    house.source.now = None
    until("it is seen", lambda: prometheus.values("spot_up") == [0])
    until("the rule is met", lambda: prometheus.states()["ManagerSilent"] == "pending")


# For each rule: series by the minute, in Prometheus' own notation (`0+1x9`: from 0, nine times one more), the minutes
# at which it is silent, and the one at which it is raised.
COURSES: dict[str, tuple[dict[str, str], list[int], int]] = {
    "ManagerSilent": ({"spot_up": "1 1 1 0x9"}, [2, 4], 5),
    "BudgetNearlySpent": (
        {
            "spot_spent_usd": "7 7 9x20",
            "spot_reserved_usd": "0.5x22",
            "spot_budget_usd": "10x22",
        },
        [1, 6],
        7,
    ),
    "JobBudgetNearlySpent": (
        {
            'spot_job_spent_usd{job="a"}': "7 9.5x30",
            'spot_job_budget_usd{job="a"}': "10x31",
            'spot_job_machines{job="a"}': "1x9 0x22",
        },
        [0, 5, 12],
        6,
    ),
    "JobFailed": (
        {'spot_job_status{job="a",status="FAILED"}': "0 0 1x9"},
        [1],
        2,
    ),
    "JobStandsStill": (
        {
            'spot_job_status{job="a",status="RUNNING"}': "1x99",
            'spot_job_step{job="a"}': "0+1x20 20x78",
        },
        [30, 49, 59],
        60,
    ),
    "JobWaitsForMachines": (
        {'spot_job_status{job="a",status="RECOVERING"}': "0 1x60"},
        [0, 30],
        31,
    ),
    "ManyMachinesTaken": (
        {'spot_job_preemptions_total{job="a"}': "0x60 5x30 20x90"},
        [60, 80, 155],
        95,
    ),
    "StepsLost": ({'spot_job_steps_lost_total{job="a"}': "3x60 4x90"}, [50, 130], 70),
}


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_is_raised_when_its_time_has_come_and_not_before(alert, tmp_path):
    """Prometheus' own evaluation, on virtual time: the windows and waits of the rules as they stand."""
    series, silent, raised = COURSES[alert]
    rule = ALERTS[alert]
    labels = {} if "{" not in "".join(series) else {"job": "a"}
    for status in re.findall(r'status="(\w+)"', "".join(series)):
        labels["status"] = status
    words = {
        key: said.replace("{{ $labels.job }}", "a") for key, said in rule["annotations"].items()
    }
    known = {"exp_labels": {**rule["labels"], **labels}, "exp_annotations": words}
    looks = [(minute, []) for minute in silent] + [(raised, [known])]
    course = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": v} for name, v in series.items()],
                "alert_rule_test": [
                    {"eval_time": f"{minute}m", "alertname": alert, "exp_alerts": expected}
                    for minute, expected in looks
                ],
            }
        ],
    }
    (tmp_path / "course.yml").write_text(yaml.safe_dump(course))
    assert "SUCCESS" in promtool("test", "rules", str(tmp_path / "course.yml"))


def test_promtool_accepts_rules_settings_and_every_metric(house, make, tmp_path):
    """Its linter, too, has nothing to say about names and texts."""
    assert f"{len(ALERTS)} rules found" in promtool("check", "rules", str(RULES))
    settings = configured(tmp_path, house.url, "a key")
    assert "is valid prometheus config" in promtool("check", "config", str(settings))
    assert promtool("check", "metrics", said=metrics.text(make.view())) == ""


def promtool(*words: str, said: str = "") -> str:
    done = subprocess.run([program("promtool"), *words], input=said, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
