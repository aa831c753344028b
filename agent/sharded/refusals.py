"""Sentences for a script in a layout where each worker keeps its own stages' layers only."""

APART = "in this layout each worker keeps the layers of its own stages only"
ROOM = "use machines with room for the whole state"
AVERAGE = (
    f"{APART}: average the values of model.state_dict(), which has all weights, in an object of your own with "
    f"state_dict and load_state_dict, or {ROOM}"
)
WRITTEN = "more than one element of the written-to tensor refers to a single memory location"


def cause_of(error: BaseException) -> str:
    """Say what an error of the script has to do with absent layers, or "" if nothing.

    Torch refuses to write to a parameter that has no memory. A gradient that is elsewhere is None.
    """
    if isinstance(error, RuntimeError) and WRITTEN in str(error):
        return f"This writes to a parameter that another worker keeps, and {AVERAGE}"
    if isinstance(error, AttributeError | TypeError) and "'NoneType'" in str(error):
        return (
            f"If this is a gradient: the layers of other workers have none here, because {APART}. Clip with "
            f"session.clip_grad_norm_(...), or {ROOM}"
        )
    return ""
