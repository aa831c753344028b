"""Tensors of a model: where they are, how they are added up, and their bytes."""
