"""The manager: what happened in, what to do out."""
