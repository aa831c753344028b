"""The step of a worker whose chain has several workers."""
