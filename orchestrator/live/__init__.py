"""The manager in production: clouds, Ray, the wall clock."""
