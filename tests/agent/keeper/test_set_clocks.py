"""The wall clock is set while a keeper runs: what it counts stays as it was."""

import time
from pathlib import Path
from typing import Any

import pytest
from commit_logs import MemoryCommitLog
from crews import until

from agent.keeper.commits import History
from agent.keeper.storage.vault import Place, Vault
from agent.keeper.tables import Tables
from agent.messages import JobOrder
from agent.protocol import Serving, Shape
from cloud.clock import CLOCK

SERVING = Serving(
    items=10,
    blocks=2,
    grains=1,
    batches=1,
    partitions=2,
    tables=(Shape("rows", 5, 2, 4, "float32"),),
)


class Nobody:
    """The job of tables, without workers."""

    def present(self) -> dict[str, Any]:
        return {}

    def broken(self, why: str, **_: Any) -> None:
        raise AssertionError(why)


@pytest.mark.parametrize("hours", [-24, -1, 1, 24])
def test_tables_are_warned_for_as_long_as_the_notice_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    """A warning that seems to be over already would count as a failure, and cost the clock at hand."""
    owner: Any = Nobody()
    order = JobOrder(job="job", script="train.py", script_sha="")
    vault = Vault(order, Place(checkpoints=tmp_path), lambda _: None)
    history = History(MemoryCommitLog(), "job")
    tables = Tables(SERVING, history, tmp_path / "tables", owner, vault, 60.0)
    warned: list[tuple[list[str], float]] = []
    monkeypatch.setattr(tables, "_evict", lambda *given: warned.append(given))
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() + 3600 * hours)
    tables.notice(["one"], CLOCK.now_s() + 120.0)
    until("the warning", lambda: warned)
    tables.close()
    ((who, warning_s),) = warned
    assert who == ["one"]
    assert 0.0 < warning_s <= 120.0
