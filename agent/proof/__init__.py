"""The results of a worker's step, in a few numbers that others can compare."""
