"""Schedules as data, and the compiled simulator of one step."""
