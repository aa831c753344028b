"""Layouts in which a worker keeps its own layers only: what is away, and what looks at all of a model nevertheless."""
