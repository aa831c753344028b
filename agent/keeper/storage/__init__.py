"""What the keeper holds of a job: in memory, on the disk, and elsewhere."""
