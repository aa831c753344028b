"""The join door: where a machine proves who it is, and gets what it needs to belong."""
