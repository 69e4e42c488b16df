"""What the limiter says of a request, in the terms that people and clients read: decisions, the tightest limit, durations."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence

from proxy.limits.model import Admission, Decision, Demand, Unit


def decisions_of(demands: Sequence[Demand], admission: Admission) -> tuple[Decision, ...]:
    """One decision per demand, from the levels that the script gave."""
    return tuple(_decision(demand, admission, number) for number, demand in enumerate(demands))


def _decision(demand: Demand, admission: Admission, number: int) -> Decision:
    level = admission.levels[number]
    is_refuser = not admission.granted and admission.refused == number
    return Decision(
        allowed=not is_refuser,
        limit=demand.bound.limit,
        remaining=level.remaining,
        reset_after=level.reset_us / 1e6,
        retry_after=admission.wait_us / 1e6 if is_refuser and not admission.is_too_large else None,
        requested=demand.cost,
        would_refuse=demand.bound.limit.is_shadow and admission.waits[number] != 0,
    )


def tightest(decisions: Sequence[Decision], units: Container[Unit]) -> Decision | None:
    """The enforced limit of those units with the least left, the smaller one among equals; None when there is none."""
    of_unit = [decision for decision in decisions if decision.limit.unit in units and not decision.limit.is_shadow]
    return min(of_unit, key=lambda decision: (decision.remaining, decision.limit.capacity), default=None)


def go_duration(seconds: float) -> str:
    """A duration as OpenAI's reset headers have it (Go's format, to the millisecond): 1m30s, 8.64s, 12ms, 0s.

    Rounded up, so that a client which waits as told is not early.
    """
    milliseconds = math.ceil(max(0.0, seconds) * 1000 - 1e-6)
    if milliseconds == 0:
        return "0s"
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, milliseconds = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    text = f"{milliseconds / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    if hours:
        return f"{hours}h{minutes}m{text}"
    return f"{minutes}m{text}" if minutes else text
