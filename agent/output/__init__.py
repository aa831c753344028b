"""What a script writes and says, and how it outlives the machine that it was written on."""
