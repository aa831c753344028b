"""What is held: machines as leases, their workers, and what they cost."""
