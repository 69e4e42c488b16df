"""Claims: what one demand finds at its limit. Does it fit, beside the headroom that its class leaves? Who goes first? Is it owed?

Decides for one limit at a time; ``admission.py`` decides what follows for the request. A claim holds the class accounts of its
limit in hand (``classes.py``), since what the class is owed changes with the outcome.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from proxy.limits import classes, levels, queues
from proxy.limits.leases import UNKNOWN_HOLD_US
from proxy.limits.model import Applicant, BoundLimit, Demand, Priority
from proxy.limits.state import ClassUse, State


@dataclass(slots=True)
class Claim:
    """A demand and what is in its way: its wait (0 none, -1 it can never fit), and how many tickets ``ahead`` of it."""

    demand: Demand
    use: ClassUse | None
    wait_us: int
    is_by_credit: bool = False
    ahead: int = 0

    @property
    def is_refused(self) -> bool:
        """Whether it can't go now: it does not fit, or others go first."""
        return not self.demand.bound.limit.is_shadow and (self.wait_us != 0 or self.ahead > 0)

    def is_owed(self, priority: Priority) -> bool:
        """Whether the class's guaranteed share pays for it."""
        return self.use is not None and classes.has_credit(self.use, self.demand.bound, priority, self.demand.cost)


def claim(state: State, demand: Demand, applicant: Applicant, now_us: int) -> Claim:
    """Whether the demand fits, by itself: it leaves headroom to higher classes unless its own is owed something."""
    bound, priority = demand.bound, applicant.priority
    found = Claim(demand, _use(state, bound, priority, now_us), 0)
    if demand.cost > bound.limit.capacity:
        found.wait_us = -1
    elif demand.cost > 0:
        held = state.leases.get(bound.key)
        hold_us = UNKNOWN_HOLD_US if held is None or held.hold_us is None else held.hold_us
        headroom = classes.headroom(found.use, demand, priority, hold_us, now_us)
        found.wait_us = levels.wait_us(state, bound, demand.cost + headroom, now_us)
        if found.wait_us != 0 and headroom > 0 and found.is_owed(priority):
            found.is_by_credit = levels.wait_us(state, bound, demand.cost, now_us) == 0
            found.wait_us = 0 if found.is_by_credit else found.wait_us
    return found


def _use(state: State, bound: BoundLimit, priority: Priority, now_us: int) -> ClassUse | None:
    """What is known of classes at this limit; it is only kept while lower ones call."""
    use = state.classes.get(bound.key)
    if priority is Priority.INTERACTIVE:
        if use is None or not classes.is_tracked(bound, state.lower_us, now_us):
            return None
    elif use is None:
        use = state.classes[bound.key] = classes.begin(bound, levels.used(state, bound, now_us), now_us)
    classes.roll(use, bound, now_us)
    if priority is not Priority.INTERACTIVE:
        classes.accrue(use, bound, priority, now_us)
    return use


def ask(claims: Iterable[Claim], priority: Priority) -> None:
    """Count a request's first asking as demand of its class."""
    for found in claims:
        if found.use is not None:
            classes.ask(found.use, found.demand.bound, priority, found.demand.cost)


def line_up(state: State, applicant: Applicant, claims: Sequence[Claim], place: int) -> int:
    """Count who goes first at each limit. A ticket whose class is owed its cost goes before all others; returns the place."""
    if not state.tickets:
        return place
    _count_ahead(state, claims, place)
    if applicant.priority is Priority.INTERACTIVE or applicant.request_id not in state.tickets:
        return place
    refused = [found for found in claims if found.is_refused]
    if not refused or not all(found.is_owed(applicant.priority) for found in refused):
        return place
    _count_ahead(state, claims, state.virtual)
    return state.virtual


def _count_ahead(state: State, claims: Iterable[Claim], place: int) -> None:
    for found in claims:
        found.ahead = queues.ahead(state, found.demand.bound.key, place)


def hold_up(claims: Iterable[Claim], priority: Priority, now_us: int) -> None:
    """A class that got nothing here is owed its share of the time until it asks again."""
    for found in claims:
        if found.use is not None and priority is not Priority.INTERACTIVE:
            found.use.held_up_us[priority - 1] = now_us


def granted(state: State, claims: Iterable[Claim], priority: Priority, now_us: int) -> None:
    """Count a grant for its class, and take it off what that is owed."""
    for found in claims:
        if found.use is None:
            continue
        classes.grant(found.use, priority, found.demand.cost)
        if priority is not Priority.INTERACTIVE:
            classes.pay(found.use, priority, found.demand.cost, is_by_credit=found.is_by_credit)
            found.use.held_up_us[priority - 1] = now_us if found.is_by_credit or state.tickets else 0
