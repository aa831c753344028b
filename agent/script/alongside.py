"""What is drawn beside the numbers of the steps: `zip(session.steps(n), loader)`, `map(train, session.steps(n), loader)`,
`enumerate(session.steps(n))`.

Whoever joins in step 120 gets 120 as its first number of a step, and the first of whatever is drawn beside it. Nothing of this
has a name of the script's, so it is looked for among the iterators themselves, once, in the first step of a job.
"""

import gc
import itertools
from collections.abc import Iterator

from agent.errors import Misuse

COUNTING = (enumerate, itertools.islice)
ZIPS = (zip, itertools.zip_longest, map)
BESIDE = (*ZIPS, itertools.accumulate, *COUNTING)
HOLDING = (list, tuple, dict, set, frozenset, str, bytes)
DEPTH_MAX = 4  # of what may lie between them: a bar that shows progress, for one
LOOKED_AT_MAX = 1000


def refuse_alongside(steps: Iterator[int]) -> None:
    """`steps` is what `session.steps(...)` gave."""
    for thing in gc.get_objects():
        # Not `isinstance`: it asks the object, and a lazy one may load what it stands for.
        if type(thing) in BESIDE and not _is_of_one(thing) and _leads_to(thing, steps):
            _refuse(type(thing).__name__, counting=type(thing) in COUNTING)


def _is_of_one(thing: object) -> bool:
    """`map(f, session.steps(n))` draws from nothing else, or what is always the same."""
    inside = gc.get_referents(thing) if type(thing) is map else []
    drawn = [each for each in inside if type(each) is tuple]
    others = [one for each in drawn for one in each if type(one) is not itertools.repeat]
    return bool(drawn) and len(others) == 1


def _leads_to(thing: object, steps: Iterator[int]) -> bool:
    layer, seen = [thing], {id(thing)}
    for _ in range(DEPTH_MAX):
        inside = [each for one in layer for each in _drawn_from(one) if id(each) not in seen]
        if any(each is steps for each in inside):
            return True
        layer = inside[:LOOKED_AT_MAX]
        seen.update(map(id, layer))
    return False


def _drawn_from(thing: object) -> list[object]:
    """What an iterator goes through: not what the lists and tables have in them that it is given."""
    inside = [*gc.get_referents(thing), *getattr(thing, "__dict__", {}).values()]
    if type(thing) in ZIPS:  # which hold what they go through in a tuple
        inside += [each for one in inside if type(one) is tuple for each in one]
    return [
        each for each in inside if hasattr(type(each), "__iter__") and type(each) not in HOLDING
    ]


def _refuse(kind: str, *, counting: bool) -> None:
    what = (
        "counts from its own beginning"
        if counting
        else "takes what else it is given from its beginning"
    )
    way = (
        "session.steps(...) gives the number of the step, and ends at the number that it is given"
        if counting
        else "loop over session.steps(...) alone, and make what a step needs from its number, in batches(step)"
    )
    raise Misuse(
        f"{kind}(session.steps(...)) {what}, which whoever joins later does in another step: {way}"
    )
