"""The bidder: what to hold, buy, and give back, so that a unit of work costs least. Pure."""
