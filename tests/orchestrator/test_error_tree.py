"""The error tree of the orchestrator: complete, and drawn where its base is."""

import importlib
import pkgutil

import orchestrator
from orchestrator import errors
from orchestrator.planner.errors import MorphError

NO_ERRORS = {"orchestrator.simulated"}  # its exceptions end a simulated life, or fail a test


def test_every_error_is_in_the_drawn_tree():
    found = set()
    for module in pkgutil.walk_packages(orchestrator.__path__, "orchestrator."):
        if module.name.endswith("__main__") or module.name.startswith(tuple(NO_ERRORS)):
            continue
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, type) and issubclass(value, BaseException):
                found.add(value)
    ours = {kind for kind in found if kind.__module__.startswith("orchestrator.")}
    assert [kind for kind in ours if not issubclass(kind, errors.OrchestratorError)] == []
    names = {kind.__name__ for kind in ours if not issubclass(kind, MorphError)} | {"MorphError"}
    drawn = {line.strip("│├└─ ").split(" ")[0] for line in errors.__doc__.splitlines()[2:]}
    assert names == drawn - {""}
