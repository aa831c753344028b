"""The device of `late.cpp`: built once for each version of torch, and found by torch itself as any backend is.

LATE=path/to/late.so PYTHONPATH=a/folder/with/this/plugged/in python script.py
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
import types
from pathlib import Path

DEVICES = 2
SOURCE = Path(__file__).with_name("late.cpp")
VARIABLE = "LATE"


def load() -> None:
    """What torch calls when it is imported."""
    import torch

    torch.ops.load_library(os.environ[VARIABLE])
    torch.utils.rename_privateuse1_backend("late")
    torch._register_device_module("late", _module())
    torch.utils.generate_methods_for_privateuse1_backend()
    # As on the devices that torch knows by name, `.to("late")` leaves a parameter the same object, so ties hold.
    torch.__future__.set_swap_module_params_on_conversion(True)


def _module() -> types.ModuleType:
    """What torch expects in `torch.late`."""
    import torch

    late = types.ModuleType("torch.late")
    ops = torch.ops.late

    def index(device: object = None) -> int:
        found = torch.device(device).index if isinstance(device, str) else device
        found = getattr(found, "index", found)
        return torch.accelerator.current_device_index() if found is None else found

    def manual_seed_all(seed: int) -> None:
        for each in range(DEVICES):
            ops.seed(seed, each)

    late.is_available = lambda: True
    late.device_count = lambda: DEVICES
    late.current_device = torch.accelerator.current_device_index
    late._is_in_bad_fork = lambda: False
    late.manual_seed_all = manual_seed_all
    late.get_rng_state = lambda device=None: ops.get_state(index(device))
    late.set_rng_state = lambda state, device=None: ops.set_state(state, index(device))
    late.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    late.waited = ops.waited
    return late


def built() -> Path:
    """The library; made now if there is none for this source and this torch."""
    import torch
    from compiler import compiler

    root = Path(torch.__file__).parent
    mark = hashlib.blake2b(SOURCE.read_bytes() + torch.__version__.encode(), digest_size=8)
    folder = Path(tempfile.gettempdir()) / f"late-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"late-{mark.hexdigest()}.so"
    if not library.exists():
        draft = library.with_suffix(f".{os.getpid()}")
        headers = [root / "include", root / "include/torch/csrc/api/include"]
        command = [compiler(), "-std=c++20", "-O1", "-w", "-shared", "-fPIC", str(SOURCE)]
        command += [word for each in headers for word in ("-isystem", str(each))]
        command += [f"-L{root / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10", "-o", str(draft)]
        subprocess.run(command, check=True)
        draft.replace(library)
    return library


def plugged_in(folder: Path) -> dict[str, str]:
    """The variables with which a process of Python has the device. `folder` is empty, and stays."""
    about = folder / "late_device-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: late-device\nVersion: 0\n")
    (about / "entry_points.txt").write_text("[torch.backends]\nlate = late:load\n")
    shutil.copy(__file__, folder)
    paths = [str(folder), os.environ.get("PYTHONPATH", "")]
    return {VARIABLE: str(built()), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
