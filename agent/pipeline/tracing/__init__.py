"""From a script's loss function to a graph that can be cut."""
