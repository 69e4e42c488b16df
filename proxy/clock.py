"""The only reader of time and randomness, so that tests decide both. What the values mean is the callers' affair.

Limits do not use this clock: they are decided on the store's time (see ``limits/store.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time


class Clock:
    """Wall time, elapsed time and unguessable tokens. Tests hand in a subclass that they move by hand."""

    def monotonic(self) -> float:
        """Seconds from an arbitrary start that never run backwards: for durations."""
        return time.monotonic()

    def unix(self) -> float:
        """Seconds since 1970-01-01 UTC: for timestamps that people or clients read."""
        return time.time()

    def token(self, size_bytes: int = 12) -> str:
        """A hexadecimal token of ``size_bytes`` random bytes from the system's secure source."""
        return secrets.token_hex(size_bytes)

    async def wait(self, event: asyncio.Event, seconds: float) -> None:
        """Return when ``event`` is set, or after ``seconds``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await event.wait()
