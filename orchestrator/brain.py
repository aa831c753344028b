"""decide(state, event) -> (state, actions): the whole manager."""
