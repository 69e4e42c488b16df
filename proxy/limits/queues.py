"""Queues: who goes first where requests wait. Nothing is charged for a ticket; its holder asks again when it may be its turn.

A ticket has one place, the same in every queue it stands in, so that two queues never hold each other up: its class first, then
its tag. Tags make tenants take turns on what they share: each ticket's tag lies behind its tenant's last one, and not before
the last one served, by the part of the shared limits that it asks for. Within a tenant and class that is the order of arrival.
A ticket that was not seen for 5 s is dead: its worker was killed, or its client left and the word of it was lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from proxy.limits.model import SERVICE, Applicant, Demand
from proxy.limits.state import State, Ticket

CLASS_STEP = 10**15  # more than any tag of a busy time: a tag grows by a million for all of a shared limit
ALL_OF_A_LIMIT = 1_000_000
LIVES_US = 5_000_000
SWEEP_AT_ONCE = 100


def sweep(state: State, now_us: int) -> None:
    """Drop dead tickets, those not seen for longest first."""
    by_sight = sorted((ticket.seen_us, request_id) for request_id, ticket in state.tickets.items())
    for seen_us, request_id in by_sight[:SWEEP_AT_ONCE]:
        if seen_us < now_us - LIVES_US:
            drop(state, request_id)


def tag_of(state: State, applicant: Applicant, demands: Sequence[Demand]) -> int:
    """The tag that a newcomer would have."""
    shared = [d for d in demands if d.bound.owner == SERVICE and d.bound.limit.capacity]
    parts = [min(1.0, d.cost / d.bound.limit.capacity) * ALL_OF_A_LIMIT for d in shared]
    return max(state.virtual, state.tags.get(applicant.tenant, 0)) + max([1, *(math.floor(part) for part in parts)])


def ahead(state: State, queue: str, place: int) -> int:
    """How many tickets in ``queue`` go before ``place``."""
    return sum(other < place for other in state.queues.get(queue, {}).values())


def waiters(state: State, tenant: str) -> int:
    """How many tickets a tenant has."""
    return sum(ticket.tenant == tenant for ticket in state.tickets.values())


def place_of(state: State, applicant: Applicant, demands: Sequence[Demand]) -> int:
    """Its ticket's place, or the one that a newcomer would have."""
    ticket = state.tickets.get(applicant.request_id)
    return ticket.place if ticket is not None else applicant.priority * CLASS_STEP + tag_of(state, applicant, demands)


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a request stands: its own place, and the better one that it has while its class is owed its cost."""

    own: int
    place: int


def enqueue(state: State, applicant: Applicant, standing: Standing, queues: Iterable[str], now_us: int) -> None:
    """Stand in exactly these queues."""
    ticket = state.tickets.get(applicant.request_id)
    if ticket is None:
        ticket = state.tickets[applicant.request_id] = Ticket(standing.own, applicant.tenant, now_us)
        state.tags[applicant.tenant] = standing.own % CLASS_STEP
    leave(state, applicant.request_id, ticket)
    ticket.seen_us = now_us
    ticket.queues = tuple(queues)
    for queue in ticket.queues:
        state.queues.setdefault(queue, {})[applicant.request_id] = standing.place


def leave(state: State, request_id: str, ticket: Ticket) -> None:
    """Leave all queues, keeping the ticket."""
    for queue in ticket.queues:
        state.queues[queue].pop(request_id, None)
        if not state.queues[queue]:
            del state.queues[queue]


def drop(state: State, request_id: str) -> None:
    """Give a ticket up, and wake those who come first now."""
    ticket = state.tickets.pop(request_id, None)
    if ticket is None:
        return
    leave(state, request_id, ticket)
    for queue in ticket.queues:
        wake(state, queue)
    if not state.tickets:
        state.tags.clear()
        state.virtual = 0


def served(state: State, tenant: str, tag: int) -> None:
    """One with this tag has got its turn."""
    state.tags[tenant] = max(tag, state.tags.get(tenant, 0))
    state.virtual = max(tag, state.virtual)


def wake(state: State, queue: str) -> None:
    """Whoever is first in ``queue`` should ask again now."""
    found = state.queues.get(queue)
    if found:
        first = min((place, request_id) for request_id, place in found.items())[1]
        if first not in state.woken:
            state.woken.append(first)
