"""What to hold, buy, and give back, so that a unit of work costs least. Pure: values in, values out."""
