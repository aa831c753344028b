"""How fast accelerators train before anything is measured: one table, so that clouds compare alike."""

SPEEDS = {
    "t4": 1.0,
    "l4": 1.5,
    "a10": 2.0,
    "a10g": 2.0,
    "v100": 2.0,
    "l40s": 4.0,
    "a100": 5.0,
    "rtx pro server 6000": 6.0,
    "h100": 10.0,
    "h200": 10.0,
    "b200": 20.0,
    "b300": 20.0,
}
"""In units of a T4, by the names of AWS and Azure in small letters. What a job measures replaces them."""


def prior_speed(name: str) -> float:
    """Return the speed of an accelerator: "L4/8" is an eighth of one, and an unknown one counts as a T4."""
    card, _, parts = name.lower().partition("/")
    return SPEEDS.get(card, 1.0) / int(parts or 1)
