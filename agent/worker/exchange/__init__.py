"""The sum of a step over chains of one, from what a worker has computed to its promise."""
