"""What a script logs is sent to a tracker once for each step, whatever is started again in between."""

import importlib.util
import os
import sqlite3
import struct
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from agent.keys import metrics_key
from orchestrator.cli.tools import trackers
from orchestrator.cli.tools.trackers import TensorBoard, last_step
from orchestrator.redis_client import connect


def records(folder: Path) -> list[bytes]:
    """The events of all files, with their checksums looked at by a second implementation."""
    found = []
    for file in sorted(folder.glob("events.out.tfevents.*")):
        data, at = file.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            event = data[at + 12 : at + 12 + length]
            for piece, where in ((data[at : at + 8], at + 8), (event, at + 12 + length)):
                crc = slow_crc32c(piece)
                masked = ((crc >> 15 | crc << 17 & 0xFFFFFFFF) + 0xA282EAD8) & 0xFFFFFFFF
                assert struct.unpack_from("<I", data, where) == (masked,)
            found.append(event)
            at += 16 + length
    return found


def slow_crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_a_file_is_what_tensorboard_reads(tmp_path):
    made = TensorBoard(tmp_path, "job")
    made.tell(300, {"loss": 0.5})
    made.close()
    head, event = records(tmp_path / "job")
    assert b"brain.Event:2" in head
    value = b"\x0a\x04loss\x15" + struct.pack("<f", 0.5)
    assert event[9:] == b"\x10\xac\x02" + b"\x2a\x0d" + b"\x0a\x0b" + value


@pytest.mark.parametrize("torn", [0, 1, 9, 20])
def test_a_torn_end_is_passed_over(tmp_path, torn):
    made = TensorBoard(tmp_path, "job")
    for step in (0, 7, 1_000_000):
        made.tell(step, {"loss": 0.5})
    made.close()
    (file,) = (tmp_path / "job").iterdir()
    file.write_bytes(file.read_bytes()[: -torn or None])
    assert last_step(file) == (7 if torn else 1_000_000)
    again = TensorBoard(tmp_path, "job")
    again.close()
    assert again.last() == last_step(file)


@pytest.mark.processes
def test_each_step_is_sent_once_through_a_recovery_and_a_second_start(housed):
    """Steps that are done again are logged again, and are no news; a new start goes on where the file ends."""
    name = housed("submit", housed.script("logs.py"), "--json").json["id"]
    redis = connect(housed.client().house().redis_url)

    def log(*steps: int) -> None:
        for step in steps:
            numbers = msgspec.msgpack.encode({"loss": 1.0 / (1 + step)})
            redis.xadd(metrics_key(name), {"step": step, "numbers": numbers})

    to = f"tensorboard:{housed.folder / 'boards'}"
    track = ("tools", "track", name, "--to", to, "--once", "--json")
    log(0, 1, 2, 1, 2, 3)
    assert housed(*track).json["sent"] == 4
    log(3, 4)
    assert housed(*track).json["sent"] == 1
    assert housed(*track).json["sent"] == 0
    redis.close()
    steps = [event[10] for event in records(housed.folder / "boards" / name) if b"loss" in event]
    assert steps == [0, 1, 2, 3, 4]


@pytest.mark.processes
def test_what_is_no_tracker_is_said(housed, tmp_path):
    answer = housed("tools", "track", "--to", "carrier-pigeon:home")
    assert answer.code in (1, 2)
    assert answer.err
    with pytest.raises(trackers.CommandError, match=r"write tensorboard:\.\.\., wandb:"):
        trackers.open_tracker("carrier-pigeon:home", "job", tmp_path)


# Steps are told from where the tracker says; the process dies at once with what is not written yet.
TELLS = """
import os, sys
from pathlib import Path
from orchestrator.cli.tools.trackers import open_tracker

made = open_tracker("trackio:spot", "gpt-1", Path("notes"))
for step in range(made.last() + 1, int(sys.argv[1])):
    made.tell(step, {"loss": 1.0 / (1 + step)})
if sys.argv[2] == "dies":
    os._exit(9)
made.close()
"""


@pytest.mark.processes
def test_trackio_has_each_step_once_as_one_run_after_kills(tmp_path):
    """The real package, whose own file is looked at; nothing of ours notes where it was.

    It is no part of `dev`: it brings uvloop, which Ray's actors would take as soon as it is there.
    """
    if importlib.util.find_spec("trackio") is None:
        pytest.skip(
            "needs the package `trackio` (pip install trackio==0.43.0, not beside the others)"
        )
    env = {**os.environ, "TRACKIO_DIR": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    for steps, end in ((3, "ends"), (6, "dies"), (8, "ends"), (8, "ends")):
        words = [sys.executable, "-c", TELLS, str(steps), end]
        done = subprocess.run(words, env=env, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == (9 if end == "dies" else 0), done.stderr
        assert done.stdout == "", "an answer in JSON stands alone"
    (file,) = tmp_path.glob("spot*.db")
    with sqlite3.connect(file) as books:
        found = books.execute("SELECT run_id, run_name, step, metrics FROM metrics ORDER BY id")
        rows = found.fetchall()
    books.close()
    assert [step for _, _, step, _ in rows] == list(range(8))
    assert len({run for run, *_ in rows}) == 1
    assert {name for _, name, *_ in rows} == {"gpt-1"}
    assert [msgspec.json.decode(numbers)["loss"] for *_, numbers in rows] == [
        1.0 / (1 + step) for step in range(8)
    ]
