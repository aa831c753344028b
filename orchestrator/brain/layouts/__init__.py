"""Which layout a job should have, and how fast its workers and steps are."""
