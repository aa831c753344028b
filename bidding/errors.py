"""What can be wrong with what the bidder is given: one tree, every message says what to do."""


class BiddingError(Exception):
    """The root of everything this package raises on purpose."""


class HistoryError(BiddingError):
    """A price or availability history cannot be used."""


class ConstraintError(BiddingError):
    """The limits contradict each other or cannot be met by anything."""
