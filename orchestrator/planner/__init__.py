"""The planner: from a profile to the best layout for every footprint. Pure."""
