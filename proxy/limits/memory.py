"""A store inside one process: the oracle of the contract suite, and what unit tests run on. Nothing outlives it.

The decisions are ``admission.py``'s; this adds only the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from proxy.limits import admission
from proxy.limits.model import Admission, BoundLimit, Correction, Demand, Level


class MemoryStore:
    """``time_us`` gives the store's time in microseconds since 1970."""

    def __init__(self, time_us: Callable[[], int]) -> None:
        self._time_us = time_us
        self._state = admission.State()

    async def admit(self, demands: Sequence[Demand], request_id: str = "") -> Admission:
        """See ``store.Store``."""
        return admission.admit(self._state, demands, self._time_us(), request_id=request_id)

    async def settle(self, worker: str, sequence: int, corrections: Sequence[Correction]) -> int:
        """See ``store.Store``."""
        return admission.settle(self._state, worker, sequence, corrections, self._time_us())

    async def peek(self, bounds: Sequence[BoundLimit]) -> tuple[Level, ...]:
        """See ``store.Store``."""
        return admission.peek(self._state, bounds, self._time_us())

    async def ping(self) -> None:
        """Always answers."""

    async def close(self) -> None:
        """Nothing to give back."""
