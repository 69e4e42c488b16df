"""Priority classes: what a lower class must leave free for the higher ones, and the small share it is owed all the same.

Decides numbers only. On a token bucket, where what is unused is kept, a lower class leaves a fixed part: normal 10 %,
background 50 %. On windows and leases, where what is unused is lost, it leaves what the higher classes probably still need: what
they asked for and did not get, and three standard deviations of what they ask for in a period. Without their demand it leaves
nothing. A class that gets less than its guaranteed share (normal 10 %, background 5 % of the rate) is owed the rest, and that
credit pays for passing the headroom; never for passing the limit.

Example: a window of 10,000 a minute, half of it used by interactive requests. Background may use all but 3 x sqrt(5000) + 1 = 213.
"""

from __future__ import annotations

import math

from proxy.limits.model import Algorithm, BoundLimit, Demand, Priority
from proxy.limits.state import ClassUse

FLOOR_PERCENT = (0, 10, 50)  # by class: what it leaves at most
SHARE_PERCENT = (0, 10, 5)  # by class: what it is guaranteed
ACCRUES_US = 5_000_000  # from one call that was held up to the next, at most


def is_tracked(bound: BoundLimit, lower_us: int, now_us: int) -> bool:
    """Whether demand is counted: only while lower classes call, and where headroom follows from it."""
    return bound.limit.algorithm is not Algorithm.TOKEN_BUCKET and lower_us > 0 and now_us - lower_us < 2 * bound.period_us


def begin(bound: BoundLimit, used: int, now_us: int) -> ClassUse:
    """For the first call of a lower class: until then, whatever is used was used by the highest."""
    use = ClassUse(period=now_us // bound.period_us)
    if bound.limit.algorithm is Algorithm.SLIDING_WINDOW:
        use.demand[0] = use.granted[0] = used
    return use


def roll(use: ClassUse, bound: BoundLimit, now_us: int) -> None:
    """Come to the period of ``now_us``."""
    period = now_us // bound.period_us
    if period == use.period:
        return
    is_next = period == use.period + 1
    use.demand_before = use.demand if is_next else [0, 0]
    use.granted_before = use.granted if is_next else [0, 0]
    use.demand, use.granted = [0, 0], [0, 0]
    use.period = period


def headroom(use: ClassUse | None, demand: Demand, priority: Priority, hold_us: float, now_us: int) -> int:
    """Units that a request of this class must leave free. ``hold_us``: how long a lease is usually held."""
    bound = demand.bound
    capacity = bound.limit.capacity
    most = min(capacity * FLOOR_PERCENT[priority] // 100, capacity - demand.cost)
    if priority is Priority.INTERACTIVE or most <= 0:
        return 0
    if bound.limit.algorithm is Algorithm.TOKEN_BUCKET:
        return most
    if use is None:
        return 0
    kept = 1.0 - (now_us - use.period * bound.period_us) / bound.period_us
    wanted, got = 0.0, 0.0
    for higher in range(priority):
        wanted += use.demand[higher] + use.demand_before[higher] * kept
        got += use.granted[higher] + use.granted_before[higher] * kept
    if bound.limit.algorithm is Algorithm.LEASES:  # from requests in a period to requests at once
        wanted *= hold_us / bound.period_us
        got *= hold_us / bound.period_us
    if wanted <= 0:
        return 0
    return min(most, math.floor(max(0.0, wanted - got) + 3 * math.sqrt(wanted) + 1))


def ask(use: ClassUse, bound: BoundLimit, priority: Priority, cost: int) -> None:
    """Count a demand of a class that lower ones give way to; at most the capacity in a period."""
    if priority < Priority.BACKGROUND:
        use.demand[priority] = min(bound.limit.capacity, use.demand[priority] + cost)


def grant(use: ClassUse, priority: Priority, cost: int) -> None:
    """Count what such a class was granted."""
    if priority < Priority.BACKGROUND:
        use.granted[priority] += cost


def most_credit(bound: BoundLimit, priority: Priority) -> float:
    """What a class may be owed: its share of one period."""
    return bound.limit.capacity * SHARE_PERCENT[priority] / 100


def accrue(use: ClassUse, bound: BoundLimit, priority: Priority, now_us: int) -> None:
    """Add what the class is owed for the time since it was last held up."""
    own = priority - 1
    if use.held_up_us[own]:
        rate = bound.limit.amount / bound.period_us * SHARE_PERCENT[priority] / 100
        owed = use.credit[own] + rate * min(now_us - use.held_up_us[own], ACCRUES_US)
        use.credit[own] = min(most_credit(bound, priority), owed)
        use.held_up_us[own] = now_us


def has_credit(use: ClassUse, bound: BoundLimit, priority: Priority, cost: int) -> bool:
    """Whether what the class is owed pays for this request."""
    most = most_credit(bound, priority)
    return most > 0 and use.credit[priority - 1] >= min(float(cost), most)


def pay(use: ClassUse, priority: Priority, cost: int, *, is_by_credit: bool) -> None:
    """Take a grant off what is owed. Only one that was paid by credit may leave less than nothing."""
    own = priority - 1
    left = use.credit[own] - cost
    use.credit[own] = left if is_by_credit else max(left, min(use.credit[own], 0.0))
