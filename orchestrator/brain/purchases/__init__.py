"""When the bidder is asked, what it is asked, and what becomes of its answer."""
