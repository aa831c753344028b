"""Machines of a parameter server in processes: messages on sockets, clocks on the disk."""
