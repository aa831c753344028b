"""The dashboard: a read-only page, on this machine only, for the holder of the token."""
