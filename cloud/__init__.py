"""The outside world: machines, prices and notices, through one narrow provider protocol."""
