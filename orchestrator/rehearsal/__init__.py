"""Tries a script on this machine, with all that happens to a job, before any money is spent."""
