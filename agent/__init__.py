"""What runs on every instance: the training session, its workers, and the reliable tier's keeper."""
