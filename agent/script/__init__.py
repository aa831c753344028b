"""What a script registers, and what it gives to its session, checked when it is given."""
