"""The code on every instance: session and workers; also the keeper of the reliable tier."""
