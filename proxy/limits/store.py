"""The store protocol: where limits' state lives. It returns value and time together, so all workers decide on one clock.

What is asked of it is decided in ``limiter.py``; how the answer is found, in ``admission.py`` and its Lua twin.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from proxy.limits.model import Admission, BoundLimit, Correction, Demand, Level


class Store(Protocol):
    """Shared state of all workers. Every method raises StoreUnavailable within a bounded time when there is no answer."""

    async def admit(self, demands: Sequence[Demand], request_id: str = "") -> Admission:
        """Charge every demand or none, atomically. Never repeated by the store: an unclear outcome is StoreUnavailable.

        ``request_id`` is unique, and holds the leases.
        Every call carries a deadline in the store's time, so that one which waits out a pause of the store charges nothing.
        """
        ...

    async def settle(self, worker: str, sequence: int, corrections: Sequence[Correction]) -> int:
        """Apply a worker's numbered settle once, however often it is sent. Returns the last number applied."""
        ...

    async def peek(self, bounds: Sequence[BoundLimit]) -> tuple[Level, ...]:
        """Where limits stand, changing nothing."""
        ...

    async def ping(self) -> None:
        """Return when the store answers and can be written to."""
        ...

    async def close(self) -> None:
        """Give connections back."""
        ...
