"""Same seed, same journal; and a journal replays to the decisions that are in it."""

import asyncio
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from orchestrator.actions import Note
from orchestrator.loop import run_now
from orchestrator.replay import export, read_incident, replay
from orchestrator.simulated import simulate
from orchestrator.simulated.restarts import live
from orchestrator.simulated.runs import DigestJournal
from orchestrator.simulated.scenario import wild
from orchestrator.state import State
from orchestrator.world import Diverged, Entry, MemoryJournal, encode_state, read_journal

SIMULATE = (
    "from orchestrator.simulated import simulate;"
    "print(simulate(0.5, 30, 7, faults='mixed').journal_sha256)"
)


def journal_of(tmp_path: Path, days: float = 0.2) -> Path:
    path = tmp_path / "journal.jsonl"
    simulate(days, 12, 7, path, faults="mixed")
    return path


def test_the_same_seed_gives_the_same_journal_under_any_hash_seed():
    """Two processes with different hash seeds write byte-identical journals."""
    digests = {
        subprocess.run(
            [sys.executable, "-c", SIMULATE],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "4242")
    }
    assert len(digests) == 1


def test_another_seed_gives_another_journal():
    """The digest is not blind."""
    assert simulate(0.05, 4, 1).journal_sha256 != simulate(0.05, 4, 2).journal_sha256


def test_the_report_is_that_of_the_written_journal(tmp_path):
    """What is reported is what stands in the file: its digest, its size, its entries."""
    path = tmp_path / "journal.jsonl"
    report = simulate(0.1, 6, 5, path)
    data = path.read_bytes()
    assert report.journal_sha256 == hashlib.sha256(data).hexdigest()
    assert (report.journal_bytes, report.events) == (len(data), data.count(b"\n"))
    assert report.launches > 0
    assert report.spent_usd < report.on_demand_usd


@pytest.mark.parametrize(
    ("days", "instances", "faults"), [(0.0, 5, "none"), (1.0, 0, "none"), (1.0, 5, "odd")]
)
def test_a_simulation_of_nothing_is_refused(days, instances, faults):
    """A scenario without time or machines, or with unknown faults, is one clear line."""
    with pytest.raises(ValueError, match=r"^simulate: [^\n]+$"):
        simulate(days, instances, 1, faults=faults)


def test_a_journal_replays_to_identical_actions(tmp_path):
    """Every decision of a simulated bad day is made again, to the last word."""
    entries = read_journal(journal_of(tmp_path))
    assert len(entries) > 500
    state = replay(entries)
    assert state.epoch == 1
    assert state.jobs["job-0"].progress.step > 0


def test_a_changed_decision_is_named(tmp_path):
    """Replay stops at the first entry that is decided otherwise, and says which and how."""
    entries = read_journal(journal_of(tmp_path, days=0.05))
    nth = next(n for n, entry in enumerate(entries) if n > 50 and entry.actions)
    extra = Note(who="nobody", because="this was never said")
    entries[nth] = Entry(event=entries[nth].event, actions=(*entries[nth].actions, extra))
    with pytest.raises(Diverged, match=rf"^entry {nth + 1} \(.*this was never said"):
        replay(entries)


def test_a_missing_action_at_the_very_end_is_named(tmp_path):
    """The last entry is compared too."""
    entries = read_journal(journal_of(tmp_path, days=0.05))
    last = max(n for n, entry in enumerate(entries) if entry.actions)
    cut = [*entries[:last], Entry(event=entries[last].event, actions=())]
    with pytest.raises(Diverged, match=rf"^entry {last + 1} .*the journal has nothing more"):
        replay(cut)


def test_an_incident_that_begins_with_a_snapshot_replays(tmp_path):
    """A journal that was trimmed is exported with the state that its first entry found."""
    entries = read_journal(journal_of(tmp_path))
    journal = MemoryJournal()
    state = replay(entries[:300])

    async def fill() -> None:
        await journal.snapshot(state)
        for entry in entries[300:]:
            await journal.append(entry.event, entry.actions)

    asyncio.run(fill())
    path = tmp_path / "incident.jsonl"
    assert run_now(export(journal, path)) == len(entries) - 300
    beginning, rest = read_incident(path)
    assert beginning is not None
    assert encode_state(replay(rest, beginning)) == encode_state(replay(entries))


def test_every_life_of_a_manager_is_in_its_journal():
    """A journal over many deaths of the manager replays from its first event to its last."""
    journal = MemoryJournal()
    story = live(wild(6), keep=journal)
    assert story.lives > 1
    assert len(journal.entries) == story.events
    assert replay(journal.entries).stopped


@pytest.mark.parametrize("line", [b"{}\n", b"garbage\n", b'{"state":{"epoch":"one"}}\n'])
def test_what_is_no_journal_is_one_line(tmp_path, line):
    """The file, the line number and what is wrong with it."""
    path = tmp_path / "journal.jsonl"
    path.write_bytes(line)
    with pytest.raises(ValueError, match=r"^[^\n]*journal\.jsonl:1: not [^\n]+$"):
        read_incident(path)


def test_a_torn_last_line_is_left_out(tmp_path):
    """A crash in the middle of a write costs the entry that was not acknowledged."""
    path = journal_of(tmp_path, days=0.01)
    whole = read_journal(path)
    path.write_bytes(path.read_bytes()[:-5])
    assert len(read_journal(path)) == len(whole) - 1


def test_the_digest_journal_remembers_nothing_else():
    """It is for simulations of any length: memory does not grow with them."""
    state, entries = run_now(DigestJournal().load())
    assert state is None
    assert not entries
    assert msgspec.json.decode(encode_state(State()), type=State) == State()


def test_whoever_waits_for_a_month_can_be_told_each_day():
    """Each that begins, in order, and none behind the last."""
    days: list[int] = []
    simulate(days=2.5, instances=2, seed=1, day=days.append)
    assert days == [1, 2, 3]
