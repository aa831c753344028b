"""What was: series, events and money beside the journal, which outlive jobs and restarts."""
