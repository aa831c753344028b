"""The proof of a joining worker, and of a lone one."""
