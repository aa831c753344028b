"""Blocks of memory from worker to worker, driven by the host; nothing here waits for a peer."""
