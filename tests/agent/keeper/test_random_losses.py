"""Keepers and workers that come and go in any order, in the middle of anything: no committed step is lost, and no bit."""

import contextlib
import random
import threading
import time
from pathlib import Path

import numpy as np
import players
import pytest
from crews import seeds
from players import House, Player, begun

from agent.keeper import commits, layouts
from agent.layout import Layout
from agent.messages import Rewound
from agent.store.encoding.format import lay_out
from agent.store.memory import RETURNING_BYTES_MIN
from cloud.clock import CLOCK

ACTS = {
    "commit": 8,
    "hear": 6,
    "tick": 4,
    "join": 3,
    "lay out": 4,
    "die": 3,
    "restart": 2,
    "restart promised": 2,
    "restart written": 2,
    "notice": 2,
    "checkpoint": 1,
    "resume": 2,
    "redial": 2,
}
MOVES, WORKERS_MAX = 60, 4


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "RECONNECT_S", 0.02)
    monkeypatch.setattr(Player, "handed_over", lambda _, order: np.array(state_at(order.version)))


def state_at(version: int) -> list[int]:
    """What every worker's state is then, whoever has computed it."""
    state = np.arange(players.SIZE // 8, dtype=np.int64)
    for step in range(version):
        state = state * 3 % 1000003 + (step + 1)
    return state.tolist()


class Killed(BaseException):
    """The keeper's process has ended here."""


class Scene:
    def __init__(self, folder: Path, memory: Path, seed: int, phases: int) -> None:
        self.draw = random.Random(seed)
        every = self.draw.choice([2, 3, 5])
        self.house = House(folder, phases=phases, backup_every_steps=every)
        self.house.memory = memory
        self.house.open()
        self.house.settles = self.tick  # so that all may happen in the middle of anything
        self.names = 0
        self.done: list[str] = []
        self.newest = 0

    @property
    def players(self) -> list[Player]:
        return list(self.house.players.values())

    def act(self, what: str) -> None:
        self.done.append(what)
        getattr(self, what.replace(" ", "_"))()
        here, players = self.house.job.roster.is_here, self.house.players
        self.house.players = {name: one for name, one in players.items() if here(one.member)}
        self.newest = max(self.newest, self.house.version)
        assert self.house.version >= self.newest
        assert not self.house.failed, self.house.failed

    def tick(self) -> None:
        """Time passes; now and then enough for what is stored to be read."""
        time.sleep(self.draw.choice([0.0, 0.0, 0.003]))
        self.house.job.tick(time.monotonic(), 0.0)

    def hear(self) -> None:
        """Some hear what was said to them."""
        for player in self.draw.sample(self.players, self.draw.randint(0, len(self.players))):
            player.hear()
        self.tick()

    def commit(self) -> None:
        """Some do their share of the step, or all."""
        count = self.draw.choice([len(self.players), self.draw.randint(0, len(self.players))])
        for player in self.draw.sample(self.players, count):
            player.plays()
        self.hear()

    def join(self) -> None:
        if len(self.players) < WORKERS_MAX:
            self.names += 1
            self.house.joins(f"w{self.names}")

    def lay_out(self) -> None:
        ready = self.house.ready
        if ready:
            chosen = self.draw.sample(ready, self.draw.randint(1, len(ready)))
            self.house.lay_out(*chosen, when=self.draw.choice(["now", "boundary"]))

    def die(self) -> None:
        if self.players:
            self.house.dies(self.draw.choice(self.players).name)

    def restart(self) -> None:
        """The keeper is killed; some workers with it, and the others come back to the next one."""
        layout: Layout | None = self.house.job.roster.layout
        self.house.job.forsake()
        for thread in threading.enumerate():
            if thread.name in ("checkpoint", "recall"):  # it would have ended with its process
                thread.join()
        odds = self.draw.choice([0.0, 0.5])
        survivors = [player for player in self.players if self.draw.random() < odds]
        self.house.players = {}
        self.house.open()
        if layout is not None:
            self.house.job.restore(layout)
        for player in survivors:
            self.comes_again(player)

    def restart_promised(self) -> None:
        """The keeper is killed behind its promise of a sum, before the commit is written."""
        self.killed_in_commit(written=False)

    def restart_written(self) -> None:
        """The keeper is killed behind the commit, before a worker hears of it."""
        self.killed_in_commit(written=True)

    def killed_in_commit(self, *, written: bool) -> None:
        history = self.house.job.history
        write = history.write

        def dies(commit: commits.Commit) -> None:
            if written:
                write(commit)
            raise Killed

        history.write = dies  # type: ignore[method-assign]
        with contextlib.suppress(Killed):
            for player in self.players:
                player.plays()
        self.restart()

    def notice(self) -> None:
        """A machine is going to be taken, so the next layout is without its worker."""
        if self.players:
            going = self.draw.choice(self.players)
            self.house.job.notice(going.member.machine_id, CLOCK.now_s() + 60.0)
            if others := [name for name in self.house.ready if name != going.name]:
                self.house.lay_out(*others)

    def redial(self) -> None:
        """A connection breaks, and its worker dials again before the keeper has noticed."""
        if self.players:
            self.comes_again(self.draw.choice(self.players))

    def comes_again(self, player: Player) -> None:
        inside = player.layout is not None and player.holds
        player.hello = {
            "generation": player.layout.generation if player.layout is not None else -1,
            "version": player.version if inside else None,
            "proven": player.let_in or inside,
        }
        if self.house.job.lets_in(player.name):
            self.house.players[player.name] = player
            player.come()

    def checkpoint(self) -> None:
        self.house.job.write_checkpoint()

    def resume(self) -> None:
        """The job is closed, put on the disk, and opened again by a keeper that finds nothing in memory."""
        self.house.job.close()
        assert self.house.job.put_away()
        self.house.players = {}
        self.house.open()

    def ends_well(self) -> None:
        """Whoever is left, a new worker goes on from the newest step."""
        del self.house.settles
        for player in self.players:
            self.house.dies(player.name)
        self.house.joins("last")
        self.house.until("it to be ready", lambda: "last" in self.house.ready)
        self.house.begins("last")
        self.house.until("it to go on", lambda: self.house.players["last"].holds)
        last = self.house.players["last"]
        assert (last.version, self.house.version) == (self.newest, self.newest)
        assert last.state.tolist() == state_at(self.newest)
        self.house.commits(2)
        assert last.state.tolist() == state_at(self.newest + 2)


@pytest.mark.parametrize("phases", [1, 3])
@pytest.mark.parametrize("seed", seeds(*range(20)))
def test_no_committed_step_is_lost(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, seed: int, phases: int
) -> None:
    """Every other time, state and sums are so large that they lie in memory by themselves."""
    if seed % 2:
        size = RETURNING_BYTES_MIN + 8
        monkeypatch.setattr(players, "SIZE", size)
        monkeypatch.setattr(players, "FORM", lay_out("l", [("model/l", "I64", (size // 8,))]))
    scene = Scene(tmp_path / "disk", memory, seed, phases)
    for name in ("join", "join", "lay out"):
        scene.act(name)
    try:
        for _ in range(MOVES):
            scene.act(*scene.draw.choices(list(ACTS), list(ACTS.values())))
        scene.ends_well()
        rewound = [one for one in scene.house.said.reports if isinstance(one, Rewound)]
        assert not rewound, rewound
    except AssertionError as error:
        error.add_note(f"after {scene.done}")
        raise


def test_a_layout_for_the_next_boundary_begins_when_the_running_one_is_lost(tmp_path: Path) -> None:
    """No commit of those who ran it will come, and nobody in the next one is lost: nobody asks again."""
    house = begun(House(tmp_path), "a", commits=4)
    house.joins("b")
    house.commits(2)
    house.until("it to be ready", lambda: "b" in house.ready)
    house.lay_out("b", when="boundary")
    house.dies("a")
    house.until("it to go on", lambda: house.players["b"].holds)
    before = house.version
    house.commits(2)
    assert house.version == before + 2
    assert house.players["b"].state.tolist() == state_at(house.version)
