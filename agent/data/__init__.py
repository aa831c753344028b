"""A data set in steps and microbatches: order, streams and fetching, as functions of the step."""
