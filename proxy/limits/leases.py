"""Leases: how many requests run at once. Each holds a lease that lapses by itself unless it is renewed, so kill -9 leaks none.

Decides from numbers alone; renewing in time is the limiter's affair. The same arithmetic stands in ``lua/limits.lua``. When a
slot will be free nobody knows: the wait is an estimate, a moving average of how long leases were held, shared by the holders.

Example: at most 3. Three are held for some 6 s each; a fourth request is told to come back in 2 s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from proxy.limits.model import LEASE_S

LEASE_US = LEASE_S * 1_000_000

UNKNOWN_HOLD_US = 1_000_000.0
SHORTEST_WAIT_US = 1_000
_LONGEST_HOLD_US = 10**12 - 1
_WEIGHT = 8  # of the past, against one more hold


@dataclass(slots=True)
class Leases:
    """``lapses_us`` by request id, and the average hold, None before the first."""

    lapses_us: dict[str, int] = field(default_factory=dict)
    hold_us: float | None = None


def held(leases: Leases | None, now_us: int) -> int:
    """How many are held now."""
    return 0 if leases is None else sum(lapse > now_us for lapse in leases.lapses_us.values())


def wait_us(leases: Leases | None, cost: int, capacity: int, now_us: int) -> int:
    """Estimated microseconds until one more fits, 0 now. The caller has checked cost <= capacity."""
    now_held = held(leases, now_us)
    if now_held + cost <= capacity:
        return 0
    hold_us = leases.hold_us if leases is not None and leases.hold_us is not None else UNKNOWN_HOLD_US
    return max(SHORTEST_WAIT_US, math.ceil(hold_us / now_held))


def hold(leases: Leases, request_id: str, now_us: int) -> None:
    """Take a lease, or renew it, even one that has lapsed: its request still runs."""
    leases.lapses_us = {held_by: lapse for held_by, lapse in leases.lapses_us.items() if lapse > now_us}
    leases.lapses_us[request_id] = now_us + LEASE_US


def give_back(leases: Leases, request_id: str, granted_us: int, now_us: int) -> None:
    """End a lease and learn how long it was held."""
    if leases.lapses_us.pop(request_id, None) is not None:
        held_us = float(min(now_us - granted_us, _LONGEST_HOLD_US))
        leases.hold_us = held_us if leases.hold_us is None else leases.hold_us + (held_us - leases.hold_us) / _WEIGHT
