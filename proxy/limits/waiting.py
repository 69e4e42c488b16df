"""How a request that has a ticket passes its time: it sleeps until the store may have a turn for it, or wakes it.

Decides how long a pause is; whose turn it is is the script's decision. A word from the store may be lost, so every pause ends.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence

from proxy.clock import Clock
from proxy.limits.model import Admission
from proxy.limits.store import Store

_SHORTEST_S = 0.001
_FIRST_LOOKS_EVERY_S = 0.25  # whoever is first in line: what it waits for may come free before its time
_OTHERS_LOOK_EVERY_S = 2.0  # less than a ticket lives


def pause_s(admission: Admission) -> float:
    """Seconds until a request that waits should ask again."""
    if admission.position > 0:
        return _OTHERS_LOOK_EVERY_S
    return min(max(admission.wait_us / 1e6, _SHORTEST_S), _FIRST_LOOKS_EVERY_S)


class WaitingRoom:
    """The requests of one worker that wait, each with a bell that the store may ring."""

    def __init__(self, store: Store, worker: str, clock: Clock, domains: Sequence[str]) -> None:
        self._store = store
        self._worker = worker
        self._clock = clock
        self._domains = domains
        self._bells: dict[str, asyncio.Event] = {}
        self._is_listening = False

    @contextlib.contextmanager
    def seat(self, request_id: str) -> Iterator[asyncio.Event]:
        """A bell for this request. It keeps a ring that comes while nobody listens to it."""
        if not self._is_listening:
            self._is_listening = True
            self._store.listen(self._domains, self._worker, self.ring)
        bell = self._bells[request_id] = asyncio.Event()
        try:
            yield bell
        finally:
            del self._bells[request_id]

    async def pause(self, bell: asyncio.Event, seconds: float) -> None:
        """Return when the bell has rung since the last pause, or after ``seconds``."""
        await self._clock.wait(bell, seconds)
        bell.clear()

    def ring(self, request_id: str) -> None:
        """It may be this request's turn."""
        bell = self._bells.get(request_id)
        if bell is not None:
            bell.set()
