"""Token buckets in memory: limit requests per minute, of each key or of all clients."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from everyframe.server.errors import ApiError


class RateLimit:
    """A bucket of `a_minute` tokens for each name, refilled evenly; None lets everything pass."""

    def __init__(self, a_minute: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._clock = a_minute, clock
        self._buckets: dict[str, tuple[float, float]] = {}
        self._lock = threading.Lock()

    def take(self, name: str) -> None:
        """Take a token. Raises `ApiError` with the time to wait if there is none."""
        if self._most is None:
            return
        rate = self._most / 60
        with self._lock:
            now = self._clock()
            tokens, since = self._buckets.get(name, (float(self._most), now))
            tokens = min(self._most, tokens + (now - since) * rate)
            wait = (1 - tokens) / rate
            self._buckets[name] = (tokens if wait > 0 else tokens - 1, now)
        if wait > 0:
            raise ApiError(
                "rate_limited",
                f"at most {self._most} requests a minute may create something; wait "
                f"{math.ceil(wait)} seconds",
                headers={"retry-after": str(math.ceil(wait))},
            )
