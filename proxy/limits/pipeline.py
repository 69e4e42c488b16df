"""How script calls travel to Redis: those of one event-loop turn in one pipeline, within a bounded time, none sent twice.

It reloads scripts that the server forgot and gives each caller its own reply or error. What the calls mean is ``redis.py``'s
affair; it never repeats one whose outcome is unclear: that could charge twice.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError

from proxy.errors import StoreUnavailable
from proxy.logs import logger

ANSWER_WITHIN_S = 1.0  # for one pipeline, connecting included; past it the store counts as unavailable

_MOST_PER_PIPELINE = 64  # a longer one would hold the server for everybody else
_MOST_CONNECTIONS = 16

Argument = str | int


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


@dataclass(slots=True)
class _Call:
    script: Script
    keys: list[str]
    arguments: list[Argument]
    head: Callable[[], list[Argument]]
    reply: asyncio.Future[Any]


class Pipelines:
    """Script calls and commands to the server at ``url``. Every method raises StoreUnavailable."""

    def __init__(self, url: str, answer_within_s: float = ANSWER_WITHIN_S) -> None:
        self.answer_within_s = answer_within_s
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

    async def call(self, script: Script, keys: list[str], arguments: list[Argument], head: Callable[[], list[Argument]]) -> Any:
        """Run a script with the others of this event-loop turn. ``head`` gives its first arguments at the moment it is sent."""
        loop = asyncio.get_running_loop()
        call = _Call(script, keys, arguments, head, loop.create_future())
        self._waiting.append(call)
        if len(self._waiting) == 1:
            loop.call_soon(self._start_flush)
        return await call.reply

    async def write(self, key: str) -> None:
        """Write a key that lapses: shows that the server takes writes."""
        try:
            async with asyncio.timeout(self.answer_within_s):
                await self._redis.set(key, 1, px=60_000)
        except (RedisError, OSError, TimeoutError) as error:
            raise unavailable(error) from error

    async def time_us(self) -> int:
        """The server's clock, in microseconds since 1970."""
        try:
            async with asyncio.timeout(self.answer_within_s):
                seconds, microseconds = await self._redis.time()
                return int(seconds) * 1_000_000 + int(microseconds)
        except (RedisError, OSError, TimeoutError) as error:
            raise unavailable(error) from error

    async def info(self) -> dict[str, Any]:
        """What the server says of itself."""
        try:
            async with asyncio.timeout(self.answer_within_s):
                found: dict[str, Any] = await self._redis.info()
                return found
        except (RedisError, OSError, TimeoutError) as error:
            raise unavailable(error) from error

    async def close(self) -> None:
        """Give connections back."""
        await asyncio.gather(*self._flushes, return_exceptions=True)
        await self._redis.aclose()

    def _start_flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for i in range(0, len(waiting), _MOST_PER_PIPELINE):
            task = asyncio.create_task(self._flush(waiting[i : i + _MOST_PER_PIPELINE]))
            self._flushes.add(task)
            task.add_done_callback(self._flushes.discard)

    async def _flush(self, calls: list[_Call]) -> None:
        try:
            async with asyncio.timeout(self.answer_within_s):
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
                    call.reply.set_exception(unavailable(error))

    def _hand_out(self, calls: list[_Call], replies: list[Any], *, is_last: bool = False) -> list[_Call]:
        """Give each waiter its own reply or error. Returns the calls whose script the server does not know (none if last)."""
        forgotten, errors = [], set()
        for call, reply in zip(calls, replies, strict=True):
            if isinstance(reply, NoScriptError) and not is_last:
                forgotten.append(call)
            elif isinstance(reply, Exception):
                errors.add(str(reply)[:200])  # such as MISCONF for a full disk, or OOM
                if not call.reply.done():
                    call.reply.set_exception(unavailable(reply))
            elif not call.reply.done():  # else the waiter was cancelled
                call.reply.set_result(reply)
        for error in sorted(errors):
            self._log.error("store_refused", reason=error)
        return [call for call in forgotten if not call.reply.done()]

    async def _execute(self, calls: list[_Call]) -> list[Any]:
        pipeline = self._redis.pipeline(transaction=False)
        for call in calls:
            pipeline.evalsha(call.script.sha, len(call.keys), *call.keys, *call.head(), *call.arguments)
        return await pipeline.execute(raise_on_error=False)


def unavailable(error: Exception) -> StoreUnavailable:
    """What callers are told, whatever the reason; that stays its cause."""
    unanswered = StoreUnavailable("The gateway's limit store does not answer. Please try again.", retry_after=1.0)
    unanswered.__cause__ = error
    return unanswered
