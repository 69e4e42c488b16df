"""One subscription to the store's channels, kept alive whatever becomes of servers and connections.

Decides when a connection counts as lost and how soon the next is tried. Messages sent in between are lost: what to do about
that, and what they mean, is the affair of those who listen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from redis.asyncio.client import PubSub

from proxy.limits.nodes import ANSWER_WITHIN_S, Node, Nodes
from proxy.logs import logger

_LOOK_S = 1.0  # how soon a node that is no longer a master is left
_MOST_SILENCES = 5  # after so many looks without a message the server is asked for one
_PAUSES_S = (0.0, 0.1, 0.5, 1.0)  # before the first try after a loss, and those that follow

Handler = Callable[[bytes], None]


class Subscription:
    """``handle`` gets each message; ``resumed`` is called when listening begins, each time: messages may have gone by before."""

    def __init__(self, nodes: Nodes, channels: Sequence[str], handle: Handler, resumed: Callable[[], None] | None) -> None:
        self._nodes = nodes
        self._channels = channels
        self._handle = handle
        self._resumed = resumed
        self._failures = 0  # since it last listened
        self._turn = 0  # of a cluster's nodes any will do, so after a failure the next one is asked
        self._log = logger("store")

    async def run(self) -> None:
        """Listen until cancelled."""
        while True:
            await asyncio.sleep(_PAUSES_S[min(self._failures, len(_PAUSES_S) - 1)])
            node: Node | None = None
            try:
                async with asyncio.timeout(ANSWER_WITHIN_S):
                    masters = await self._nodes.masters()
                node = masters[self._turn % len(masters)]
                await self._listen_at(node)
            except Exception as error:  # noqa: BLE001  (whatever it was, listening goes on)
                self._log.warning("store_subscription_lost", error=type(error).__name__, reason=str(error)[:200])
                self._failures += 1
                self._turn += 1
                if node is not None:
                    self._nodes.distrust(node)

    async def _listen_at(self, node: Node) -> None:
        """Listen until the node is no longer a master. Raises when the connection is lost."""
        async with node.client.pubsub() as channels:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                await channels.subscribe(*self._channels)
            confirmed = silences = 0
            while not node.is_retired:
                message = await channels.get_message(timeout=_LOOK_S)
                silences = 0 if message else silences + 1
                if message is None:
                    await self._bear_silence(channels, silences, is_confirmed=confirmed == len(self._channels))
                elif message["type"] == "message":
                    self._call(self._handle, message["data"])
                elif message["type"] == "subscribe":
                    confirmed += 1
                    if confirmed == len(self._channels):
                        self._failures = 0
                        self._call(self._resumed)

    @staticmethod
    async def _bear_silence(channels: PubSub, silences: int, *, is_confirmed: bool) -> None:
        if not is_confirmed or silences > _MOST_SILENCES:
            raise TimeoutError("the server fell silent")
        if silences == _MOST_SILENCES:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                await channels.ping()

    def _call(self, listener: Callable[..., None] | None, *message: bytes) -> None:
        if listener is None:
            return
        try:
            listener(*message)
        except Exception as error:  # noqa: BLE001  (one message that can't be handled must not end the others)
            self._log.error("store_message_failed", error=type(error).__name__, reason=str(error)[:200])
