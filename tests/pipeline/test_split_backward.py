"""Which weights' gradients can wait: our analysis and torch's find the same."""

import random

from torch.distributed.pipelining._backward import get_param_groups

from agent.pipeline.stages.split_backward import groups_of


def drawn(dice: random.Random) -> tuple[list[tuple], list[int], list[int]]:
    """A graph of which every node is reached from the first; edges go to later nodes only."""
    inner, leaves = dice.randint(1, 12), dice.randint(1, 6)
    count = inner + leaves
    rows: list[list] = [[] for _ in range(inner)]
    for at in range(inner):
        for _ in range(dice.randint(1, 3)):
            rows[at] += [dice.randrange(at + 1, count), 0]
        rows[at] += dice.choice([[], [None, 0]])
    for at in range(1, count):
        rows[dice.randrange(min(at, inner))] += [at, 0]
    known = [dice.choice([0, -1, None]) for _ in range(leaves)]
    inputs = [inner + number for number, which in enumerate(known) if which == 0]
    weights = [inner + number for number, which in enumerate(known) if which == -1]
    return [*map(tuple, rows), *((which,) for which in known)], inputs, weights


def by_torch(rows: list[tuple], inputs: list[int], weights: list[int]) -> list | None:
    """Torch may leave groups apart that share a node; those are joined."""
    reverse: dict[int, list[int]] = {at: [] for at in range(len(rows))}
    for at, row in enumerate(rows):
        for following in row[::2] if len(row) > 1 else ():
            if following is not None:
                reverse[following].append(at)
    joined: list[tuple[set, set]] = []
    for group in get_param_groups(inputs, weights, reverse):
        one = (group["params"], group["intermediates"])
        for other in [each for each in joined if not each[1].isdisjoint(one[1])]:
            joined.remove(other)
            one = (one[0] | other[0], one[1] | other[1])
        joined.append(one)
    whole = set(weights) <= {weight for group in joined for weight in group[0]}
    return joined if whole else None


def test_groups_of_weights_are_those_of_torch() -> None:
    many = 0
    for seed in range(3000):
        rows, inputs, weights = drawn(random.Random(seed))
        ours, theirs = groups_of(rows, inputs, weights), by_torch(rows, inputs, weights)
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            many += len(ours) > 1
            assert sorted(map(repr, map(tuple, map(_sorted, ours)))) == sorted(
                map(repr, map(tuple, map(_sorted, theirs)))
            )
    assert many > 100


def _sorted(group: tuple[set, set]) -> list[list[int]]:
    return [sorted(part) for part in group]
