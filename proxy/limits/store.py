"""The store protocol: where limits' state lives. It returns value and time together, so all workers decide on one clock.

What is asked of it is decided in ``limiter.py``; how the answer is found, in ``admission.py`` and its Lua twin. All limits of one
call are of one domain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from proxy.limits.model import (
    ANYONE,
    DEFAULT_DOMAIN,
    NO_POOL,
    Admission,
    Applicant,
    BoundLimit,
    Correction,
    Demand,
    Heartbeat,
    Level,
    Pool,
    Settled,
    Sight,
)

Wake = Callable[[str], None]


class Store(Protocol):
    """Shared state of all workers. Every method raises StoreUnavailable within a bounded time when there is no answer."""

    async def admit(self, demands: Sequence[Demand], applicant: Applicant = ANYONE, pool: Pool = NO_POOL) -> Admission:
        """Charge every demand or none, atomically. Never repeated by the store: an unclear outcome is StoreUnavailable.

        Every call carries a deadline in the store's time, so that one which waits out a pause of the store charges nothing.
        """
        ...

    async def settle(self, domain: str, worker: str, sequence: int, corrections: Sequence[Correction]) -> Settled:
        """Apply a worker's numbered settle once, however often it is sent. Answers with the last number applied."""
        ...

    async def cancel(self, domain: str, request_id: str) -> None:
        """Drop a request's ticket."""
        ...

    async def beat(self, domain: str, worker: str) -> Heartbeat:
        """Say that a worker lives."""
        ...

    async def restore(self, domain: str, sights: Sequence[Sight]) -> None:
        """Tell a store that has lost its memory how limits were last seen; else it does nothing."""
        ...

    async def peek(self, bounds: Sequence[BoundLimit]) -> tuple[Level, ...]:
        """Where limits stand, changing nothing. They may be of several domains."""
        ...

    def listen(self, domains: Sequence[str], worker: str, wake: Wake) -> None:
        """From now on ``wake`` is called with the ids of requests of this worker whose turn may have come. Calls may be lost."""
        ...

    async def ping(self) -> None:
        """Return when the store answers and can be written to."""
        ...

    async def close(self) -> None:
        """Give connections back."""
        ...


def worker_of(request_id: str) -> str:
    """The worker that a request is of: ids are ``<worker>:<number>``."""
    return request_id.rpartition(":")[0]


def domain_of(demands: Sequence[Demand], pool: Pool = NO_POOL) -> str:
    """The domain of one call's limits."""
    asked = [*demands, *(demand for candidate in pool.candidates for demand in candidate.demands)]
    return asked[0].bound.domain if asked else DEFAULT_DOMAIN
