"""The house: the process that owns all others on the manager's machine, and their upkeep."""
