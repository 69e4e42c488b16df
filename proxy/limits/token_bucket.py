"""Token bucket: continuous refill up to a capacity, so at most ``burst + rate x T`` passes in any interval of length T.

Decides levels and waits from numbers alone; when to ask and where the numbers live is the store's affair. The same
arithmetic stands in ``lua/limits.lua``, operation by operation, so that both give the same doubles.

Example: capacity 10, rate 60/min (1 per second). Ten at once pass, the eleventh waits 1 s; after 3 idle seconds three pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LONGEST_US = 10**15  # 31 years stand for any longer time, so that times fit the integers of every store

_SLACK = 1e-6  # of one unit: less than any cost, more than the rounding of years of refills


@dataclass(slots=True)
class Bucket:
    """``level`` units were in the bucket at store time ``at_us``. Negative: debt."""

    level: float
    at_us: int


def level_at(bucket: Bucket | None, capacity: int, amount: int, period_us: int, now_us: int) -> float:
    """The level now; an absent bucket is full."""
    if bucket is None:
        return float(capacity)
    return min(float(capacity), bucket.level + amount / period_us * (now_us - bucket.at_us))


def wait_us(level: float, cost: int, amount: int, period_us: int) -> int:
    """Microseconds until ``cost`` fits: 0 now, -1 never (the rate is zero). The caller has checked cost <= capacity."""
    if level + _SLACK >= cost:
        return 0
    if amount == 0:
        return -1
    return min(LONGEST_US, math.ceil((cost - level) / (amount / period_us)) + 1)


def reset_us(level: float, capacity: int, amount: int, period_us: int) -> int:
    """Microseconds until the bucket is full if nobody takes from it; 0 for a rate of zero."""
    if amount == 0 or level >= capacity:
        return 0
    return min(LONGEST_US, math.ceil((capacity - level) / (amount / period_us)))


def remaining(level: float) -> int:
    """Whole units left."""
    return math.floor(level + _SLACK)
