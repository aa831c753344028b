"""The join client of a machine, and its dead man. Standard library only: it starts in no time."""
