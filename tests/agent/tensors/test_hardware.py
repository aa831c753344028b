"""The hardware key: what decides how a worker rounds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from agent.tensors import device
from agent.tensors.device import CPU, hardware

SAID = """\
NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 01:44:30 UTC 2024
GCC version:  gcc version 12.3.0
"""
KEY = "from agent.tensors.device import CPU, hardware; print(hardware(CPU))"


def key_of_a_process(**variables: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-c", KEY],
        env={**os.environ, **variables},
        capture_output=True,
        check=True,
    )
    return ran.stdout.decode().strip()


def test_a_processor_whose_kernels_are_others_has_another_key() -> None:
    """Torch takes other kernels with `ATEN_CPU_CAPABILITY=default`, and they add in another order."""
    assert key_of_a_process() == hardware(CPU) != ""
    assert key_of_a_process(ATEN_CPU_CAPABILITY="default") != hardware(CPU)


@pytest.mark.parametrize(("said", "driver"), [(SAID, "driver 550.54.14"), (None, "driver")])
def test_a_card_is_known_by_its_driver_and_libraries(
    said: str | None, driver: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file in which the driver says what it is, or none."""
    if said is not None:
        (tmp_path / "version").write_text(said)
    monkeypatch.setattr(device, "NVIDIA", tmp_path / "version")
    device._accelerator.cache_clear()
    name, its, torchs, *_ = device._accelerator("Tesla T4").split("; ")
    device._accelerator.cache_clear()
    assert (name, its, torchs) == ("Tesla T4", driver, f"torch {torch.__version__}")
