"""What markets did: histories, their files, a grid of ticks, and billing rules."""
