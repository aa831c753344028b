"""A worker among others: steps, changes of layout, and surveys, from its side."""
