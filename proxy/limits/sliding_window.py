"""Sliding window in constant memory: a ring of 122 cells with a running sum; never more than the limit in any window.

120 cells make up the period, one is the cell being filled, one is a guard for an upstream that sees arrivals up to a cell
later (with 61 cells such an upstream counted 106 for a limit of 100). Use can therefore reach 120/122 of the limit at a
steady pace. Decides from numbers alone; the same arithmetic stands in ``lua/limits.lua``.

Example: 60/min. A cell is 0.5 s. Sixty requests at t = 59.5 s fill one cell; it leaves the ring 61 s after it began, so the
next request passes at t = 120.5 s, and a second burst at the edge of a minute finds nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

CELLS = 122
PER_PERIOD = 120


@dataclass(slots=True)
class Window:
    """``cells[k % CELLS]`` is the use of cell number k for the CELLS newest up to ``head``; ``total`` is their sum."""

    head: int = 0
    total: int = 0
    newest: int = 0  # the last cell that was charged
    cells: list[int] = field(default_factory=lambda: [0] * CELLS)


def cell_us(period_us: int) -> float:
    """Length of a cell in microseconds."""
    return period_us / PER_PERIOD


def cell_at(now_us: int, period_us: int) -> int:
    """Number of the cell that ``now_us`` falls in."""
    return math.floor(now_us / cell_us(period_us))


def total_at(window: Window | None, cell: int) -> int:
    """Use over the cells that are still in the ring when ``cell`` is the newest."""
    if window is None or cell - window.head >= CELLS:
        return 0
    return window.total - sum(window.cells[k % CELLS] for k in range(window.head + 1, cell + 1))


def roll(window: Window, cell: int) -> None:
    """Drop the cells that leave the ring as ``cell`` becomes the newest."""
    window.total = total_at(window, cell)
    for k in range(max(window.head + 1, cell - CELLS + 1), cell + 1):
        window.cells[k % CELLS] = 0
    window.head = cell


def leaves_us(cell: int, period_us: int, now_us: int) -> int:
    """Microseconds until ``cell`` has left the ring; one more than computed, which covers the rounding of the division."""
    return max(0, math.ceil((cell + CELLS) * cell_us(period_us)) + 1 - now_us)


def wait_us(window: Window | None, cost: int, capacity: int, period_us: int, now_us: int) -> int:
    """Microseconds until ``cost`` fits, 0 now. The caller has checked cost <= capacity."""
    cell = cell_at(now_us, period_us)
    over = total_at(window, cell) + cost - capacity
    if over <= 0 or window is None:
        return 0
    freed = 0
    for k in range(max(cell - CELLS + 1, window.head - CELLS + 1), window.head + 1):
        freed += window.cells[k % CELLS]
        if freed >= over:
            return leaves_us(k, period_us, now_us)
    raise AssertionError("a window's total exceeds the sum of its cells")


def reset_us(window: Window | None, period_us: int, now_us: int) -> int:
    """Microseconds until the window is empty if nobody uses it."""
    cell = cell_at(now_us, period_us)
    if window is None or total_at(window, cell) <= 0:
        return 0
    return leaves_us(window.newest, period_us, now_us)


def correct(window: Window, charged_cell: int, delta: int, cell: int) -> None:
    """Settle a difference: more use goes into the current cell, a refund into the original one while it is in the ring.

    A refund whose cell has left the ring goes nowhere: that use no longer counts anyway.
    """
    roll(window, cell)
    if delta >= 0:
        window.cells[cell % CELLS] += delta
        window.total += delta
        window.newest = cell
    elif charged_cell > cell - CELLS:
        given_back = min(window.cells[charged_cell % CELLS], -delta)
        window.cells[charged_cell % CELLS] -= given_back
        window.total -= given_back
