"""Frames over TCP: from worker to worker, and to the keeper."""
