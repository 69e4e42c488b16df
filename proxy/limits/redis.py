"""The shared store: Redis >= 6.2 or Valkey, one EVALSHA per decision.

What the scripts decide stands in ``lua/``; this turns demands into their arguments and replies into answers, and keeps the
store's clock in view, so that every admission carries a deadline in it. How calls travel is ``pipeline.py``'s affair.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

from proxy.clock import Clock
from proxy.errors import StartupError
from proxy.limits.model import Admission, BoundLimit, Correction, Demand, Level
from proxy.limits.pipeline import ANSWER_WITHIN_S, Argument, Pipelines, Script, unavailable

OLDEST_SERVER = (6, 2)

_CLOCK_KEY = "sg:{d:0}:clock"
_SETTLED_KEY = "sg:{d:0}:settled:"
_PING_KEY = "sg:{d:0}:ping"
_PEEK_AT_ONCE = 100  # limits read by one script call
_FADE_US = 100  # a reply; more than two clocks drift apart between replies

ADMIT, SETTLE, PEEK = Script.load("admit"), Script.load("settle"), Script.load("peek")


class RedisStore:
    """``fake_time_us`` is for tests: it replaces the server's clock in every script."""

    def __init__(self, url: str, clock: Clock, answer_within_s: float = ANSWER_WITHIN_S) -> None:
        self._pipelines = Pipelines(url, answer_within_s)
        self._clock = clock
        self._ahead_us: int | None = None  # store time minus ours
        self.fake_time_us: int | None = None

    async def admit(self, demands: Sequence[Demand], request_id: str = "") -> Admission:
        """See ``store.Store``."""
        keys = [demand.bound.key for demand in demands]
        arguments: list[Argument] = []
        for demand in demands:
            arguments += (*_describe(demand.bound), demand.cost, int(demand.bound.limit.is_shadow))
        await self._see_store_time()
        reply = cast(
            "list[int]",
            await self._pipelines.call(ADMIT, [_CLOCK_KEY, *keys], [request_id, *arguments], self._time_and_deadline),
        )
        granted, now_us, refused, wait_us, *levels = reply
        if self.fake_time_us is None:
            self._note_store_time(now_us)
        admission = Admission(
            granted=bool(granted),
            now_us=now_us,
            refused=refused,
            wait_us=wait_us,
            levels=tuple(Level(levels[i], levels[i + 1]) for i in range(0, len(levels), 4)),
            cells=tuple(levels[2::4]) if granted else (),
            waits=tuple(levels[3::4]),
        )
        if admission.is_stale:
            raise unavailable(TimeoutError("the store decided after the deadline"))
        return admission

    async def settle(self, worker: str, sequence: int, corrections: Sequence[Correction]) -> int:
        """See ``store.Store``."""
        keys = [correction.bound.key for correction in corrections]
        arguments: list[Argument] = []
        for correction in corrections:
            arguments += (*_describe(correction.bound), correction.cell, correction.delta, correction.request_id)
        reply = await self._pipelines.call(SETTLE, [_CLOCK_KEY, _SETTLED_KEY + worker, *keys], [sequence, *arguments], self._time)
        return cast("int", reply)

    async def peek(self, bounds: Sequence[BoundLimit]) -> tuple[Level, ...]:
        """See ``store.Store``."""
        parts = [bounds[i : i + _PEEK_AT_ONCE] for i in range(0, len(bounds), _PEEK_AT_ONCE)]
        replies = await asyncio.gather(*(self._peek_part(part) for part in parts))
        return tuple(level for levels in replies for level in levels)

    async def _peek_part(self, bounds: Sequence[BoundLimit]) -> list[Level]:
        arguments: list[Argument] = []
        for bound in bounds:
            arguments += _describe(bound)
        keys = [_CLOCK_KEY, *(bound.key for bound in bounds)]
        reply = cast("list[int]", await self._pipelines.call(PEEK, keys, arguments, self._time))
        return [Level(reply[i], reply[i + 1]) for i in range(0, len(reply), 2)]

    async def ping(self) -> None:
        """See ``store.Store``. It writes: a server with a full disk or memory still reads, and can't hold limits."""
        await self._pipelines.write(_PING_KEY)

    async def check_server(self) -> None:
        """Refuse a server that can't hold limits: older than 6.2, or one that evicts keys. Raises StartupError."""
        info = await self._pipelines.info()
        version = str(info.get("valkey_version") or info.get("redis_version", "0"))
        if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_SERVER:
            raise StartupError(f"store.url: the server is version {version}; Redis 6.2 or Valkey 7.2 and newer are supported")
        policy = str(info.get("maxmemory_policy", "noeviction"))
        if policy != "noeviction":
            raise StartupError(
                f"store.url: the server's maxmemory-policy is {policy}, which would forget limits; set it to noeviction"
            )

    async def close(self) -> None:
        """See ``store.Store``."""
        await self._pipelines.close()

    # the store's clock --------------------------------------------------------------------------------------------------

    def _our_time_us(self) -> int:
        return int(self._clock.monotonic() * 1e6)

    async def _see_store_time(self) -> None:
        if self.fake_time_us is None and self._ahead_us is None:
            self._ahead_us = await self._pipelines.time_us() - self._our_time_us()

    def _time(self) -> list[Argument]:
        return ["" if self.fake_time_us is None else self.fake_time_us]

    def _time_and_deadline(self) -> list[Argument]:
        """With the store time until which an admission sent now may take effect: as long as its caller waits for it."""
        if self.fake_time_us is not None or self._ahead_us is None:
            return [*self._time(), ""]
        return ["", self._our_time_us() + self._ahead_us + int(self._pipelines.answer_within_s * 1e6)]

    def _note_store_time(self, store_us: int) -> None:
        """Follow the store's clock. A reply that lay in the socket shows too little, so the largest seen holds, fading slowly."""
        seen = store_us - self._our_time_us()
        self._ahead_us = seen if self._ahead_us is None else max(seen, self._ahead_us - _FADE_US)


def _describe(bound: BoundLimit) -> tuple[Argument, Argument, Argument, Argument]:
    limit = bound.limit
    return limit.algorithm.letter, limit.capacity, limit.amount, bound.period_us
