"""Seed the random streams of torch, NumPy and Python, and put them back."""

import functools
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from agent.tensors.device import CPU, seed_python, stream_kept


@contextmanager
def kept() -> Iterator[None]:
    """Let what is seeded and drawn inside leave no trace outside."""
    python, array = random.getstate(), np.random.get_state()
    with stream_kept(_device()):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(array)


def seed(number: int) -> None:
    """Seed every stream again."""
    seed_python(number)
    # If there is only the CPU, `torch.manual_seed` takes 0.1 ms to ask for other devices.
    one = torch.default_generator.manual_seed if _device() == CPU else torch.manual_seed
    one(number >> 1)


def _device() -> torch.device:
    """Return the device whose stream a data set may draw from, without initialising one."""
    # A process that fetches ahead has no device.
    if torch.utils.data.get_worker_info() is not None or (found := _accelerator()) is None:
        return CPU
    awake = getattr(torch.get_device_module(found), "is_initialized", None)
    if awake is not None and not awake():
        return CPU
    return torch.device(found.type, torch.accelerator.current_device_index())


@functools.cache
def _accelerator() -> torch.device | None:
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
