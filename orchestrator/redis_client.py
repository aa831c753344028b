"""Connecting to Redis, for the manager, the house, the command line and the dashboard."""

from typing import Any

import redis

INBOX_MAX = 100_000  # events that wait for a manager
ANSWER_S_MAX, TRIES = 30.0, 20
PACE = {"cap": 0.5, "base": 0.02}  # seconds between two tries


def retry_policy(*, asynchronous: bool = False) -> dict[str, Any]:
    """Return the options with which every client waits a bounded time for a restarting server.

    A server that hangs is asked again and again, for ten minutes: parts of the house need it.
    """
    from redis.asyncio.retry import Retry as AsyncRetry
    from redis.backoff import ExponentialBackoff
    from redis.retry import Retry

    kind = AsyncRetry if asynchronous else Retry
    return {
        "retry": kind(ExponentialBackoff(**PACE), retries=TRIES),
        "retry_on_error": [redis.ConnectionError, redis.TimeoutError, redis.BusyLoadingError],
        "socket_timeout": ANSWER_S_MAX,
        "health_check_interval": 0,
    }


def brief_policy() -> dict[str, Any]:
    """Return the options for a person's commands, which ask a server that hangs only once."""
    from redis.backoff import ExponentialBackoff
    from redis.retry import Retry

    away = (redis.ConnectionError,)
    retry = Retry(ExponentialBackoff(**PACE), TRIES, away)
    return {"retry": retry, "socket_timeout": ANSWER_S_MAX}


def connect(url: str) -> "redis.Redis":
    return redis.Redis.from_url(url, **retry_policy())
