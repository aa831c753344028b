"""The person's own code: what travels of it, and what can be read in it."""
