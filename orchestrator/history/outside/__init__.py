"""What goes to the tools of others: tables for cost tools, messages to web addresses."""
