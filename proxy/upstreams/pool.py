"""The pool of upstream keys: hands out the key for the next call. The order is decided in ``selection.py``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from proxy.upstreams.model import Upstream, UpstreamKey
from proxy.upstreams.selection import SmoothWeightedRoundRobin


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to send one call to ``upstream`` with ``key``."""

    upstream: Upstream
    key: UpstreamKey


class KeyPool:
    """All upstreams with their keys. Each worker turns its own wheel: shares hold per worker, and so in sum."""

    def __init__(self, upstreams: Mapping[str, Upstream]) -> None:
        self._upstreams = upstreams
        self._wheels = {
            name: SmoothWeightedRoundRobin([key.weight for key in upstream.keys]) for name, upstream in upstreams.items()
        }

    def __repr__(self) -> str:
        keys = ", ".join(f"{name}: {[key.id for key in upstream.keys]}" for name, upstream in self._upstreams.items())
        return f"<KeyPool {keys}>"

    def lease(self, upstream: str) -> Lease:
        """The key whose turn it is at ``upstream`` (a configured name)."""
        chosen = self._upstreams[upstream]
        return Lease(chosen, chosen.keys[self._wheels[upstream].next()])
