"""The limiter: reserve before the call, settle after it, exactly once. Counting is the script's; IO is the store's.

Tells the story of one admission: asked at once, then, where the caller has patience, again whenever its turn may have come, and
given back if the caller leaves meanwhile. What is reserved is ``costs.py``'s decision.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from proxy.clock import Clock
from proxy.errors import StoreUnavailable
from proxy.limits.costs import Ask, cost_of
from proxy.limits.decisions import decisions_of
from proxy.limits.model import DEFAULT_DOMAIN, Admission, Applicant, BoundLimit, Correction, Demand, Priority, Verdict
from proxy.limits.reservations import Refusal, Reservation
from proxy.limits.settling import Booking, Settling
from proxy.limits.store import Store, domain_of
from proxy.limits.waiting import WaitingRoom, pause_s

RENEW_EVERY_S = 5.0  # leases: a third of their life
_CLOSE_WITHIN_S = 2.0


@dataclass(frozen=True, slots=True)
class Patience:
    """Who asks, how urgent it is, and for how many seconds it would rather wait than be refused.

    ``max_waiters``: how many requests of its tenant may wait at once, this one included.
    """

    tenant: str = ""
    priority: Priority = Priority.INTERACTIVE
    wait_s: float = 0.0
    max_waiters: int = 0


NO_PATIENCE = Patience()


def _unobserved(_change: int) -> None:
    """Nobody counts who waits."""


class Limiter:
    """``worker`` names this process's incarnation: it must be new at every start, as its settles are numbered from 1.

    ``on_waiting`` is told 1 for each request that begins to wait, and -1 when it waits no more.
    """

    def __init__(
        self,
        store: Store,
        worker: str,
        clock: Clock,
        *,
        domains: Sequence[str] = (DEFAULT_DOMAIN,),
        on_waiting: Callable[[int], None] = _unobserved,
    ) -> None:
        self._store = store
        self._worker = worker
        self._clock = clock
        self._settling = Settling(store, worker)
        self._room = WaitingRoom(store, worker, clock, domains)
        self._on_waiting = on_waiting
        self._late: set[asyncio.Future[Any]] = set()  # the loop keeps only weak references to tasks
        self._admissions = 0
        self._holders: set[Reservation] = set()  # open ones that hold leases
        self._renewer: asyncio.Task[None] | None = None

    async def reserve(self, bounds: Sequence[BoundLimit], ask: Ask, patience: Patience = NO_PATIENCE) -> Reservation | Refusal:
        """Charge every limit or none. Raises StoreUnavailable. A caller that is cancelled meanwhile leaves no charge."""
        self._admissions += 1
        request_id = f"{self._worker}:{self._admissions}"
        if not bounds:
            return Reservation(self, request_id, (), Admission(Verdict.GRANTED, now_us=0))
        demands = [Demand(bound, cost_of(bound, ask)) for bound in bounds]
        wait_us = int(patience.wait_s * 1e6)
        applicant = Applicant(request_id, patience.tenant, patience.priority, wait_us, patience.max_waiters)
        started = self._clock.monotonic()
        admission = await self._ask(demands, applicant)
        waited_s = 0.0
        if admission.verdict is Verdict.WAITING:
            admission = await self._wait(demands, applicant, admission, started + patience.wait_s)
            waited_s = self._clock.monotonic() - started
        if admission.granted:
            return self._hold(Reservation(self, request_id, demands, admission, waited_s))
        decisions = decisions_of(demands, admission)
        return Refusal(decisions[admission.refused], decisions, waited_s)

    async def _ask(self, demands: Sequence[Demand], applicant: Applicant) -> Admission:
        asking = asyncio.ensure_future(self._store.admit(demands, applicant))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            self._late.add(asking)
            asking.add_done_callback(lambda late: self._give_back(late, demands, applicant.request_id))
            raise

    async def _wait(self, demands: Sequence[Demand], applicant: Applicant, admission: Admission, deadline: float) -> Admission:
        """Ask again whenever its turn may have come, and a last time at the deadline."""
        self._on_waiting(1)
        try:
            with self._room.seat(applicant.request_id) as bell:
                while admission.verdict is Verdict.WAITING:
                    left_s = max(0.0, deadline - self._clock.monotonic())
                    await self._room.pause(bell, min(left_s, pause_s(admission)))
                    left_us = max(0, int((deadline - self._clock.monotonic()) * 1e6))
                    admission = await self._ask(demands, replace(applicant, is_first=False, wait_us=left_us))
        except BaseException:
            self._drop_ticket(domain_of(demands), applicant.request_id)
            raise
        finally:
            self._on_waiting(-1)
        return admission

    def _drop_ticket(self, domain: str, request_id: str) -> None:
        async def cancel() -> None:
            with contextlib.suppress(StoreUnavailable):  # then the ticket lapses by itself within seconds
                await self._store.cancel(domain, request_id)

        cancelling = asyncio.ensure_future(cancel())
        self._late.add(cancelling)
        cancelling.add_done_callback(self._late.discard)

    def _give_back(self, late: asyncio.Task[Admission], demands: Sequence[Demand], request_id: str) -> None:
        """The store has answered one who left."""
        self._late.discard(late)
        if late.cancelled() or late.exception() is not None:
            return
        if late.result().granted:
            Reservation(self, request_id, demands, late.result()).release()
        elif late.result().verdict is Verdict.WAITING:
            self._drop_ticket(domain_of(demands), request_id)

    # what is held, and for how long -------------------------------------------------------------------------------------

    def _hold(self, reservation: Reservation) -> Reservation:
        if reservation.renewals():
            self._holders.add(reservation)
            if self._renewer is None:
                self._renewer = asyncio.create_task(self._renew())
        return reservation

    def book(self, reservation: Reservation, corrections: Sequence[Correction]) -> Booking | None:
        """See ``reservations.Books``."""
        self._holders.discard(reservation)
        if not corrections:
            return None
        booking = self._settling.post(corrections)
        return None if self._settling.is_stuck(corrections[0].bound.domain) else booking

    async def _renew(self) -> None:
        """Renew all leases in the stream of settles: after one that ends a lease, none can bring it back."""
        while True:
            await asyncio.sleep(RENEW_EVERY_S)
            await self.renew()

    async def renew(self) -> None:
        """Renew the leases of all open reservations, and wait until the store has it."""
        bookings = [self._settling.post(renewals) for held in self._holders if (renewals := held.renewals())]
        if bookings:
            await asyncio.wait(bookings)

    async def close(self) -> None:
        """Send what is still to be settled, for a bounded time."""
        if self._renewer is not None:
            self._renewer.cancel()
        if self._late:
            await asyncio.wait(self._late, timeout=_CLOSE_WITHIN_S)
        await self._settling.close()
