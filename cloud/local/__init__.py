"""A cloud on this machine: a separate process that sells machines and takes them away."""
