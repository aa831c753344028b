"""Layouts in which a worker keeps only its own layers, and what needs all of them."""
