"""The processes on a machine: its agent, the workers in its slots, and their output."""
