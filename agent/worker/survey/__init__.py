"""What one worker finds out for all about a model and its network, and its helpers."""
