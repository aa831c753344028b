"""The one process on the manager's machine that owns all the others, and how it starts and watches them."""
