"""decide(state, event) -> (state, actions) and its parts, one subject per module. Pure."""
