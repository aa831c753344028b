"""What is started on a machine: its agent, the workers in its slots, and what these print."""
