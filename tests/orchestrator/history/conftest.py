"""A bookkeeper beside a simulated manager: it reads the ledger as the recorder does."""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

import msgspec
import pytest
import redis

from agent.keys import EVENTS, READING, VIEW
from orchestrator.brain.holdings import ledger
from orchestrator.history.books import Books, Charge
from orchestrator.history.meter import reading_of
from orchestrator.history.records import Reading
from orchestrator.paths import Places
from orchestrator.redis_client import connect
from orchestrator.state import State
from orchestrator.supervisor import processes
from orchestrator.supervisor.redis_server import RedisServer
from orchestrator.view import Sentence
from orchestrator.view_builder import view_of

CENT = 0.01


class Bookkeeper:
    """Reads now and then, dies now and then, and compares its charges with the ledger."""

    def __init__(self, seed: int = 0, *, every_s: float = 0.0, dies: bool = True) -> None:
        self.books, self.charges = Books(), list[Charge]()
        self.jobs: Counter[str] = Counter()
        self.whole_usd, self.read = 0.0, 0
        self._dice, self._every_s, self._dies = Random(seed), every_s, dies

    def look(self, state: State) -> None:
        if self._every_s:
            if self.books.at_s and state.now_s < self.books.at_s + self._every_s:
                return
        elif self._dice.random() > 0.2:
            return
        self.compare(state)

    def compare(self, state: State) -> None:
        at_s = max(self.books.at_s, state.now_s + self._dice.random())
        said = msgspec.json.encode(reading_of(state, at_s))
        charges = self.books.take(msgspec.json.decode(said, type=Reading))
        if self._dies:
            self.books = msgspec.json.decode(msgspec.json.encode(self.books), type=Books)
        self.read += 1
        self.charges += charges
        for charge in charges:
            self.jobs[charge.job] += charge.usd
            self.whole_usd += charge.usd
        spent_usd = ledger.spent_usd(state.account, at_s)
        assert self.whole_usd == pytest.approx(spent_usd, abs=CENT / 10)
        for job in state.jobs.values():
            own_usd = ledger.spent_usd(job.account, at_s)
            assert self.jobs[job.id] == pytest.approx(own_usd, abs=CENT / 10), job.id

    def by_cause(self) -> dict[str, float]:
        found: Counter[str] = Counter()
        for charge in self.charges:
            found[charge.cause] += charge.usd
        return dict(found)


@pytest.fixture
def bookkeeper() -> type[Bookkeeper]:
    return Bookkeeper


class Publisher:
    """Publishes a simulated manager's states as the live one does."""

    def __init__(self, store: "redis.Redis") -> None:
        self.store, self.said, self.turns = store, list[Sentence](), 0
        self._known: dict[int, Sentence] = {}

    def publish(self, state: State) -> None:
        for said in state.sentences[-50:]:
            if id(said) not in self._known:
                self._known[id(said)] = said
                self.said.append(said)
                self.store.xadd(EVENTS, {"e": msgspec.json.encode(said)})
        self.turns += 1
        if self.turns % 16 == 0 or state.stopped:
            view, read = view_of(state, state.now_s), reading_of(state, state.now_s)
            self.store.mset({VIEW: msgspec.json.encode(view), READING: msgspec.json.encode(read)})


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    places = Places(tmp_path_factory.mktemp("redis-house"))
    places.make()
    server = RedisServer(places, {**os.environ, processes.MARK: places.identity})
    server.start()
    yield server
    server.stop()
    places.remove_links()


@pytest.fixture
def publisher(server: RedisServer) -> Iterator[Publisher]:
    store = connect(server.url)
    store.flushall()
    yield Publisher(store)
    store.close()


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(tmp_path)
