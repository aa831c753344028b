"""Measure a model and the network once, for a profile that answers for every layout."""
