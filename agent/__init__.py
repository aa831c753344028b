"""The code on every instance: the session and its workers; also the keeper's reliable tier."""
