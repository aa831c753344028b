"""The device that a worker computes on. On a CPU the calls here have nothing to do.

Only torch's generic calls (`torch.accelerator`) are used, so that no kind of accelerator is named.
A device runs its work some time after the request, so code that measures a time or reads memory has
to wait for it.
"""

import functools
import hashlib
import os
import pickle
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from ctypes import string_at
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from agent.errors import Misuse

CPU = torch.device("cpu")
MT19937_BYTES = 625 * 4  # 624 words, and how many of them are used up
KIND = (
    *("vendor_id", "cpu family", "model", "model name", "stepping"),
    *("CPU implementer", "CPU part", "CPU variant"),
)
NVIDIA = Path("/proc/driver/nvidia/version")
DRIVER = re.compile(r"\s(\d+(?:\.\d+)+)\s")
NUMBERED = re.compile(r"device\(type='(\w+)', index=\d+\)")


def device_of(module: torch.nn.Module) -> torch.device:
    """Return the device of a model."""
    return where([*module.parameters(), *module.buffers()])


def where(tensors: Iterable[torch.Tensor | None]) -> torch.device:
    """Return the device of the first of these tensors that is on one, or else the CPU."""
    found = (each for each in tensors if each is not None and not each.is_cpu and not each.is_meta)
    return next((tensor.device for tensor in found), CPU)


def home(tensors: Iterable[torch.Tensor]) -> torch.device:
    """Return the one device that these are trained on; some of them may stay on the CPU."""
    found = {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}
    if len(found) > 1:
        names = " and on ".join(sorted(map(str, found)))
        raise Misuse(
            f"Session: the model lies on {names}; a worker has one device. Put all of it on one, and have more "
            "workers instead: a model that is too large for one is cut into stages"
        )
    return next(iter(found), CPU)


def rounding(device: torch.device) -> str:
    """Return a string shared by workers that compute the same bits from the same numbers.

    It is empty for an accelerator, because that is not known of accelerators.
    """
    return _cpu() if device.type == "cpu" else ""


def hardware(device: torch.device) -> str:
    """Return the hardware key of a device: what decides how it rounds, in parts.

    Unlike keys may compute other bits. Of accelerators it is not known that equal keys compute the
    same, so bits are compared by `rounding` only.
    """
    return rounding(device) if device.type == "cpu" else _accelerator(name_of(device))


@functools.cache
def _accelerator(name: str) -> str:
    """Describe an accelerator by its name, its driver, and the libraries that choose its kernels."""
    try:
        told = NVIDIA.read_text().partition("\n")[0]
    except OSError:
        told = ""
    driver = found[1] if (found := DRIVER.search(told)) else ""
    cudnn: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    built = (torch.version.cuda, torch.version.hip, cudnn)
    libraries = (f"torch {torch.__version__}", *(str(each) for each in built if each is not None))
    return "; ".join((name, f"driver {driver}".strip(), *libraries))


@functools.cache
def _cpu() -> str:
    """Describe the CPU's model, because libraries choose their kernels by it."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return ""
    told: dict[str, str] = dict(re.findall(r"^(.+?)\s*: (.*)$", first, re.MULTILINE))
    kind = [told[each] for each in KIND if each in told]
    flags = hashlib.sha256(str(told.get("flags", told.get("Features"))).encode()).hexdigest()[:8]
    known = (torch.__version__, np.__version__, torch.backends.cpu.get_cpu_capability())
    return "; ".join((*known, *kind, flags)) if kind else ""


def take(slot: int) -> None:
    """Make the device of this slot the one that a script's "cuda" without a number names."""
    if torch.accelerator.is_available() and (count := torch.accelerator.device_count()) > 1:
        torch.accelerator.set_device_index(slot % count)


def settle(device: torch.device) -> None:
    """Return when the device has done all work requested so far."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def clock_of(device: torch.device, clock: Callable[[], float]) -> Callable[[], float]:
    """Return a clock that shows when the device finished, not when work was requested."""
    if device.type == "cpu":
        return clock

    def settled() -> float:
        settle(device)
        return clock()

    return settled


def number_of(loss: torch.Tensor) -> float | torch.Tensor:
    """Return a loss as a float64; if it is on a device, without waiting for it."""
    one = loss.detach()
    return float(one) if one.is_cpu else one.reshape(()).to(torch.float64)


def anywhere(code: str) -> str:
    """Return code without the numbers of its devices, which differ between workers."""
    return NUMBERED.sub(r"device(type='\1')", code)


def name_of(device: torch.device) -> str:
    """Return the name that devices of one kind have in common."""
    module = torch.get_device_module(device)
    return (
        str(module.get_device_name(device)) if hasattr(module, "get_device_name") else device.type
    )


def memory_bytes(device: torch.device) -> float:
    """Return the memory of the device, used or not, or of the machine if it does not say."""
    if device != CPU:
        with suppress(RuntimeError):
            return float(torch.accelerator.get_memory_info(device)[1])
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


# --- random numbers -------------------------------------------------------------------------------------


def stream_state(device: torch.device) -> torch.Tensor:
    """Return the state of torch's random stream: the CPU's, then the device's own."""
    state = torch.get_rng_state()
    if device.type == "cpu":
        return state
    return torch.cat([state, torch.get_device_module(device).get_rng_state(device).cpu()])


@contextmanager
def stream_kept(device: torch.device) -> Iterator[None]:
    """Put torch's random stream back after what is drawn inside."""
    state = stream_state(device)
    try:
        yield
    finally:
        set_stream_state(state, device)


def set_stream_state(state: torch.Tensor, device: torch.device) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
        return
    length = torch.get_rng_state().numel()
    torch.set_rng_state(state[:length].clone())  # it reads from the storage's start
    torch.get_device_module(device).set_rng_state(state[length:].clone(), device)


def seed_python(number: int) -> None:
    """Seed the streams of Python and NumPy."""
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)
    PythonStreams.seeded = _numpy_at()


class PythonStreams:
    """Where the random streams of Python and NumPy stand now; they do not travel with a microbatch.

    NumPy takes 0.2 ms to tell its state, and two are compared for each microbatch of a stage. So its
    memory is compared. One thing lies elsewhere: the second of two normal numbers drawn together.
    Whoever takes it moves nothing else, and right after a seed there is none.
    """

    seeded: ClassVar[bytes] = b""  # the position after the last seed of ours

    def __init__(self) -> None:
        self._python, self._numpy = random.getstate(), _numpy_at()
        self._spare = None if self._numpy == self.seeded else _spare_normal()

    @property
    def moved(self) -> bool:
        """Return whether something has been drawn since, or seeded."""
        if random.getstate() != self._python or _numpy_at() != self._numpy:
            return True
        return self._spare is not None and _spare_normal() != self._spare


def _numpy_at() -> bytes:
    """Return the position of NumPy's stream, as its memory if it is the usual one."""
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]  # its stubs lack it
    if type(generator) is np.random.MT19937:
        return string_at(generator.ctypes.state_address, MT19937_BYTES)
    return pickle.dumps(generator.state)


def _spare_normal() -> float | None:
    """Return the normal number that is still to be handed out, if there is one."""
    state = np.random.get_state(legacy=False)
    return state["gauss"] if state["has_gauss"] else None


# --- time -----------------------------------------------------------------------------------------------

Mark = float | torch.Event


class DeviceWatch:
    """The host's times of events. A device records marks, whose times are read later."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._began: tuple[torch.Event, float] | None = None

    def begin(self) -> None:
        if self.device != CPU:
            event = self._event()
            event.synchronize()
            self._began = event, time.perf_counter()

    def mark(self) -> Mark:
        return time.perf_counter() if self.device == CPU else self._event()

    def seconds(self, mark: Mark) -> float:
        if isinstance(mark, float):
            return mark
        assert self._began is not None
        first, began_s = self._began
        mark.synchronize()
        return began_s + first.elapsed_time(mark) / 1e3

    def _event(self) -> torch.Event:
        event = torch.Event(self.device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self.device))
        return event
