"""Who measures what of a model, and what comes of it: without a model."""

import heapq
import random

import pytest

from agent.calibration.assignment import OWNER, ROUND, Alone, Board, Round, Times, deal

SECTIONS, ROUNDS = 12, 5


def alone(section: int, of: float = 0.0, rounds: int = 0) -> Alone:
    return Alone(
        section=section,
        fresh_s=(of,),
        stash_bytes=1.0,
        most_bytes=2.0,
        taking_in_s=3.0,
        rounds=tuple(a_round(of, 1) for _ in range(rounds)),
    )


def a_round(of: float, sections: int = SECTIONS) -> Round:
    return Round((Times(*([of] * sections for _ in Times._fields)),))


def found_by(task: int, of: float) -> Round | Alone:
    return a_round(of) if task == ROUND else alone(task, of)


def measured(paces: list[float], lost: dict[int, int] | None = None) -> tuple[Board, float]:
    """Workers of these paces at one board, the owner first; when all is there. A round takes each as long as four
    sections, and its first twice that. Some are lost in the middle of their n-th task.
    """
    board, lost, done = Board(SECTIONS, ROUNDS), lost or {}, [0] * len(paces)
    warm = [False] * len(paces)
    coming: list[tuple[float, int, int | None]] = [(0.0, n, None) for n in range(len(paces))]
    heapq.heapify(coming)
    while coming:
        now, worker, task = heapq.heappop(coming)
        if task is not None:
            board.put(found_by(task, float(worker)))
        done[worker] += 1
        owner = worker == 0
        task = board.take(OWNER if owner else str(worker))
        if task is None and owner and (task := board.lacking()) is None:
            return board, now
        if task is None or done[worker] == lost.get(worker):
            continue
        takes = 1.0 if task != ROUND else 4.0 if warm[worker] else 8.0
        warm[worker] |= task == ROUND
        heapq.heappush(coming, (now + takes * paces[worker], worker, task))
    raise AssertionError("the owner left before all was there")


def test_every_second_worker_begins_with_rounds() -> None:
    """As long as there are both kinds; then each takes of what is left."""
    assert [deal([3, 4], 2, rank) for rank in range(4)] == [ROUND, 3, ROUND, 3]
    assert [deal([], 2, rank) for rank in range(2)] == [ROUND, ROUND]
    assert [deal([3, 4], 0, rank) for rank in range(2)] == [3, 3]
    assert deal([], 0, 0) is None


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 8])
def test_workers_share_the_work(workers: int) -> None:
    """Each section once and all rounds, by all of them; in not much more than the time's share of each."""
    board, took = measured([1.0] * workers)
    by = {int(each.fresh_s[0]) for each in board.alone()}
    (times,) = board.rounds()
    by |= {int(each.forward[0]) for each in times}
    assert by == set(range(workers))
    assert len(times) >= ROUNDS
    assert [each.section for each in board.alone()] == list(range(SECTIONS))
    everything = SECTIONS + 4 * ROUNDS
    assert took <= (everything + 4 * workers) / workers + 8


def test_a_slow_one_is_not_waited_for() -> None:
    """Who takes a hundred times as long gets one task, which the owner does as well."""
    board, took = measured([1.0, 100.0])
    assert took <= measured([1.0])[1]
    assert all(each.fresh_s == (0.0,) for each in board.alone())


def test_whoever_is_lost_everything_is_measured() -> None:
    """Workers of any pace that go at any moment, a hundred times as a seed has it."""
    dice = random.Random(20261122)
    for _ in range(100):
        paces = [dice.choice([0.3, 1.0, 3.0]) for _ in range(dice.randint(1, 6))]
        lost = {n: dice.randint(1, 4) for n in range(1, len(paces)) if dice.random() < 0.5}
        board, took = measured(paces, lost)
        assert len(board.rounds()[0]) >= ROUNDS
        assert len(board.alone()) == SECTIONS
        assert took <= measured(paces[:1])[1] + 8 * paces[0]


def test_of_two_that_come_the_first_counts() -> None:
    """The owner took over what another one brings after all."""
    board = Board(2, 0)
    assert (board.take("other"), board.take(OWNER), board.take(OWNER)) == (0, 1, None)
    board.put(alone(1, 1.0))
    assert (board.lacking(), board.has(0)) == (0, False)
    board.put(alone(0, 2.0))
    board.put(alone(0, 3.0))
    assert (board.lacking(), board.has(0)) == (None, True)
    assert [each.fresh_s for each in board.alone()] == [(2.0,), (1.0,)]


def test_in_a_hurry_one_round_is_enough() -> None:
    """When the time is up: what has been found, or one round by the owner."""
    board = Board(0, ROUNDS)
    board.hurry()
    assert (board.take(OWNER), board.lacking()) == (None, ROUND)
    board.put(a_round(1.0))
    assert (board.lacking(), board.has(ROUND)) == (None, True)


def test_rounds_in_parts_are_put_together() -> None:
    """Sections that were measured one by one, by whomever: as many rounds as there are of each, sections in order."""
    board = Board(3, 0)
    for section, rounds in ((2, 3), (0, 2), (1, 4)):
        board.put(alone(section, float(section), rounds))
    (times,) = board.rounds()
    assert [each.forward for each in times] == [[0.0, 1.0, 2.0]] * 2
