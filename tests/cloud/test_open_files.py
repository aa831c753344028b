"""The limit of open files, and what is held in reserve below it."""

import subprocess
import sys

LIMITED = """
import os, resource
from cloud.open_files import Reserve, limit, raise_limit
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, min(hard, 256)))
print(raise_limit() == limit() == min(hard, 256))
reserve = Reserve(3)
taken = []
try:
    while True:
        taken.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    print("none left")
print([reserve.give() for _ in range(4)])
taken += [os.open("/dev/null", os.O_RDONLY) for _ in range(2)]
reserve.fill()
print([reserve.give() for _ in range(2)])
"""


def test_the_limit_is_raised_and_a_reserve_is_there_when_no_file_is_left() -> None:
    """What was given up can be opened; what is free again is taken back as far as there is some."""
    ran = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True)
    assert ran.stdout.splitlines() == [
        "True",
        "none left",
        "[True, True, True, False]",
        "[True, False]",
    ], ran.stderr
