"""What a machine does before it has an agent."""
