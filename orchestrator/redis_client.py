"""Connecting to Redis, for the manager, the house, the command line and the dashboard."""

from typing import Any

import redis

INBOX_MAX = 100_000  # events that wait for a manager


def retry_policy(*, asynchronous: bool = False) -> dict[str, Any]:
    """Return the options with which every client waits a bounded time for a restarting server."""
    from redis.asyncio.retry import Retry as AsyncRetry
    from redis.backoff import ExponentialBackoff
    from redis.retry import Retry

    kind = AsyncRetry if asynchronous else Retry
    return {
        "retry": kind(ExponentialBackoff(cap=0.5, base=0.02), retries=20),
        "retry_on_error": [redis.ConnectionError, redis.TimeoutError, redis.BusyLoadingError],
        "socket_timeout": 30,
        "health_check_interval": 0,
    }


def connect(url: str) -> "redis.Redis":
    return redis.Redis.from_url(url, **retry_policy())
