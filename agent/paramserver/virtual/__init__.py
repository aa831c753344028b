"""A cluster on virtual time: the same machines, with computing and networks that are calculated."""
