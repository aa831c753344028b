"""What kind of thing a sentence tells, by its action and, of a note, by its beginning. Pure."""

import re

from orchestrator.kinds import Kind
from orchestrator.view import Sentence

_BY_ACTION: tuple[tuple[str, Kind], ...] = (
    ("buy ", "buy"),
    ("give back", "return"),
    ("layout ", "layout"),
    ("write a checkpoint", "checkpoint"),
)
_BY_NOTE: tuple[tuple[str, Kind], ...] = (
    (r"(FAILED|DRAINING): budget", "budget"),
    (r"FAILED: ", "failure"),
    (r"(SUCCEEDED|CANCELLED): ", "finish"),
    (r"RECOVERING: ", "loss"),
    (r"[A-Z]+: .*", "status"),
    (r"\S+ (was taken (as announced|by the provider)|vanished from the list)", "eviction"),
    (r"\S+ started and ended before we learned of it", "eviction"),
    (r"\S+ will be taken in |the cloud says that it may be taken soon", "notice"),
    (r"\S+ joined with ", "join"),
    (r"[\d,]+ steps? lost with |\S+ on \S+ lost \(", "loss"),
    (r"not bought: |left alone for |\d+ of \d+ machines may be had", "refusal"),
    (r"the checkpoint of step ", "checkpoint"),
)


def kind_of(said: Sentence) -> Kind:
    """Return the kind of a sentence; `note` for one of no kind that is known."""
    if said.what != "note":
        return next((kind for begins, kind in _BY_ACTION if said.what.startswith(begins)), "order")
    return next((kind for pattern, kind in _BY_NOTE if re.match(pattern, said.because)), "note")
