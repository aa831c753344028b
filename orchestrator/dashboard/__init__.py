"""The page that shows it all: read-only, on this machine only, for whoever holds the token."""
