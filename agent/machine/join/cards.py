"""Count the machine's NVIDIA cards: those on its bus, and those that a driver serves."""

import subprocess
from pathlib import Path

NVIDIA = "0x10de"
DISPLAYS = ("0x0300", "0x0302")  # classes of what computes; a card's sound is a device, too


def on_bus(system: Path = Path("/sys")) -> int:
    """Return how many cards there are, whether a driver serves them or not."""
    found = 0
    for device in (system / "bus/pci/devices").glob("*"):
        try:
            vendor = (device / "vendor").read_text().strip()
            kind = (device / "class").read_text()[:6]
        except OSError:
            continue
        found += vendor == NVIDIA and kind in DISPLAYS
    return found


def served(driver: Path = Path("/proc/driver/nvidia")) -> int:
    """Return how many cards the driver lists; there may be no driver, or no tool of it."""
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError):
        return len(list((driver / "gpus").glob("*")))
    return sum(line.startswith("GPU") for line in listed.stdout.splitlines())
