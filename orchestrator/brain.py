"""decide(state, event) -> (state, actions): the whole manager."""

from orchestrator.actions import AnyAction
from orchestrator.events import AnyEvent
from orchestrator.state import State


def decide(state: State, event: AnyEvent) -> tuple[State, list[AnyAction]]:
    """Changes the state in place and says what to do."""
    state.now_s = max(state.now_s, event.at_s)
    return state, []
