"""A cloud on this machine: a process of its own that sells machines, names prices and takes them away."""
