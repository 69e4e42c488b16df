"""Settles on their way to the store: per domain one numbered stream, one call at a time, repeated until acknowledged.

So none is lost to a blink of the store, and none applied twice. What is owed for requests that were admitted without the
store is summed up per limit, so that an outage of any length fills no memory. What a settle says is the reservation's affair.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import replace

from proxy.errors import StoreUnavailable
from proxy.limits.model import Correction, Settled
from proxy.limits.store import Store
from proxy.logs import logger

_RESEND_S = 0.1
_MOST_PER_SETTLE = 200
_CLOSE_WITHIN_S = 2.0

Booking = asyncio.Future[int]  # the store time at which it was applied


class Settling:
    """``worker`` names this process's incarnation: it must be new at every start, as its settles are numbered from 1."""

    def __init__(self, store: Store, worker: str) -> None:
        self._store = store
        self._worker = worker
        self._streams: dict[str, _Stream] = {}
        self._log = logger("limiter")

    def post(self, corrections: Sequence[Correction]) -> Booking:
        """Queue corrections of one domain; the future is done once they are applied."""
        return self._stream(corrections[0].bound.domain).post(corrections)

    def owe(self, corrections: Iterable[Correction]) -> None:
        """Queue charges that name no request and no cell: those of one limit may be added up."""
        for correction in corrections:
            self._stream(correction.bound.domain).owe(correction)

    def is_stuck(self, domain: str) -> bool:
        """Whether the store does not acknowledge, so that waiting for a settle is in vain."""
        stream = self._streams.get(domain)
        return stream is not None and stream.is_stuck

    async def flushed(self, domain: str) -> None:
        """Wait until all that is queued now is applied."""
        stream = self._streams.get(domain)
        if stream is not None:
            await stream.flushed()

    async def close(self) -> None:
        """Send what is still queued, for a bounded time."""
        try:
            async with asyncio.timeout(_CLOSE_WITHIN_S):
                for stream in self._streams.values():
                    await stream.flushed()
        except TimeoutError:
            lost = sum(stream.queued for stream in self._streams.values())
            self._log.error("settles_lost", count=lost, reason="the store did not answer before shutdown")
        for stream in self._streams.values():
            stream.cancel()

    def _stream(self, domain: str) -> _Stream:
        stream = self._streams.get(domain)
        if stream is None:
            stream = self._streams[domain] = _Stream(self._store, domain, self._worker)
        return stream


class _Stream:
    def __init__(self, store: Store, domain: str, worker: str) -> None:
        self._store = store
        self._domain = domain
        self._worker = worker
        self._outbox: list[tuple[Correction, Booking | None]] = []
        self._owed: dict[str, Correction] = {}  # by the limit's key
        self._posted = asyncio.Event()
        self._sequence = 0
        self._sender = asyncio.create_task(self._send_all())
        self.is_stuck = False

    @property
    def queued(self) -> int:
        """Corrections that the store has not acknowledged."""
        return len(self._outbox) + len(self._owed)

    def post(self, corrections: Sequence[Correction]) -> Booking:
        booking: Booking = asyncio.get_running_loop().create_future()
        self._outbox += [(correction, booking) for correction in corrections]
        self._posted.set()
        return booking

    def owe(self, correction: Correction) -> None:
        owed = self._owed.get(correction.bound.key)
        self._owed[correction.bound.key] = replace(correction, delta=correction.delta + (owed.delta if owed else 0))
        self._posted.set()

    async def flushed(self) -> None:
        self._collect_owed()
        if self._outbox:
            last, booking = self._outbox[-1]
            if booking is None:
                booking = asyncio.get_running_loop().create_future()
                self._outbox[-1] = (last, booking)
            await asyncio.wait([booking])

    def cancel(self) -> None:
        self._sender.cancel()

    def _collect_owed(self) -> None:
        self._outbox += [(correction, None) for correction in self._owed.values()]
        self._owed.clear()

    async def _send_all(self) -> None:
        while True:
            await self._posted.wait()
            self._posted.clear()
            while True:
                if len(self._outbox) < _MOST_PER_SETTLE:
                    self._collect_owed()
                if not self._outbox:
                    break
                # New ones may be appended meanwhile; these stay in front until the store has acknowledged them.
                count = min(len(self._outbox), _MOST_PER_SETTLE)
                settled = await self._send([correction for correction, _ in self._outbox[:count]])
                self._acknowledge(count, settled)

    async def _send(self, corrections: list[Correction]) -> Settled:
        while True:
            try:
                settled = await self._store.settle(self._domain, self._worker, self._sequence + 1, corrections)
            except StoreUnavailable:
                self.is_stuck = True
                await asyncio.sleep(_RESEND_S)
            else:
                self.is_stuck = False
                self._sequence += 1
                return settled

    def _acknowledge(self, count: int, settled: Settled) -> None:
        applied = self._outbox[:count]
        del self._outbox[:count]
        unfinished = self._outbox[0][1] if self._outbox else None  # its last correction goes with the next settle
        for _, booking in applied:
            if booking is not None and booking is not unfinished and not booking.done():
                booking.set_result(settled.now_us)
