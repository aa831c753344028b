"""Errors in what the bidder is given, as one tree. Every message says what to do."""


class BiddingError(Exception):
    """The root of all errors that this package raises on purpose."""


class HistoryError(BiddingError):
    """A price or availability history cannot be used."""


class ConstraintError(BiddingError):
    """The limits contradict each other, or no decision can meet them."""
