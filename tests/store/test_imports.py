"""The keeper needs no torch, so what it uses of the store must not bring it in."""

import subprocess
import sys

import pytest

MODULES = [
    "archive",
    "errors",
    "encoding.format",
    "memory",
    "places.objects",
    "reading",
    "places.sinks",
    "encoding.values",
]


@pytest.mark.processes
def test_the_keepers_half_of_the_store_brings_no_torch_and_no_obstore():
    """A fresh interpreter that imports all of it has loaded neither."""
    names = ", ".join(f"agent.store.{name}" for name in MODULES)
    program = f"import sys, {names}\nprint({{'torch', 'obstore'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("set()\n", "")
