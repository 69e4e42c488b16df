"""How calls travel to the store: those of one event-loop turn in one pipeline per server, in a bounded time, none charged twice.

It gives each caller its own reply or error, reloads scripts that a server forgot, and sends on what a server turned away; where
to is ``nodes.py``'s affair, and what the calls mean ``redis.py``'s. A call whose outcome is unclear is never sent again.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from redis.exceptions import ClusterDownError, NoScriptError, RedisClusterException, RedisError, ResponseError

from proxy.errors import StoreUnavailable
from proxy.limits.nodes import ANSWER_WITHIN_S, Argument, Hop, Node, NotSent, had_no_effect, nodes_at, reason_of
from proxy.limits.subscription import Handler, Subscription
from proxy.logs import logger

__all__ = ["ANSWER_WITHIN_S", "Argument", "Pipelines", "Script", "unavailable"]

_MOST_PER_PIPELINE = 64  # a longer one would hold the server for everybody else
_MOST_RESENDS = 4  # a slot that moved on, was on its way again, and a script unknown there, and one to spare


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script with what it shares with the others prepended; ``sha`` is its name in the server's cache."""

    text: str
    sha: str

    @classmethod
    def load(cls, *names: str) -> Script:
        """Read ``lua/<name>.lua`` from the package, those it shares with other scripts first."""
        folder = resources.files("proxy.limits") / "lua"
        text = "".join((folder / f"{name}.lua").read_text("utf-8") for name in names)
        return cls(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


@dataclass(slots=True, eq=False)
class _Call:
    key: str  # says which server
    words: Callable[[], list[Argument]]
    reply: asyncio.Future[Any]
    script: Script | None = None
    node: Node | None = None
    is_asking: bool = False
    is_script_forgotten: bool = False
    resends: int = 0
    sent: list[Argument] | None = None

    def command(self) -> list[Argument]:
        """The same each time it is sent: a deadline among its words is that of the one who waits."""
        if self.sent is None:
            self.sent = self.words()
        return self.sent


_Failed = list[tuple[_Call, Exception]]


class Pipelines:
    """Script calls and commands to the servers behind ``url``. Every method that waits raises StoreUnavailable."""

    def __init__(self, url: str, answer_within_s: float = ANSWER_WITHIN_S) -> None:
        self.answer_within_s = answer_within_s
        self._nodes = nodes_at(url)
        self._waiting: list[_Call] = []
        self._flushes: set[asyncio.Task[None]] = set()
        self._subscriptions: list[asyncio.Task[None]] = []
        self._log = logger("store")

    async def call(self, script: Script, keys: list[str], arguments: list[Argument], head: Callable[[], list[Argument]]) -> Any:
        """Run a script with the others of this event-loop turn. ``head`` gives its first arguments at the moment it is sent.

        In a cluster all its keys must lie in one slot: they share a hash tag.
        """

        def words() -> list[Argument]:
            return ["EVALSHA", script.sha, len(keys), *keys, *head(), *arguments]

        return await self._send_soon(keys[0], words, script)

    async def write(self, key: str) -> None:
        """Write a key that lapses: shows that the server takes writes."""
        await self._send_soon(key, lambda: ["SET", key, 1, "PX", 60_000])

    async def time_us(self, key: str) -> int:
        """The clock of the server that holds ``key``, in microseconds since 1970. The clocks of a cluster's nodes differ."""
        seconds, microseconds = await self._send_soon(key, lambda: ["TIME"])
        return int(seconds) * 1_000_000 + int(microseconds)

    async def info(self) -> list[dict[str, Any]]:
        """What each server that takes writes says of itself."""
        try:
            async with asyncio.timeout(self.answer_within_s):
                masters = await self._nodes.masters()
                return list(await asyncio.gather(*(node.client.info() for node in masters)))
        except (RedisError, RedisClusterException, OSError) as error:
            raise unavailable(error) from error

    def subscribe(self, channels: Sequence[str], handle: Handler, resumed: Callable[[], None] | None = None) -> None:
        """Hand each message on these channels to ``handle`` until ``close``, over a connection of its own.

        ``resumed`` is called each time that listening begins: messages sent while the connection was lost are gone.
        """
        subscription = Subscription(self._nodes, channels, handle, resumed)
        self._subscriptions.append(asyncio.create_task(subscription.run()))

    async def close(self) -> None:
        """End subscriptions, wait for open calls, give connections back."""
        for subscription in self._subscriptions:
            subscription.cancel()
        await asyncio.gather(*self._flushes, *self._subscriptions, return_exceptions=True)
        await self._nodes.close()

    def _send_soon(self, key: str, words: Callable[[], list[Argument]], script: Script | None = None) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        call = _Call(key, words, loop.create_future(), script)
        self._waiting.append(call)
        if len(self._waiting) == 1:
            loop.call_soon(self._start_flush)
        return call.reply

    def _start_flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call.node = self._nodes.known(call.key)
        for calls in _by_node(waiting):
            for i in range(0, len(calls), _MOST_PER_PIPELINE):
                task = asyncio.create_task(self._flush(calls[i : i + _MOST_PER_PIPELINE]))
                self._flushes.add(task)
                task.add_done_callback(self._flushes.discard)

    async def _flush(self, calls: list[_Call]) -> None:
        try:
            async with asyncio.timeout(self.answer_within_s):
                if calls[0].node is None:
                    await self._find_and_send(calls)
                else:
                    await self._send(calls)
        except Exception as error:  # noqa: BLE001  (whatever it is, nobody may wait for ever)
            self._refuse([(call, error) for call in calls])

    async def _find_and_send(self, calls: list[_Call]) -> None:
        failed: _Failed = []
        for call in calls:
            try:
                call.node = await self._nodes.find(call.key)
            except Exception as error:  # noqa: BLE001  (others of these calls may have a server that works)
                failed.append((call, error))
        self._refuse(failed)
        await self._send_all([call for call in calls if call.node is not None])

    async def _send_all(self, calls: list[_Call]) -> None:
        await asyncio.gather(*(self._send(part) for part in _by_node(calls)))

    async def _send(self, calls: list[_Call]) -> None:
        """Send calls to the server they have in common, and on from there. Raises nothing but cancellation."""
        node = calls[0].node
        assert node is not None  # noqa: S101  (found before)
        try:
            replies = await self._execute(calls)
        except NotSent as error:
            replies = [error] * len(calls)
        except asyncio.CancelledError:  # time is up
            self._nodes.distrust(node)
            raise
        except Exception as error:  # noqa: BLE001  (uvloop raises RuntimeError for a closed transport)
            replies = [error] * len(calls)
        turned_away, failed = self._hand_out(calls, replies)
        if any(not isinstance(error, ResponseError) or isinstance(error, ClusterDownError) for _, error in failed):
            self._nodes.distrust(node)
        self._refuse(failed)
        await self._send_on(node, turned_away)

    async def _execute(self, calls: list[_Call]) -> list[Any]:
        """Run calls of one server in one pipeline. Returns a reply or error for each."""
        node = calls[0].node
        assert node is not None  # noqa: S101  (found before)
        commands: list[list[Argument]] = []
        places, loaded = [], set()
        for call in calls:
            if call.script is not None and call.is_script_forgotten and call.script.sha not in loaded:
                loaded.add(call.script.sha)
                commands.append(["SCRIPT", "LOAD", call.script.text])
            if call.is_asking:
                commands.append(["ASKING"])
            places.append(len(commands))
            commands.append(call.command())
        replies = await node.execute(commands)
        return [replies[place] for place in places]

    def _hand_out(self, calls: list[_Call], replies: list[Any]) -> tuple[_Failed, _Failed]:
        """Give each waiter its own reply. Returns the calls that had no effect, and those that failed for good."""
        turned_away: _Failed = []
        failed: _Failed = []
        for call, reply in zip(calls, replies, strict=True):
            if call.reply.done():  # the waiter was cancelled
                continue
            if not isinstance(reply, Exception):
                call.reply.set_result(reply)
            elif call.resends < _MOST_RESENDS and (isinstance(reply, NoScriptError) or had_no_effect(reply)):
                turned_away.append((call, reply))
            else:
                failed.append((call, reply))
        return turned_away, failed

    async def _send_on(self, node: Node, turned_away: _Failed) -> None:
        """Send calls again that had no effect, which charges nothing twice: their scripts first, or to another server."""
        if not turned_away:
            return
        failed: _Failed = []
        again: list[_Call] = []
        hops = await asyncio.gather(*(self._next_hop(node, call, error) for call, error in turned_away), return_exceptions=True)
        for (call, error), hop in zip(turned_away, hops, strict=True):
            if not isinstance(hop, Hop):
                failed.append((call, hop if isinstance(hop, Exception) else error))
                continue
            call.resends += 1
            call.node, call.is_asking = hop
            call.is_script_forgotten = isinstance(error, NoScriptError)
            again.append(call)
        self._refuse(failed)
        await self._send_all(again)

    async def _next_hop(self, node: Node, call: _Call, error: Exception) -> Hop | None:
        if isinstance(error, NoScriptError):
            return Hop(node, call.is_asking)
        return await self._nodes.after(node, call.key, error)

    def _refuse(self, failed: _Failed) -> None:
        """Tell those who still wait, and the log once per reason."""
        reasons: Counter[tuple[str, str, str]] = Counter()
        for call, error in failed:
            if not call.reply.done():
                call.reply.set_exception(unavailable(error))
                # An answer, such as MISCONF for a full disk, or OOM; or none.
                event = "store_refused" if isinstance(error, ResponseError) else "store_call_failed"
                reasons[event, type(error).__name__, reason_of(error)] += 1
        for (event, name, reason), count in sorted(reasons.items()):
            log = self._log.error if event == "store_refused" else self._log.warning
            log(event, error=name, reason=reason, calls=count)


def _by_node(calls: list[_Call]) -> list[list[_Call]]:
    groups: dict[Node | None, list[_Call]] = {}
    for call in calls:
        groups.setdefault(call.node, []).append(call)
    return list(groups.values())


def unavailable(error: Exception) -> StoreUnavailable:
    """What callers are told, whatever the reason; that stays its cause."""
    unanswered = StoreUnavailable("The gateway's limit store does not answer. Please try again.", retry_after=1.0)
    unanswered.__cause__ = error
    return unanswered
