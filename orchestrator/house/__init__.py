"""The house, which owns all other processes on the manager's machine, and how it runs them."""
