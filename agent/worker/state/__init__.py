"""How a worker comes by state that it lacks, and hands over what it holds."""
