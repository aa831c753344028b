"""The manager's decision over recorded markets, beside every other strategy."""
