"""How states, plain values and weights become bytes, and back."""
