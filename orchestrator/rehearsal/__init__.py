"""Rehearsals: trying a script on this machine with all that can happen to a job, for free."""
