"""decide(state, event) -> (state, actions), and what it is made of, a noun in each room. Pure."""
