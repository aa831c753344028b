"""What a worker gets of the state from the keeper."""

from types import SimpleNamespace
from typing import Any

import pytest

from agent.protocol import State
from agent.worker.state.handover import Handover
from agent.worker.state.shards import Stores
from agent.world import Interrupted


def test_a_state_for_the_next_layout_is_not_lost_while_layers_are_asked_for_in_this_one() -> None:
    """Both were sent to a worker that is not that far yet: what it asks for now is not for it any more, and the
    other is what it waits for next. Nobody would send it again."""

    def wait(look: Any) -> Any:
        if (found := look()) is not None:
            return found
        raise Interrupted

    link = SimpleNamespace(send=lambda _: None)
    crew: Any = SimpleNamespace(generation=1, link=link, wait=wait)
    handover = Handover(crew, None, Stores())  # type: ignore[arg-type]
    handover.state = State(generation=2, version=5, layers=()), memoryview(b"")
    with pytest.raises(Interrupted):
        handover._from_backup(("a",))
    crew.generation = 2
    assert handover._from_backup()[1] == 5
