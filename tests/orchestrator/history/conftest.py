"""A bookkeeper beside a simulated manager: it reads the ledger as the recorder does."""

from collections import Counter
from random import Random

import msgspec
import pytest

from orchestrator.brain import ledger
from orchestrator.history.books import Books, Charge
from orchestrator.history.meter import reading_of
from orchestrator.history.records import Reading
from orchestrator.state import State

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
