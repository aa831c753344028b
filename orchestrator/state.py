"""What the manager knows."""
