"""A model and the network between workers, measured once: a profile that answers for every layout."""
