"""What a script may do, and what would give other numbers once somebody joins: found before it does, and refused in one line."""
