"""Logs of processes that flood them stay within their bound."""

import os

import pytest

from cloud.log_bounds import bound_logs


@pytest.mark.parametrize("flags", [os.O_APPEND, 0], ids=["appended", "written at its place"])
def test_log_that_is_written_on_takes_no_more_than_its_bound(tmp_path, flags):
    """The process that floods it goes on; what was written last can be read."""
    log = tmp_path / "console.log"
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | flags)
    for number in range(50):
        os.write(handle, b"%7d\n" % number * 8192)
        bound_logs([log, tmp_path / "none"], 1 << 17)
    os.close(handle)
    assert sum(file.stat().st_blocks * 512 for file in tmp_path.iterdir()) <= 1 << 18
    assert sorted(file.name for file in tmp_path.iterdir()) == ["console.log", "console.log.old"]
    last = (tmp_path / "console.log.old").read_bytes() + log.read_bytes()
    assert b"     49\n" in last


def test_link_in_place_of_a_log_is_left_alone(tmp_path):
    """A script on the machine may put one there, to a file that is not its own."""
    precious = tmp_path / "precious"
    precious.write_bytes(bytes(range(256)) * 4096)
    (tmp_path / "a.log").symlink_to(precious)
    (tmp_path / "b.log").mkdir()
    bound_logs(tmp_path.glob("*.log"), 1000)
    assert precious.stat().st_size == 1 << 20
    assert len(list(tmp_path.iterdir())) == 3
