"""The keys in Redis stand in one place."""

from pathlib import Path

import agent.keys
import orchestrator

PRODUCT = [Path(package.__file__).parent for package in (agent, orchestrator)]


def test_no_other_module_writes_a_key():
    modules = [path for folder in PRODUCT for path in folder.rglob("*.py")]
    writing = {path.name for path in modules if '"orch:' in path.read_text()}
    assert writing == {Path(agent.keys.__file__).name}


def test_keys_of_two_jobs_differ_and_no_key_is_there_twice():
    alone = [value for value in vars(agent.keys).values() if str(value).startswith("orch:")]
    made = [value for name, value in vars(agent.keys).items() if name.endswith("_key")]
    keys = [*alone, *(make(job) for make in made for job in ("a", "b"))]
    assert len(keys) == len(set(keys)) > 30
