"""How many files a process may have open, seen in a process with a shell's default limit."""

import resource
import subprocess
import sys

import pytest

PROGRAM = "from cloud.limits import raise_file_limit as r; print(r(), r())"


@pytest.mark.parametrize(("hard", "reached"), [(512, 512), (900, 900)])
def test_file_limit_is_raised_to_what_is_allowed(hard, reached):
    def narrow():
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))

    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, preexec_fn=narrow
    )
    assert ran.stdout.split() == [str(reached)] * 2, ran.stderr
