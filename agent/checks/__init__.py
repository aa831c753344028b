"""Checks of what a script registers and gives to its session, made when it is given."""
