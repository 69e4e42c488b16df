"""The admission script in Python: all limits of a request are charged or none, and each settle is applied once.

This is the specification and the oracle of ``lua/*.lua``; both must give the same reply to every call. It owns no state and
no clock: the memory store hands in both. Costs, and which limits a request touches, are the limiter's decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from proxy.limits import leases, sliding_window, token_bucket
from proxy.limits.leases import Leases
from proxy.limits.model import Admission, Algorithm, BoundLimit, Correction, Demand, Level
from proxy.limits.sliding_window import Window
from proxy.limits.token_bucket import Bucket


@dataclass(slots=True)
class State:
    """Everything that a store keeps: the last time it saw, the limits' levels, and each worker's last applied settle."""

    last_us: int = 0
    buckets: dict[str, Bucket] = field(default_factory=dict)
    windows: dict[str, Window] = field(default_factory=dict)
    leases: dict[str, Leases] = field(default_factory=dict)
    settled: dict[str, int] = field(default_factory=dict)


def now(state: State, time_us: int) -> int:
    """Store time: never runs backwards, whatever the server's clock does (a failover may step it)."""
    state.last_us = max(time_us, state.last_us)
    return state.last_us


def level(state: State, bound: BoundLimit, now_us: int) -> Level:
    """Where a limit stands now."""
    limit = bound.limit
    if limit.algorithm is Algorithm.TOKEN_BUCKET:
        units = token_bucket.level_at(state.buckets.get(bound.key), limit.capacity, limit.amount, bound.period_us, now_us)
        reset = token_bucket.reset_us(units, limit.capacity, limit.amount, bound.period_us)
        return Level(token_bucket.remaining(units), reset)
    if limit.algorithm is Algorithm.LEASES:
        return Level(limit.capacity - leases.held(state.leases.get(bound.key), now_us), 0)
    window = state.windows.get(bound.key)
    total = sliding_window.total_at(window, sliding_window.cell_at(now_us, bound.period_us))
    return Level(limit.capacity - total, sliding_window.reset_us(window, bound.period_us, now_us))


def wait_us(state: State, demand: Demand, now_us: int) -> int:
    """Microseconds until this demand fits its limit: 0 now, -1 never. What costs nothing fits, even where there is debt."""
    bound, limit = demand.bound, demand.bound.limit
    if demand.cost == 0:
        return 0
    if demand.cost > limit.capacity:
        return -1
    if limit.algorithm is Algorithm.TOKEN_BUCKET:
        units = token_bucket.level_at(state.buckets.get(bound.key), limit.capacity, limit.amount, bound.period_us, now_us)
        return token_bucket.wait_us(units, demand.cost, limit.amount, bound.period_us)
    if limit.algorithm is Algorithm.LEASES:
        return leases.wait_us(state.leases.get(bound.key), demand.cost, limit.capacity, now_us)
    return sliding_window.wait_us(state.windows.get(bound.key), demand.cost, limit.capacity, bound.period_us, now_us)


def admit(
    state: State, demands: Sequence[Demand], time_us: int, *, request_id: str = "", deadline_us: int | None = None
) -> Admission:
    """Charge every demand, or none. On refusal the reply names the demand that must wait longest, never (-1) before any.

    Shadow limits are charged with the others, and refuse nothing. ``request_id`` is who holds the leases.

    Past the deadline, in store time, the call has no effect: whoever asked has given up, and must not be charged.
    """
    now_us = now(state, time_us)
    if deadline_us is not None and now_us > deadline_us:
        return Admission(granted=False, now_us=now_us, refused=-1, wait_us=0, levels=(), cells=())
    waits = tuple(wait_us(state, demand, now_us) for demand in demands)
    refused, longest = _refuser(demands, waits)
    cells = tuple(_charge(state, demand, request_id, now_us) for demand in demands) if refused < 0 else ()
    levels = tuple(level(state, demand.bound, now_us) for demand in demands)
    return Admission(refused < 0, now_us, refused, longest, levels, cells, waits)


def _refuser(demands: Sequence[Demand], waits: Sequence[int]) -> tuple[int, int]:
    refused, longest = -1, 0
    for number, (demand, wait) in enumerate(zip(demands, waits, strict=True)):
        if demand.bound.limit.is_shadow:
            continue
        if wait < 0:
            return number, -1
        if wait > longest:
            refused, longest = number, wait
    return refused, longest


def _charge(state: State, demand: Demand, request_id: str, now_us: int) -> int:
    bound, limit = demand.bound, demand.bound.limit
    if limit.algorithm is Algorithm.TOKEN_BUCKET:
        units = token_bucket.level_at(state.buckets.get(bound.key), limit.capacity, limit.amount, bound.period_us, now_us)
        state.buckets[bound.key] = Bucket(units - demand.cost, now_us)
        return 0
    if limit.algorithm is Algorithm.LEASES:
        leases.hold(state.leases.setdefault(bound.key, Leases()), request_id, now_us)
        return now_us
    cell = sliding_window.cell_at(now_us, bound.period_us)
    window = state.windows.setdefault(bound.key, Window())
    sliding_window.roll(window, cell)
    window.cells[cell % sliding_window.CELLS] += demand.cost
    window.total += demand.cost
    window.newest = cell
    return cell


def settle(state: State, worker: str, sequence: int, corrections: Sequence[Correction], time_us: int) -> int:
    """Apply a worker's settle number ``sequence`` unless it was applied before; returns the last number applied.

    A worker sends one settle at a time and repeats it until acknowledged, so a gap means that the store lost its memory:
    then the settle applies. It never refuses: debt is carried until it is refilled.
    """
    now_us = now(state, time_us)
    last = state.settled.get(worker, 0)
    if sequence <= last:
        return last
    for correction in corrections:
        _correct(state, correction, now_us)
    state.settled[worker] = sequence
    return sequence


def _correct(state: State, correction: Correction, now_us: int) -> None:
    bound, limit = correction.bound, correction.bound.limit
    if limit.algorithm is Algorithm.TOKEN_BUCKET:
        units = token_bucket.level_at(state.buckets.get(bound.key), limit.capacity, limit.amount, bound.period_us, now_us)
        state.buckets[bound.key] = Bucket(min(float(limit.capacity), units - correction.delta), now_us)
        return
    if limit.algorithm is Algorithm.LEASES:
        found = state.leases.setdefault(bound.key, Leases())
        if correction.delta < 0:
            leases.give_back(found, correction.request_id, correction.cell, now_us)
        else:
            leases.hold(found, correction.request_id, now_us)
        return
    cell = sliding_window.cell_at(now_us, bound.period_us)
    window = state.windows.setdefault(bound.key, Window())
    sliding_window.correct(window, correction.cell, correction.delta, cell)


def peek(state: State, bounds: Sequence[BoundLimit], time_us: int) -> tuple[Level, ...]:
    """Where limits stand, changing nothing."""
    now_us = max(time_us, state.last_us)
    return tuple(level(state, bound, now_us) for bound in bounds)
