"""Tensors of a model as the product sees them: where they are, how they are added up, and their bytes."""
