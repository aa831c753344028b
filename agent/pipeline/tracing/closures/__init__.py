"""What a loss function reads from outside itself."""
