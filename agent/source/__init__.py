"""The person's own code: what travels with a script, and whose code a traceback shows."""
