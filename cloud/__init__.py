"""The outside world: machines, prices and notices, behind one narrow provider protocol."""
