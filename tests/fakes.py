"""Stand-ins that tests move by hand. What they stand in for is described where it is defined."""

from __future__ import annotations

from proxy.clock import Clock


class FakeClock(Clock):
    """Stands still until ``advance``d; its tokens are 000…1, 000…2 and so on."""

    def __init__(self, *, unix: float = 1_700_000_000.0) -> None:
        self._unix = unix
        self._elapsed = 1000.0
        self._tokens = 0

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass at once."""
        self._unix += seconds
        self._elapsed += seconds

    def monotonic(self) -> float:
        return self._elapsed

    def unix(self) -> float:
        return self._unix

    def token(self, size_bytes: int = 12) -> str:
        self._tokens += 1
        return f"{self._tokens:0{2 * size_bytes}x}"

    def time_us(self) -> int:
        """What a ``MemoryStore`` takes for its time: microseconds since 1970."""
        return round(self._unix * 1_000_000)
