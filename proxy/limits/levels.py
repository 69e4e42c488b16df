"""One limit at a time, whatever its algorithm: where it stands, when a need fits, and how charges and settles change it.

The arithmetic is in ``token_bucket.py``, ``sliding_window.py`` and ``leases.py``. Here also: what is assumed of a limit whose
state the store has lost. Then it counts as used, a bucket empty and refilling since, a window full, until a worker says how it
last saw it; else a restart of the store would hand everybody a second helping.
"""

from __future__ import annotations

import math

from proxy.limits import leases, sliding_window, token_bucket
from proxy.limits.leases import Leases
from proxy.limits.model import Algorithm, BoundLimit, Correction, Demand, Level
from proxy.limits.sliding_window import Window
from proxy.limits.state import Restored, State
from proxy.limits.token_bucket import Bucket


def bucket_of(state: State, bound: BoundLimit) -> Bucket | None:
    """The bucket's state, or what is assumed of one that was lost; None: full."""
    found = state.buckets.get(bound.key)
    return Bucket(0.0, state.lost_us) if found is None and state.lost_us else found


def window_of(state: State, bound: BoundLimit) -> Window:
    """The window's state, or what is assumed of one that was lost."""
    found = state.windows.get(bound.key)
    if found is not None:
        return found
    if not state.lost_us:
        return Window()
    cell = sliding_window.cell_at(state.lost_us, bound.period_us)
    lost = Window(head=cell, total=bound.limit.capacity, newest=cell)
    lost.cells[cell % sliding_window.CELLS] = bound.limit.capacity
    return lost


def units_of(state: State, bound: BoundLimit, now_us: int) -> float:
    """A bucket's level."""
    limit = bound.limit
    return token_bucket.level_at(bucket_of(state, bound), limit.capacity, limit.amount, bound.period_us, now_us)


def level(state: State, bound: BoundLimit, now_us: int) -> Level:
    """Where a limit stands now."""
    limit = bound.limit
    if limit.algorithm is Algorithm.TOKEN_BUCKET:
        units = units_of(state, bound, now_us)
        reset = token_bucket.reset_us(units, limit.capacity, limit.amount, bound.period_us)
        return Level(token_bucket.remaining(units), reset)
    if limit.algorithm is Algorithm.LEASES:
        return Level(limit.capacity - leases.held(state.leases.get(bound.key), now_us), 0)
    window = window_of(state, bound)
    total = sliding_window.total_at(window, sliding_window.cell_at(now_us, bound.period_us))
    return Level(limit.capacity - total, sliding_window.reset_us(window, bound.period_us, now_us))


def used(state: State, bound: BoundLimit, now_us: int) -> int:
    """What counts against a window or against leases now."""
    return bound.limit.capacity - level(state, bound, now_us).remaining


def wait_us(state: State, bound: BoundLimit, need: int, now_us: int) -> int:
    """Microseconds until ``need`` units are free: 0 now, -1 never. What needs nothing fits, even where there is debt."""
    limit = bound.limit
    if need == 0:
        return 0
    if need > limit.capacity:
        return -1
    if limit.algorithm is Algorithm.TOKEN_BUCKET:
        return token_bucket.wait_us(units_of(state, bound, now_us), need, limit.amount, bound.period_us)
    if limit.algorithm is Algorithm.LEASES:
        return leases.wait_us(state.leases.get(bound.key), need, limit.capacity, now_us)
    return sliding_window.wait_us(window_of(state, bound), need, limit.capacity, bound.period_us, now_us)


def spread_us(state: State, demand: Demand, wait_us: int, ahead: int) -> int:
    """What a refusal adds to its own wait so that many who were refused do not come back at once: the time that the costs
    refused since the last grant, and of those who wait, take to come free. Not for leases, whose wait is a guess.
    """
    bound, cost = demand.bound, demand.cost
    if bound.limit.algorithm is Algorithm.LEASES:
        return max(wait_us * ahead, 0 if wait_us else leases.SHORTEST_WAIT_US)
    before = state.refused.get(bound.key, 0)
    state.refused[bound.key] = min(bound.limit.capacity, before + cost)
    if bound.limit.amount == 0:
        return token_bucket.LONGEST_US
    units = min(bound.limit.capacity, before) + ahead * cost
    spread = min(token_bucket.LONGEST_US, math.ceil(units * (bound.period_us / bound.limit.amount)))
    return spread if wait_us else max(spread, leases.SHORTEST_WAIT_US)


def charge(state: State, demand: Demand, request_id: str, now_us: int) -> int:
    """Take what is asked. Returns the window's cell, the store time of a lease's grant, 0 for a bucket."""
    bound, cost, limit = demand.bound, demand.cost, demand.bound.limit
    state.refused.pop(bound.key, None)
    if limit.algorithm is Algorithm.TOKEN_BUCKET:
        state.buckets[bound.key] = Bucket(units_of(state, bound, now_us) - cost, now_us)
        return 0
    if limit.algorithm is Algorithm.LEASES:
        leases.hold(state.leases.setdefault(bound.key, Leases()), request_id, now_us)
        return now_us
    cell = sliding_window.cell_at(now_us, bound.period_us)
    window = state.windows[bound.key] = window_of(state, bound)
    sliding_window.roll(window, cell)
    window.cells[cell % sliding_window.CELLS] += cost
    window.total += cost
    window.newest = cell
    return cell


def correct(state: State, correction: Correction, now_us: int) -> None:
    """Book the difference between a charge and the use; may leave debt."""
    bound, limit = correction.bound, correction.bound.limit
    if limit.algorithm is Algorithm.TOKEN_BUCKET:
        units = units_of(state, bound, now_us)
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
    window = state.windows[bound.key] = window_of(state, bound)
    sliding_window.correct(window, correction.cell, correction.delta, cell)


def restore(state: State, bound: BoundLimit, remaining: int, seen_us: int, now_us: int) -> None:
    """Replace what is assumed of a lost limit by how a worker saw it at ``seen_us``; the latest sight wins, in any order."""
    limit = bound.limit
    last = state.restored.get(bound.key)
    if not state.lost_us or seen_us > state.lost_us or (last is not None and last.seen_us >= seen_us):
        return
    if limit.algorithm is Algorithm.TOKEN_BUCKET:
        assumed = min(float(limit.capacity), remaining + limit.amount / bound.period_us * (state.lost_us - seen_us))
        before = 0.0 if last is None else last.assumed
        units = units_of(state, bound, now_us) + (assumed - before)
        state.buckets[bound.key] = Bucket(min(float(limit.capacity), units), now_us)
        state.restored[bound.key] = Restored(seen_us, assumed)
    elif limit.algorithm is Algorithm.SLIDING_WINDOW:
        _restore_window(state, bound, max(0, limit.capacity - remaining), seen_us, now_us)


def _restore_window(state: State, bound: BoundLimit, use: int, seen_us: int, now_us: int) -> None:
    last = state.restored.get(bound.key)
    before = bound.limit.capacity if last is None else int(last.assumed)
    cell = sliding_window.cell_at(now_us, bound.period_us)
    window = state.windows[bound.key] = window_of(state, bound)
    sliding_window.roll(window, cell)
    lost_cell = sliding_window.cell_at(state.lost_us, bound.period_us)
    if lost_cell > cell - sliding_window.CELLS:
        held = window.cells[lost_cell % sliding_window.CELLS]
        changed = max(0, held + use - before)
        window.cells[lost_cell % sliding_window.CELLS] = changed
        window.total += changed - held
    state.restored[bound.key] = Restored(seen_us, float(use))
