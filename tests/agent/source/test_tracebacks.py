"""What a failed script is said to have died of: the last line of its traceback."""

import pytest

from agent.source.tracebacks import traceback_of
from orchestrator.formatting import reason_of

CUDA = """CUDA error: device-side assert triggered
CUDA kernel errors might be asynchronously reported at some other API call.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1

Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (
            "raise RuntimeError(CUDA)",
            "RuntimeError: CUDA error: device-side assert triggered CUDA ker",
        ),
        (
            "raise ExceptionGroup('two', [ValueError('a'), TypeError('b')])",
            "ExceptionGroup: two (2 sub",
        ),
        ("raise RuntimeError('boom ' + 'y' * 100_000)", "RuntimeError: boom yyy"),
    ],
)
def test_an_error_of_many_lines_is_told_in_one(script, said):
    """Its last line was "Compile with `TORCH_USE_CUDA_DSA`", or that of a frame."""
    told = traceback_of(_error_of(script))
    assert reason_of(told[-60_000:]).startswith(said)


@pytest.mark.parametrize("script", ["1 / 0", "raise ValueError('a  b ')", "raise KeyError", "f("])
def test_an_error_of_one_line_is_told_once(script):
    error = _error_of(script)
    assert traceback_of(error).count(type(error).__name__) == 1


def _error_of(script: str) -> Exception:
    with pytest.raises(Exception) as raised:
        exec(script, {"CUDA": CUDA})
    return raised.value
