"""``x-ratelimit-*`` in OpenAI's form, for the tightest limit of each unit that a request touched; nothing for no limit."""

from __future__ import annotations

from collections.abc import Sequence

from proxy.forwarding.headers import RawHeaders
from proxy.limits.decisions import go_duration, tightest
from proxy.limits.model import Decision, Unit

_KINDS = {
    b"requests": frozenset({Unit.REQUESTS}),
    b"tokens": frozenset({Unit.TOKENS, Unit.INPUT_TOKENS, Unit.OUTPUT_TOKENS}),
}


def of(decisions: Sequence[Decision]) -> RawHeaders:
    """Limit, remaining (never below 0) and reset (a Go duration until the limit is unused again) per unit."""
    found: RawHeaders = []
    for name, units in _KINDS.items():
        decision = tightest(decisions, units)
        if decision is not None:
            found += [
                (b"x-ratelimit-limit-" + name, b"%d" % decision.limit.capacity),
                (b"x-ratelimit-remaining-" + name, b"%d" % max(0, decision.remaining)),
                (b"x-ratelimit-reset-" + name, go_duration(decision.reset_after).encode("ascii")),
            ]
    return found
