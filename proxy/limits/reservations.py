"""What an admitted request holds, and what a refused one is told. "No" is an answer here, not an exception.

A reservation is settled exactly once, however the request ends; how that reaches the store is ``settling.py``'s affair.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from proxy.limits.decisions import decisions_of
from proxy.limits.model import Admission, Correction, Decision, Demand, Spent, Unit
from proxy.limits.settling import Booking

SETTLE_WAIT_S = 0.05  # how long an answer is held back so that its own settle is visible to the client's next request


class Books(Protocol):
    """Where a reservation's settle goes."""

    def book(self, reservation: Reservation, corrections: Sequence[Correction]) -> Booking | None:
        """Take the corrections of a reservation that has ended. None: there is nothing that one could wait for."""


class Reservation:
    """What one admitted request holds. ``settle`` it exactly once, however the request ends; later calls do nothing."""

    __slots__ = ("_books", "_cells", "_demands", "_settled", "decisions", "is_local", "request_id", "waited_s")

    def __init__(
        self, books: Books, request_id: str, demands: Sequence[Demand], admission: Admission, waited_s: float = 0.0
    ) -> None:
        self._books = books
        self._demands = demands
        self._cells = admission.cells
        self._settled = False
        self.request_id = request_id
        self.is_local = admission.is_local
        self.waited_s = waited_s
        self.decisions = decisions_of(demands, admission)

    def __repr__(self) -> str:
        held = ", ".join(f"{demand.bound.limit.name}={demand.cost}" for demand in self._demands)
        return f"<Reservation {held or 'nothing'}, {'settled' if self._settled else 'open'}>"

    def settle(self, spent: Spent | None, *, is_request_kept: bool) -> Booking | None:
        """Book what was ``spent`` (None: as reserved), and whether the request itself counts.

        Returns a future that is done when the store has it, or None when there is nothing to wait for.
        """
        if self._settled:
            return None
        self._settled = True
        corrections = []
        for demand, cell in zip(self._demands, self._cells, strict=True):
            unit = demand.bound.limit.unit
            if unit is Unit.CONCURRENCY:
                delta = -demand.cost
            elif unit is Unit.REQUESTS:
                delta = 0 if is_request_kept else -demand.cost
            else:
                delta = 0 if spent is None else spent.of(unit) - demand.cost
            if delta or self.is_local:
                corrections.append(Correction(demand.bound, cell, delta, self.request_id))
        return self._books.book(self, corrections)

    def charges(self) -> list[tuple[Demand, int]]:
        """What was charged, and into which cell."""
        return list(zip(self._demands, self._cells, strict=True))

    def renewals(self) -> list[Correction]:
        """What keeps this request's leases alive; nothing when it holds none."""
        return [
            Correction(d.bound, cell, 0, self.request_id) for d, cell in self.charges() if d.bound.limit.unit is Unit.CONCURRENCY
        ]

    def release(self) -> Booking | None:
        """Give everything back: nothing was sent."""
        return self.settle(Spent(0, 0, 0), is_request_kept=False)


@dataclass(frozen=True, slots=True)
class Refusal:
    """``refuser`` says which limit refused and for how long; ``decisions`` are the levels of all limits asked."""

    refuser: Decision
    decisions: tuple[Decision, ...]
    waited_s: float = 0.0


async def settled(booking: Booking | None) -> None:
    """Wait briefly until a settle is in the store, so that a client which asks again meets its own refund."""
    if booking is not None:
        await asyncio.wait([booking], timeout=SETTLE_WAIT_S)
