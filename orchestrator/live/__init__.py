"""The manager at work in the real world: clouds, Ray, the wall clock."""
