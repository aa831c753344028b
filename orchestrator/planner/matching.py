"""The cheapest matching of rows to columns: scipy's, loaded without the rest of its package.

Importing `scipy.optimize` takes a quarter of a second, at each start of a manager. The function is
in an extension module that needs numpy alone.
"""

from collections.abc import Callable
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from orchestrator.planner.compiled import Codes, Reals

NAME = "_lsap"


def _extension() -> Any:
    package = find_spec("scipy")
    assert package is not None
    assert package.submodule_search_locations is not None
    folder = Path(package.submodule_search_locations[0], "optimize")
    (file,) = folder.glob(f"{NAME}.*so")
    spec = spec_from_file_location(f"scipy.optimize.{NAME}", file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


cheapest: Callable[[Reals], tuple[Codes, Codes]] = _extension().linear_sum_assignment
