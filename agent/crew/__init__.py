"""A worker among others: its side of the step's transaction, of a change of layout, and of what one finds out for all."""
