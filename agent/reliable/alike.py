"""Whether workers do the same: what each says of the steps that it shared or went through again. No torch here.

Workers compare nothing among themselves: their gradients are of other microbatches. But all of them make all
microbatches of a step, and all change the model alike behind it. A script in which that depends on anything but the
step, a count of its own for one, shows when somebody joins; what earlier workers said is remembered for those who come
after all were lost.
"""

import math
from collections.abc import Iterable

from agent.protocol import Seen

STEPS_MAX = 256
NEAR = 1e-2  # of a change: machines may round differently
ALIKE = (
    1e-5  # ... and those of one kind do not: this is left to the order in which a script adds up,
)
GRAINS = 8  # or so many units in the last place


class Alike:
    def __init__(self) -> None:
        self._said: dict[int, tuple[str, Seen]] = {}

    def hear(self, worker: str, seen: Iterable[Seen]) -> str:
        """What is not alike, in a line; else nothing."""
        for one in seen:
            other, known = self._said.setdefault(one.step, (worker, one))
            near = Near(same=known.machine == one.machine != "")
            if not near.equal(known.batches, one.batches):
                return f"step {one.step}: {worker} has other microbatches than {other}. {_advice(one.step)}"
            if not near.changed(known, one):
                return (
                    f"step {one.step - 1}: behind session.share(...) the model became another on {worker} than on "
                    f"{other}. What a script does there has to be the same on every worker; what it keeps for that "
                    "from step to step belongs into Session(model, optimizer, ...)"
                )
            if known.training != one.training:
                return (
                    f"step {one.step}: {one.training} modules are in training mode on {worker}, and {known.training} on "
                    f"{other}. Whoever joins later has them as the script begins with them: say model.train() or "
                    "model.eval() anew in every step"
                )
            if known.told != one.told:
                which = min({*known.told} ^ {*one.told})
                here, there = (worker, other) if which in one.told else (other, worker)
                return (
                    f"step {one.step}: {which} in the model on {here}, and not on {there}. Whoever joins later has modules "
                    "as the script begins with them: set it anew in every step, as it depends on the step"
                )
            for name in sorted(known.goes_by.keys() & one.goes_by.keys()):
                if not near.equal((known.goes_by[name],), (one.goes_by[name],)):
                    return (
                        f"step {one.step}: `{name}` goes into the loop over session.share(...), and is another on {worker} than "
                        f"{'before' if worker == other else f'on {other}'}. Whoever joins later has it as the script begins with it: set it anew in every step, as it "
                        "depends on the step, or keep it in something with state_dict and load_state_dict, and give that to "
                        "Session(...)"
                    )
            if not known.change and one.change:
                self._said[one.step] = (worker, one)
        while len(self._said) > STEPS_MAX:
            del self._said[min(self._said)]
        return ""


def _advice(step: int) -> str:
    """Before the first step nothing has gone on yet: what differs was drawn without a seed, or has no order."""
    if step == 0:
        return (
            "What session.share(...) is given has to be the same in every process: seed what is drawn before the loop, "
            "`torch.manual_seed(0)`, and sort what comes out of a set or a folder, `sorted(set(words))`"
        )
    return (
        "What session.share(...) is given has to depend on the step only, not on what was drawn or counted before: "
        "whoever joins later begins that anew"
    )


class Near:
    """How near numbers have to be: on machines of the `same` kind, or on others."""

    def __init__(self, *, same: bool) -> None:
        self._of_value, self._of_change = (ALIKE, ALIKE) if same else (1e-3, NEAR)

    def equal(self, one: tuple[float, ...], other: tuple[float, ...]) -> bool:
        if not one or not other:
            return True
        return len(one) == len(other) and all(
            math.isclose(a, b, rel_tol=self._of_value, abs_tol=1e-3 * self._of_value)
            or (math.isnan(a) and math.isnan(b))
            for a, b in zip(one, other, strict=True)
        )

    def changed(self, one: Seen, other: Seen) -> bool:
        if not one.change or not other.change:
            return True
        most = max(map(abs, (*one.change, *other.change)))
        least = max(self._of_change * most, GRAINS * max(one.grain, other.grain))
        return all(abs(a - b) <= least for a, b in zip(one.change, other.change, strict=True))
