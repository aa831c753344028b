"""Initial values, made only on the workers that hold them."""
