"""What a script prints is bounded, cheap and harmless, however it prints."""

import io
import logging
import sys

import pytest

from agent.machine.console import (
    BURST_CHARS,
    CHARS_PER_S,
    LINE_CHARS_MAX,
    WAITING_MAX,
    Lines,
    Stream,
)
from agent.machine.worker_process import keep_own_words_apart
from agent.output.controls import harmless

BAR = "\r{:3}%|" + 60 * "#" + "| {:5}/20000"


class Taken(list[str]):
    """The lines that were sent."""

    def send(self, batch: tuple[str, ...]) -> None:
        self.extend(batch)


def printed(*texts: str) -> list[str]:
    lines: list[str] = []
    stream = Stream(lines.append)
    for text in texts:
        stream.write(text)
    stream.finish()
    return lines


@pytest.mark.parametrize(
    ("texts", "lines"),
    [
        (["a", "b\nc", "\n"], ["ab", "c"]),
        (["windows\r\n", "next\r", "\n"], ["windows", "next"]),
        (["\r10%", "\r20%", "\n"], ["20%"]),
        (["10%\r", "20%\r", "done\n"], ["done"]),
        (["a long one\rshort\r\r\n"], ["short"]),
        (["begun\r", "", "new", "er"], ["newer"]),
        (["first\rsecond", " and more\n"], ["second and more"]),
    ],
)
def test_carriage_return_begins_the_line_anew(texts: list[str], lines: list[str]) -> None:
    """As on a terminal, whatever pieces the text comes in."""
    assert printed(*texts) == lines


def test_a_progress_bar_costs_what_its_updates_cost() -> None:
    """A write copies what is held of the line, and of twenty thousand updates no more than one is held."""
    stream = Stream(lambda _: None)
    for update in range(20_000):
        stream.write(BAR.format(update // 200, update))
        assert len(stream._begun) <= len(BAR) + 10


def test_a_line_that_never_ends_is_held_to_its_length() -> None:
    """Its beginning is passed on, with how much is left out."""
    taken: list[str] = []
    stream = Stream(taken.append)
    for _ in range(20_000):
        stream.write(80 * "x")
        assert len(stream._begun) <= LINE_CHARS_MAX
    stream.finish()
    (line,) = taken
    assert len(line) <= LINE_CHARS_MAX
    kept = line.count("x")
    assert line == kept * "x" + f" ... and {20_000 * 80 - kept:,} characters"


def test_a_line_of_any_size_is_cut_before_it_is_sent() -> None:
    """A message has to hold a hundred lines: 20 MB are one short line, with and without a newline."""
    taken = Taken()
    lines = Lines(taken.send)
    stream = Stream(lines.add)
    stream.write("x" * (20 << 20) + "\n")
    stream.write("short\n")
    lines.add("y" * (20 << 20))
    lines.close()
    assert [line[:5] for line in taken] == ["xxxxx", "short", "yyyyy"]
    assert max(map(len, taken)) <= LINE_CHARS_MAX


def test_a_flood_is_dropped_and_counted() -> None:
    """What comes faster than it is sent is dropped, in lines and in characters; later lines pass again."""
    taken, now = Taken(), [0.0]
    lines = Lines(taken.send, clock=lambda: now[0])
    lines._closed.set()  # flushed by hand
    long = "x" * (LINE_CHARS_MAX - 1)
    fit = BURST_CHARS // len(long) + 1
    for _ in range(fit + 500):
        lines.add(long)
    lines.flush()
    assert len(taken) == fit
    now[0] += 2.0
    lines.add("later")
    lines.flush()
    assert taken[fit:] == ["later", "... 500 lines were dropped: they came too fast"]
    now[0] += BURST_CHARS / CHARS_PER_S
    for number in range(WAITING_MAX + 7):
        lines.add(f"{number}")
    lines.close()
    assert taken[-2:] == [f"{WAITING_MAX - 1}", "... 7 lines were dropped: they came too fast"]


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("plain, \t ü, 漢字, 🙂", "plain, \t ü, 漢字, 🙂"),
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]52;c;ZXZpbA==\x07", "\\x1b]52;c;ZXZpbA==\\x07"),
        ("\x1b[2J\x9b31m\x00", "\\x1b[2J\\x9b31m\\x00"),
        ("safe\u202eexe.txt\u2066", "safe\\u202eexe.txt\\u2066"),
        ("one\u2028two\ud800", "one\\u2028two\\ud800"),
    ],
)
def test_controls_are_written_out(said: str, shown: str) -> None:
    """A terminal shows them and does not obey; only colours go, and only in whole."""
    taken = Taken()
    lines = Lines(taken.send)
    lines.add(said)
    lines.close()
    assert taken == [shown]
    assert harmless(shown) == shown


def test_a_worker_s_own_log_is_not_what_its_script_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger at a worker's port is a line for the machine's log, not for the person."""
    own, machine, said = logging.getLogger("agent"), io.StringIO(), io.StringIO()
    handlers, propagates = list(own.handlers), own.propagate
    monkeypatch.setattr(sys, "__stderr__", machine)
    try:
        keep_own_words_apart()
        monkeypatch.setattr(sys, "stderr", said)
        logging.getLogger("agent.net.front").warning("1 callers turned away")
    finally:
        own.handlers[:], own.propagate = handlers, propagates
    assert machine.getvalue() == "1 callers turned away\n"
    assert said.getvalue() == "" and capsys.readouterr().err == ""
