"""What the proof does not catch, and why; and the table of all hazards, as it stands in `docs/script.md`."""

from collections import Counter
from collections.abc import Iterable, Mapping

FATES = (
    "refused alone",
    "computed twice",
    "at the join",
    "while running",
    "harmless",
    "not caught",
)
# It acts for the first time when all workers that could tell are lost at once: nobody is left who has it otherwise.
DORMANT = "dormant"
# It is read by the code behind the loop only: the job's weights are right, and what the script makes of it is not.
BEHIND = "behind"
LIMITS: Mapping[str, str] = {
    "left: the best by a name": BEHIND,
    "left: the best weights": BEHIND,
    "left: an early step's": BEHIND,
    "left: the best by what is given": BEHIND,
    "left: the first epoch's": BEHIND,
    "left: every other step's": BEHIND,
    "within: what a model counts and goes by": DORMANT,
    # Also where two begin together that have counted as many when it acts: they agree, until somebody joins.
    "within: a list that the last step goes by": DORMANT,
    "rehearsal: a count that goes further than a few": DORMANT,
    "body: a hook of a layer that one step hangs up": DORMANT,
    "alongside: islice": DORMANT,
    "carried: a count": DORMANT,
}
# Those that the reading of sources let pass, and the proof does not: it is right.
RIGHTLY: Mapping[str, str] = {
    "beside: what is given by another name": "load_state_dict puts a new dict in the place of the one that the script "
    "goes on with: the average that is given is another behind a join",
    "within: what does not learn is asked once": "the loss that all are told goes by the first microbatch of each worker",
}


def table(trials: Iterable[Mapping[str, str]]) -> list[str]:
    """Count the fates by the group of the hazards, as lines of a table."""
    counts: dict[str, Counter[str]] = {}
    for trial in trials:
        counts.setdefault(trial["name"].partition(":")[0], Counter())[trial["fate"]] += 1
    total = Counter[str]()
    for each in counts.values():
        total.update(each)
    rows = [*counts.items(), ("all", total)]
    return [
        f"| {group} | {' | '.join(str(found[fate]) for fate in FATES)} |" for group, found in rows
    ]
