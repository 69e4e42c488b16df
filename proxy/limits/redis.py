"""The shared store: Redis >= 6.2 or Valkey, one EVALSHA per decision, decisions of one event-loop turn in one pipeline.

What the scripts decide stands in ``lua/``; this moves arguments and replies, reloads scripts that the server forgot, and
bounds every wait. It never repeats an admission whose outcome is unclear: that could charge twice.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, cast

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError

from proxy.clock import Clock
from proxy.errors import StartupError, StoreUnavailable
from proxy.limits.model import Admission, BoundLimit, Correction, Demand, Level
from proxy.logs import logger

ANSWER_WITHIN_S = 1.0  # for one pipeline, connecting included; past it the store counts as unavailable
OLDEST_SERVER = (6, 2)

_CLOCK_KEY = "sg:{d:0}:clock"
_SETTLED_KEY = "sg:{d:0}:settled:"
_PING_KEY = "sg:{d:0}:ping"
_MOST_PER_PIPELINE = 64  # a longer one would hold the server for everybody else
_MOST_CONNECTIONS = 16
_PEEK_AT_ONCE = 100  # limits read by one script call
_FADE_US = 100  # a reply; more than two clocks drift apart between replies


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script with what it shares with the others prepended; ``sha`` is its name in the server's cache."""

    text: str
    sha: str

    @classmethod
    def load(cls, name: str) -> Script:
        """Read ``lua/<name>.lua`` from the package."""
        folder = resources.files("proxy.limits") / "lua"
        text = (folder / "limits.lua").read_text("utf-8") + (folder / f"{name}.lua").read_text("utf-8")
        return cls(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


ADMIT, SETTLE, PEEK = Script.load("admit"), Script.load("settle"), Script.load("peek")

Argument = str | int


@dataclass(slots=True)
class _Call:
    script: Script
    keys: list[str]
    arguments: list[Argument]
    reply: asyncio.Future[list[int] | int]


class RedisStore:
    """``fake_time_us`` is for tests: it replaces the server's clock in every script."""

    def __init__(self, url: str, clock: Clock) -> None:
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=_MOST_CONNECTIONS,
            timeout=ANSWER_WITHIN_S,
            socket_timeout=ANSWER_WITHIN_S,
            socket_connect_timeout=ANSWER_WITHIN_S,
            retry=Retry(NoBackoff(), 0),  # an admission that may have been charged is not sent again
        )
        self._redis = Redis.from_pool(pool)
        self._waiting: list[_Call] = []
        self._flushes: set[asyncio.Task[None]] = set()
        self._log = logger("store")
        self._clock = clock
        self._ahead_us: int | None = None  # store time minus ours
        self.fake_time_us: int | None = None

    async def admit(self, demands: Sequence[Demand], request_id: str = "") -> Admission:
        """See ``store.Store``."""
        keys = [demand.bound.key for demand in demands]
        arguments: list[Argument] = []
        for demand in demands:
            arguments += (*_describe(demand.bound), demand.cost, int(demand.bound.limit.is_shadow))
        deadline = await self._deadline()
        reply = cast("list[int]", await self._call(ADMIT, [_CLOCK_KEY, *keys], [self._time(), deadline, request_id, *arguments]))
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
            raise _unavailable(TimeoutError("the store decided after the deadline"))
        return admission

    async def settle(self, worker: str, sequence: int, corrections: Sequence[Correction]) -> int:
        """See ``store.Store``."""
        keys = [correction.bound.key for correction in corrections]
        arguments: list[Argument] = []
        for correction in corrections:
            arguments += (*_describe(correction.bound), correction.cell, correction.delta, correction.request_id)
        reply = await self._call(SETTLE, [_CLOCK_KEY, _SETTLED_KEY + worker, *keys], [self._time(), sequence, *arguments])
        return cast("int", reply)

    async def peek(self, bounds: Sequence[BoundLimit]) -> tuple[Level, ...]:
        """See ``store.Store``."""
        parts = [bounds[i : i + _PEEK_AT_ONCE] for i in range(0, len(bounds), _PEEK_AT_ONCE)]
        replies = await asyncio.gather(*(self._peek_part(part) for part in parts))
        return tuple(level for levels in replies for level in levels)

    async def _peek_part(self, bounds: Sequence[BoundLimit]) -> list[Level]:
        arguments: list[Argument] = [self._time()]
        for bound in bounds:
            arguments += _describe(bound)
        reply = cast("list[int]", await self._call(PEEK, [_CLOCK_KEY, *(bound.key for bound in bounds)], arguments))
        return [Level(reply[i], reply[i + 1]) for i in range(0, len(reply), 2)]

    async def ping(self) -> None:
        """See ``store.Store``. It writes: a server with a full disk or memory still reads, and can't hold limits."""
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                await self._redis.set(_PING_KEY, 1, px=60_000)
        except (RedisError, OSError, TimeoutError) as error:
            raise _unavailable(error) from error

    async def check_server(self) -> None:
        """Refuse a server that can't hold limits: older than 6.2, or one that evicts keys. Raises StartupError."""
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                info = await self._redis.info()
        except (RedisError, OSError, TimeoutError) as error:
            raise _unavailable(error) from error
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
        await asyncio.gather(*self._flushes, return_exceptions=True)
        await self._redis.aclose()

    # one pipeline per event-loop turn -----------------------------------------------------------------------------------

    def _our_time_us(self) -> int:
        return int(self._clock.monotonic() * 1e6)

    async def _deadline(self) -> Argument:
        """Store time until which an admission that starts now may take effect: as long as its caller waits for it."""
        if self.fake_time_us is not None:
            return ""
        if self._ahead_us is None:
            self._ahead_us = await self._server_time_us() - self._our_time_us()
        return self._our_time_us() + self._ahead_us + int(ANSWER_WITHIN_S * 1e6)

    def _note_store_time(self, store_us: int) -> None:
        """Follow the store's clock. A reply that lay in the socket shows too little, so the largest seen holds, fading slowly."""
        seen = store_us - self._our_time_us()
        self._ahead_us = seen if self._ahead_us is None else max(seen, self._ahead_us - _FADE_US)

    async def _server_time_us(self) -> int:
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                seconds, microseconds = await self._redis.time()
                return int(seconds) * 1_000_000 + int(microseconds)
        except (RedisError, OSError, TimeoutError) as error:
            raise _unavailable(error) from error

    def _time(self) -> Argument:
        return "" if self.fake_time_us is None else self.fake_time_us

    async def _call(self, script: Script, keys: list[str], arguments: list[Argument]) -> list[int] | int:
        loop = asyncio.get_running_loop()
        call = _Call(script, keys, arguments, loop.create_future())
        self._waiting.append(call)
        if len(self._waiting) == 1:
            loop.call_soon(self._start_flush)
        return await call.reply

    def _start_flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for i in range(0, len(waiting), _MOST_PER_PIPELINE):
            task = asyncio.create_task(self._flush(waiting[i : i + _MOST_PER_PIPELINE]))
            self._flushes.add(task)
            task.add_done_callback(self._flushes.discard)

    async def _flush(self, calls: list[_Call]) -> None:
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                forgotten = self._hand_out(calls, await self._execute(calls))
                if forgotten:
                    # None of these ran, so sending them again charges nothing twice.
                    for script in {call.script.sha: call.script for call in forgotten}.values():
                        await self._redis.script_load(script.text)
                    self._hand_out(forgotten, await self._execute(forgotten), is_last=True)
        except Exception as error:  # noqa: BLE001  (whatever it is, nobody may wait for ever; uvloop raises RuntimeError here)
            self._log.warning("store_call_failed", error=type(error).__name__, reason=str(error)[:200], calls=len(calls))
            for call in calls:
                if not call.reply.done():
                    call.reply.set_exception(_unavailable(error))

    def _hand_out(self, calls: list[_Call], replies: list[Any], *, is_last: bool = False) -> list[_Call]:
        """Give each waiter its own reply or error. Returns the calls whose script the server does not know (none if last)."""
        forgotten, errors = [], set()
        for call, reply in zip(calls, replies, strict=True):
            if isinstance(reply, NoScriptError) and not is_last:
                forgotten.append(call)
            elif isinstance(reply, Exception):
                errors.add(str(reply)[:200])  # such as MISCONF for a full disk, or OOM
                if not call.reply.done():
                    call.reply.set_exception(_unavailable(reply))
            elif not call.reply.done():  # else the waiter was cancelled
                call.reply.set_result(reply)
        for error in sorted(errors):
            self._log.error("store_refused", reason=error)
        return [call for call in forgotten if not call.reply.done()]

    async def _execute(self, calls: list[_Call]) -> list[Any]:
        pipeline = self._redis.pipeline(transaction=False)
        for call in calls:
            pipeline.evalsha(call.script.sha, len(call.keys), *call.keys, *call.arguments)
        return await pipeline.execute(raise_on_error=False)


def _describe(bound: BoundLimit) -> tuple[Argument, Argument, Argument, Argument]:
    limit = bound.limit
    return limit.algorithm.letter, limit.capacity, limit.amount, bound.period_us


def _unavailable(error: Exception) -> StoreUnavailable:
    unavailable = StoreUnavailable("The gateway's limit store does not answer. Please try again.", retry_after=1.0)
    unavailable.__cause__ = error
    return unavailable
