"""A store inside one process: the oracle of the contract suite, and what unit tests run on. Nothing outlives it.

The decisions are ``admission.py``'s; this adds the clock, one state for each domain, and the passing on of wake-ups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from proxy.limits import admission
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
from proxy.limits.state import State
from proxy.limits.store import Wake, domain_of, worker_of


class MemoryStore:
    """``time_us`` gives the store's time in microseconds since 1970."""

    def __init__(self, time_us: Callable[[], int]) -> None:
        self._time_us = time_us
        self._states: dict[str, State] = {}
        self._epochs: dict[str, int] = {}  # as last heard of, by domain
        self._listeners: dict[str, Wake] = {}

    def state(self, domain: str = DEFAULT_DOMAIN) -> State:
        """All that is kept of a domain."""
        return self._states.setdefault(domain, State())

    def forget(self) -> None:
        """Lose everything, as a server does that restarts without its files."""
        self._states.clear()

    async def admit(self, demands: Sequence[Demand], applicant: Applicant = ANYONE, pool: Pool = NO_POOL) -> Admission:
        """See ``store.Store``."""
        domain = domain_of(demands, pool)
        state = self.state(domain)
        admitted = admission.admit(
            state, demands, self._time_us(), applicant=applicant, pool=pool, known_epoch=self._epochs.get(domain, 0)
        )
        self._epochs[domain] = admitted.epoch
        self._pass_on(state)
        return admitted

    async def settle(self, domain: str, worker: str, sequence: int, corrections: Sequence[Correction]) -> Settled:
        """See ``store.Store``."""
        state = self.state(domain)
        settled = admission.settle(state, worker, sequence, corrections, self._time_us(), self._epochs.get(domain, 0))
        self._pass_on(state)
        return settled

    async def cancel(self, domain: str, request_id: str) -> None:
        """See ``store.Store``."""
        state = self.state(domain)
        admission.cancel(state, request_id, self._time_us())
        self._pass_on(state)

    async def beat(self, domain: str, worker: str) -> Heartbeat:
        """See ``store.Store``."""
        heartbeat = admission.beat(self.state(domain), worker, self._time_us(), self._epochs.get(domain, 0))
        self._epochs[domain] = heartbeat.epoch
        return heartbeat

    async def restore(self, domain: str, sights: Sequence[Sight]) -> None:
        """See ``store.Store``."""
        admission.restore(self.state(domain), sights, self._time_us(), self._epochs.get(domain, 0))

    async def peek(self, bounds: Sequence[BoundLimit]) -> tuple[Level, ...]:
        """See ``store.Store``."""
        return tuple(admission.peek(self.state(bound.domain), [bound], self._time_us())[0] for bound in bounds)

    def listen(self, domains: Sequence[str], worker: str, wake: Wake) -> None:
        """See ``store.Store``."""
        self._listeners[worker] = wake

    async def ping(self) -> None:
        """Always answers."""

    async def close(self) -> None:
        """Nothing to give back."""

    def _pass_on(self, state: State) -> None:
        woken, state.woken = state.woken, []
        for request_id in woken:
            listener = self._listeners.get(worker_of(request_id))
            if listener is not None:
                listener(request_id)
