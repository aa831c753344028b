"""What goes between a device and the host: each function of `staging_script.py`, in a process that has the device."""

import ast
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("staging_script.py")
NAMES = [
    node.name
    for node in ast.parse(SCRIPT.read_text()).body
    if isinstance(node, ast.FunctionDef) and ast.get_docstring(node)
]

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("name", NAMES)
def test_between_device_and_host(births, name, tmp_path):
    births.play([str(SCRIPT), name], tmp_path)
