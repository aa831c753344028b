"""The sum that all stored files and all messages carry: what was written years ago must still be right."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.checksum import crc32c


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),  # this and the next three: RFC 3720, B.4
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(reversed(range(32))), 0x113FDB5C),
    ],
)
def test_known_sums(data, expected):
    assert crc32c(0, data) == expected


@given(st.binary(max_size=5000), st.integers(0, 5000))
def test_a_sum_goes_on_behind_any_cut(data, at):
    whole = crc32c(0, data)
    assert crc32c(crc32c(0, data[:at]), memoryview(bytearray(data))[at:]) == whole
