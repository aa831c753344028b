"""What a worker makes of a step, in a few numbers that others can compare."""
