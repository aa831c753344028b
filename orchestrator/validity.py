"""What makes an event useless: a value outside of its type's range, or values that conflict.

The ranges stand in the types (`cloud.ranges`). An event is compared with them where it comes in:
when a client posts it, and when the manager takes it from its inbox or from a cloud. So a number
that is not finite or absurdly large never gets into the state, where it would make every later
decision fail. What no single range can say stands here.
"""

from bidding.markets.billing import RULES
from cloud.model import Traits
from cloud.ranges import flaw_in, shown
from orchestrator.events import AnyEvent, CatalogueSeen, JobSpec, JobSubmitted


def flaw_of(event: AnyEvent) -> str:
    """Return what is wrong with an event, or "" if nothing is."""
    return flaw_in(event, AnyEvent) or conflict_in(event)


def conflict_in(event: AnyEvent) -> str:
    """Return which values of an event conflict, each in its range, or "" if none do."""
    match event:
        case JobSubmitted():
            return flaw_of_spec(event.spec)
        case CatalogueSeen(traits=Traits(billing=name)) if name not in RULES:
            return f"traits.billing is {shown(name)}: it is none of {', '.join(sorted(RULES))}"
        case _:
            return ""


def flaw_of_spec(spec: JobSpec) -> str:
    """Return why no manager can run a job with this order, or "" if one can."""
    most = f"slots_max={shown(spec.slots_max)}"
    if spec.slots_min > spec.slots_max:
        least = f"slots_min={shown(spec.slots_min)}"
        return f"{least} and {most}: slots_min must not be above slots_max"
    if spec.depth is not None and spec.depth > spec.slots_max:
        return f"depth={shown(spec.depth)} and {most}: every stage needs a worker"
    return ""
