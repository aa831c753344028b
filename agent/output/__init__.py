"""A script's files and numbers, and how they outlive the machine they are made on."""
