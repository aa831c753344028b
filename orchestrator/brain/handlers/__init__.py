"""What events do to jobs, to machines, and to the layouts of jobs."""
