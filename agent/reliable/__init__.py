"""The reliable tier: what is committed is decided and kept here, beside the manager. No torch in any of it."""
