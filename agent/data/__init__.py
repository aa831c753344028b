"""A data set in steps and microbatches, whose order and streams depend on the step."""
