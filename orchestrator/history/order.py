"""What the house tells the process that keeps the history."""

REDIS_VARIABLE = "SPOT_HISTORY_REDIS"  # in the environment, as the address may hold a password
