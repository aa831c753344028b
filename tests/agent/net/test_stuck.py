"""Whose script's thread hangs, and whose does not."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crews import Crew, until

from agent.keeper import roster
from agent.messages import WorkerLost
from agent.net import watchdog
from agent.net.watchdog import Stuck

BEATS = 20

WAITS = "def wait(told): told.wait()"
WORKS = """
def work(told):
    while not told.is_set():
        rounds[0] += 1
"""


def ours(code: str, **names: Any) -> dict[str, Any]:
    """Code that lies where ours does."""
    exec(compile(code, f"{watchdog.OURS}anything.py", "exec"), names)
    return names


def thread(of: Callable[[Stuck], None]) -> Stuck:
    made: list[Stuck] = []

    def run() -> None:
        made.append(Stuck())
        of(made[0])

    threading.Thread(target=run, daemon=True).start()
    until("it to begin", lambda: made)
    return made[0]


def test_who_does_nothing_at_all_is_counted() -> None:
    """Its heartbeats in a row; and from the first one again when it has begun something else."""
    first, second = threading.Event(), threading.Event()
    wait = ours(WAITS)["wait"]

    def hang(me: Stuck) -> None:
        with me.unaided():
            wait(first)
            with me.unaided():
                wait(second)

    hanging = thread(hang)
    until("it to be seen", lambda: hanging.beat() >= BEATS)
    begun = hanging._at
    first.set()
    until("something else", lambda: hanging._at is not begun)
    assert hanging.beat() == 0
    until("it to be seen again", lambda: hanging.beat() >= BEATS)
    second.set()
    until("it to be through", lambda: hanging._at is None)
    assert hanging.beat() == 0


def test_who_works_is_not_counted_however_long_it_takes() -> None:
    told, rounds = threading.Event(), [0]
    work = ours(WORKS, rounds=rounds)["work"]

    def busy(me: Stuck) -> None:
        with me.unaided():
            work(told)

    working = thread(busy)
    until("it to work", lambda: rounds[0])
    for _ in range(BEATS):
        before = rounds[0]
        until("it to have done something", lambda before=before: rounds[0] > before)
        assert working.beat() == 0
    told.set()


@pytest.mark.parametrize("how", ["aided", "of the script"])
def test_who_waits_for_others_or_is_in_the_scripts_code_is_not_counted(how: str) -> None:
    """Others may need the same code meanwhile: what they do changes nothing."""
    told, waits = threading.Event(), threading.Event()

    def wait(me: Stuck) -> None:
        with me.unaided():
            if how == "aided":
                with me.aided():
                    waits.set()
                    ours(WAITS)["wait"](told)
            else:
                waits.set()
                told.wait()

    waiting = thread(wait)
    assert waits.wait(60)
    with waiting.unaided():
        assert [waiting.beat() for _ in range(BEATS)] == [0] * BEATS
    told.set()


SLOW = """
class Slow:
    def state_dict(self):
        if session.replica.given == 20:
            hold("saves")
        return {"some": 1}

    def load_state_dict(self, state):
        hold("loads")


def hold(what):
    if not Path(f"{out}.{what}").exists():
        Path(f"{out}.{what}").touch()
        open(f"{out}.{what}.on").read()
"""


@pytest.mark.processes
def test_a_script_may_take_long_for_its_state(
    crew: Crew, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It loads what comes, and says what it has, as long as it likes, and does not use the processor for that. Who waits for
    it meanwhile is not given up either."""
    monkeypatch.setattr(roster, "HUNG_S", 0.5)
    out = tmp_path / "out.pt"
    toy = Path(__file__).parents[1].joinpath("toy.py").read_text()
    made = "session = Session(model, optimizer, scheduler,"
    script = toy.replace(made, f"{SLOW}\n{made} Slow(),")
    Path(f"{out}.hold").write_text("3")
    for what in ("loads", "saves"):
        os.mkfifo(f"{out}.{what}.on")
    crew.begin(1, script, "24", "0", str(out))
    (second,) = crew.start(1)
    crew.step_on(Path(f"{out}.hold"), "loads", Path(f"{out}.loads").exists, second)
    for what in ("loads", "saves"):
        until(what, Path(f"{out}.{what}").exists)
        members = [*crew.keeper._jobs["job"].roster.members.values()]
        assert len(members) == 2
        heard = {each: each.connection.bytes_in for each in members}
        for each, begun in heard.items():
            until(
                "heartbeats", lambda each=each, begun=begun: each.connection.bytes_in > begun + 2000
            )
        Path(f"{out}.{what}.on").write_text("go on")
        if what == "loads":
            until("the second", lambda: second in crew.ready)
            Path(f"{out}.hold").unlink()
    crew.completed()
    assert crew.of(WorkerLost) == []
