"""How a machine proves who it is: what its cloud has signed, and reading that."""
