"""Which server a call goes to: the one of the URL, the master that Sentinel names, or the owner of the key's slot in a cluster.

Decides too where a call goes next that a server turned away without any effect; when calls are sent and what replies mean is
``pipeline.py``'s affair. Discovery, slots and connections are redis-py's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, Protocol

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.cluster import ClusterNode, NodesManager
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel
from redis.backoff import NoBackoff
from redis.cluster import PRIMARY
from redis.crc import key_slot
from redis.exceptions import (
    AskError,
    MasterDownError,
    MovedError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
    SlotNotCoveredError,
)

from proxy.logs import logger
from proxy.settings import StoreAddress, store_address

ANSWER_WITHIN_S = 1.0  # for one pipeline, connecting included; past it the store counts as unavailable

_MOST_CONNECTIONS = 16  # per server
_DISCOVERY_ANSWER_S = ANSWER_WITHIN_S / 2  # of one sentinel or node: with one that is silent there is time to ask another
_DISCOVERY_PAUSE_S = 0.2  # reading a slot table takes milliseconds, and every failing call asks for it
_LOOK_EVERY_S = 1.0  # for the master that the sentinels name, as long as there are calls

# With version 3 redis-py waits for news of maintenance, lengthens timeouts by itself, and does not look whether a connection
# was closed.
_PROTOCOL = 2
_FAILED = (RedisError, RedisClusterException, OSError)

Argument = str | int


class NotSent(Exception):  # noqa: N818  (named for what is known)
    """No connection came about, so the server knows nothing of the calls."""


class Node:
    """One server and its connections."""

    def __init__(self, url: str) -> None:
        self._pool = BlockingConnectionPool.from_url(
            url,
            max_connections=_MOST_CONNECTIONS,
            timeout=ANSWER_WITHIN_S,
            socket_timeout=ANSWER_WITHIN_S,
            socket_connect_timeout=ANSWER_WITHIN_S,
            retry=Retry(NoBackoff(), 0),  # an admission that may have been charged is not sent again
            protocol=_PROTOCOL,
        )
        self.client = Redis.from_pool(self._pool)  # for what is no pipeline
        self.is_retired = False  # no longer where calls go

    async def execute(self, commands: Sequence[Sequence[Argument]]) -> list[Any]:
        """Send commands in one piece. Returns a reply or an error for each. Raises NotSent if none can have arrived."""
        try:
            connection = await self._pool.get_connection()  # type: ignore[no-untyped-call]  # redis annotates it in part
        except (RedisError, OSError) as error:
            raise NotSent(f"{type(error).__name__}: {error}") from error
        replies: list[Any] = []
        try:
            await connection.send_packed_command(connection.pack_commands(commands))
            while len(replies) < len(commands):
                try:
                    replies.append(await connection.read_response())
                except ResponseError as error:
                    replies.append(error)
        except (RedisError, OSError) as error:
            # What was answered before the connection broke is answered.
            return replies + [error] * (len(commands) - len(replies))
        else:
            return replies
        finally:
            if self.is_retired or len(replies) < len(commands):  # a late reply must not be taken for that of another call
                await connection.disconnect(nowait=True)
            await self._pool.release(connection)

    async def drop_idle(self) -> None:
        """Close the connections that nobody uses, so that the next call resolves the server's name again."""
        await self._pool.disconnect(inuse_connections=False)

    async def retire(self) -> None:
        """Close connections as their calls end."""
        self.is_retired = True
        await self.drop_idle()

    async def close(self) -> None:
        """Close every connection, whoever uses it."""
        await self.client.aclose()
        await self._pool.disconnect()


class Hop(NamedTuple):
    """Where a call goes next, and whether it has to say that it was sent there for a slot on its way (ASKING)."""

    node: Node
    is_asking: bool = False


class Nodes(Protocol):
    """The servers behind one URL. Whatever redis-py raises passes through."""

    def known(self, key: str) -> Node | None:
        """The server that holds ``key`` as far as we know; None: ``find`` must ask."""

    async def find(self, key: str) -> Node:
        """The server that holds ``key``. Raises if none can be found."""

    async def after(self, node: Node, key: str, error: Exception) -> Hop | None:
        """Where to go with a call that ``node`` turned away without effect (see ``had_no_effect``). None: nowhere."""

    def distrust(self, node: Node) -> None:
        """``node`` did not answer: look, without waiting for it, whether another has taken its place."""

    async def masters(self) -> list[Node]:
        """Every server that takes writes."""

    async def close(self) -> None:
        """Give connections back."""


def nodes_at(url: str) -> Nodes:
    """The servers behind a checked URL."""
    address = store_address(url)
    if address.kind == "cluster":
        return Cluster(address)
    return SentinelMaster(address) if address.kind == "sentinel" else SingleServer(address.url)


def is_read_only(error: Exception) -> bool:
    """Whether the server is a replica. Before version 7 it says so in the middle of a script's error."""
    return isinstance(error, ReadOnlyError | MasterDownError) or (isinstance(error, ResponseError) and "-READONLY " in str(error))


def had_no_effect(error: Exception) -> bool:
    """Whether the server certainly did nothing of the call, so that it may be sent elsewhere."""
    return isinstance(error, NotSent | MovedError | AskError) or is_read_only(error)


def reason_of(error: BaseException) -> str:
    """An error in words for the log."""
    if isinstance(error, Exception) and is_read_only(error):
        return f"the server is a read-only replica, not a master: {str(error)[:100]}"
    if isinstance(error, MovedError | AskError):
        return f"the key lies on another node of a cluster ({error.host}:{error.port}): a cluster's URL is redis+cluster://"
    return str(error)[:200]


class SingleServer:
    """The server at the URL, always."""

    def __init__(self, url: str) -> None:
        self._node = Node(url)

    def known(self, key: str) -> Node:
        """See ``Nodes``."""
        return self._node

    async def find(self, key: str) -> Node:
        """See ``Nodes``."""
        return self._node

    async def after(self, node: Node, key: str, error: Exception) -> None:
        """See ``Nodes``. Behind a name or a proxy the next connection may lead to the new master."""
        if is_read_only(error):
            await node.drop_idle()

    def distrust(self, node: Node) -> None:
        """See ``Nodes``. There is no other."""

    async def masters(self) -> list[Node]:
        """See ``Nodes``."""
        return [self._node]

    async def close(self) -> None:
        """See ``Nodes``."""
        await self._node.close()


class SentinelMaster:
    """The master that the sentinels name.

    They are asked when the one we know refuses or falls silent, and once in a while: after a switch that somebody ordered the old
    master takes writes for ten seconds more.
    """

    def __init__(self, address: StoreAddress) -> None:
        self._address = address
        self._sentinel = Sentinel([])  # type: ignore[no-untyped-call]  # redis annotates it in part
        self._sentinel.sentinels = [_asked_quickly(address.sentinel_url(host, port)) for host, port in address.hosts]
        self._discovery = Discovery(self._discover)
        self._master: Node | None = None
        self._place = ("", 0)
        self._has_looked = False
        self._log = logger("store")

    def known(self, key: str) -> Node | None:
        """See ``Nodes``."""
        if self._master is not None and not self._has_looked:
            self._has_looked = True
            self._discovery.start()
            asyncio.get_running_loop().call_later(_LOOK_EVERY_S, self._look_again)
        return self._master

    async def find(self, key: str) -> Node:
        """See ``Nodes``."""
        if self._master is None:
            await self._discovery.fresh()
        assert self._master is not None  # noqa: S101  (else it raised)
        return self._master

    async def after(self, node: Node, key: str, error: Exception) -> Hop | None:
        """See ``Nodes``. A demoted master is left only when the sentinels name another."""
        if is_read_only(error):
            await node.drop_idle()
        with contextlib.suppress(*_FAILED):  # the refusal is what there is to tell
            await self._discovery.fresh()
        master = await self.find(key)
        return Hop(master) if master is not node else None

    def distrust(self, node: Node) -> None:
        """See ``Nodes``."""
        if node is self._master:
            self._discovery.start()

    async def masters(self) -> list[Node]:
        """See ``Nodes``."""
        return [await self.find("")]

    async def close(self) -> None:
        """See ``Nodes``."""
        self._discovery.stop()
        await self._sentinel.aclose()
        if self._master is not None:
            await self._master.close()

    def _look_again(self) -> None:
        self._has_looked = False

    async def _discover(self) -> None:
        try:
            host, port = await self._sentinel.discover_master(self._address.service)
        except MasterNotFoundError:
            # Its words hold how each sentinel is connected to, and in some versions of redis-py passwords.
            raise MasterNotFoundError(f"no sentinel that answers knows a working master {self._address.service!r}") from None
        if (host, port) == self._place:
            return
        self._log.info("store_master_found", host=host, port=port)
        former, self._master, self._place = self._master, Node(self._address.server_url(host, port)), (host, port)
        if former is not None:
            await former.retire()


class Cluster:
    """The nodes of a cluster: redis-py's ``NodesManager`` keeps which slot is whose, this keeps the connections of pipelines."""

    def __init__(self, address: StoreAddress) -> None:
        self._address = address
        options: dict[str, Any] = dict(parse_url(address.server_url(*address.hosts[0])))
        for name in ("host", "port", "db"):
            options.pop(name, None)
        options |= {"socket_timeout": _DISCOVERY_ANSWER_S, "socket_connect_timeout": _DISCOVERY_ANSWER_S, "protocol": _PROTOCOL}
        self._seeds = {node.name: node for node in (ClusterNode(host, port, **options) for host, port in address.hosts)}
        # A slot that no node holds fails its own calls only.
        self._table = NodesManager(
            list(self._seeds.values()), require_full_coverage=False, connection_kwargs=options, dynamic_startup_nodes=False
        )
        self._discovery = Discovery(self._discover)
        self._nodes: dict[tuple[str, int], Node] = {}

    def known(self, key: str) -> Node | None:
        """See ``Nodes``."""
        owners = self._table.slots_cache.get(key_slot(key.encode()))
        return self._node(owners[0].host, owners[0].port) if owners else None

    async def find(self, key: str) -> Node:
        """See ``Nodes``."""
        node = self.known(key)
        if node is None:
            await self._discovery.fresh()
            node = self.known(key)
        if node is None:
            raise SlotNotCoveredError(f"no node of the cluster holds slot {key_slot(key.encode())}")
        return node

    async def after(self, node: Node, key: str, error: Exception) -> Hop | None:
        """See ``Nodes``. A redirection names the next node; who fell silent or was demoted may have a successor."""
        if isinstance(error, MovedError | AskError):
            if not isinstance(error, MovedError):
                return Hop(self._node(error.host, error.port), is_asking=True)
            await self._table.move_slot(error)
            self._discovery.start()  # where one slot moved others may have
            return Hop(self._node(error.host, error.port))
        with contextlib.suppress(*_FAILED):  # the refusal is what there is to tell
            await self._discovery.fresh()
        successor = self.known(key)
        return Hop(successor) if successor is not None and successor is not node else None

    def distrust(self, node: Node) -> None:
        """See ``Nodes``."""
        self._discovery.start()

    async def masters(self) -> list[Node]:
        """See ``Nodes``."""
        if not self._table.slots_cache:
            await self._discovery.fresh()
        masters = [self._node(node.host, node.port) for node in self._table.get_nodes_by_server_type(PRIMARY)]
        if not masters:
            raise SlotNotCoveredError("no node of the cluster holds any slot")
        return masters

    async def close(self) -> None:
        """See ``Nodes``."""
        self._discovery.stop()
        discovering = [*self._seeds.values(), *self._table.nodes_cache.values()]
        await asyncio.gather(*(node.disconnect() for node in discovering), return_exceptions=True)
        await asyncio.gather(*(node.close() for node in self._nodes.values()))

    def _node(self, host: str, port: int | str) -> Node:
        place = (host, int(port))
        node = self._nodes.get(place)
        if node is None:
            node = self._nodes[place] = Node(self._address.server_url(*place))
        return node

    async def _discover(self) -> None:
        await self._table.initialize()
        # The URL's own nodes may all be gone one day, and the ones found all be replaced: ask either.
        self._table.startup_nodes = {**self._seeds, **self._table.nodes_cache}
        present = {(node.host, int(node.port)) for node in self._table.nodes_cache.values()}
        for place in self._nodes.keys() - present:
            await self._nodes.pop(place).retire()


class Discovery:
    """One question at a time however many wait for the answer, and a pause after each."""

    def __init__(self, ask: Callable[[], Awaitable[None]]) -> None:
        self._ask = ask
        self._asking: asyncio.Task[None] | None = None
        self._may_ask = asyncio.Event()
        self._may_ask.set()
        self._log = logger("store")

    async def fresh(self) -> None:
        """Wait for an answer that is still to come. Raises what asking raised."""
        if self._asking is None or self._asking.done():
            await self._may_ask.wait()
        await asyncio.shield(self.start())  # it goes on for the others when this one's time is up

    def start(self) -> asyncio.Task[None]:
        """Ask, unless that goes on or was done a moment ago."""
        if self._asking is None or self._may_ask.is_set():
            self._may_ask.clear()
            self._asking = asyncio.create_task(self._run())
            self._asking.add_done_callback(self._rest)
        return self._asking

    def stop(self) -> None:
        """Ask no more."""
        if self._asking is not None:
            self._asking.cancel()

    async def _run(self) -> None:
        await self._ask()

    def _rest(self, asked: asyncio.Task[None]) -> None:
        if asked.cancelled():
            return
        error = asked.exception()
        if error is not None:
            self._log.warning("store_discovery_failed", error=type(error).__name__, reason=str(error)[:200])
        asyncio.get_running_loop().call_later(_DISCOVERY_PAUSE_S, self._may_ask.set)


def _asked_quickly(url: str) -> Redis:
    return Redis.from_url(
        url,
        socket_timeout=_DISCOVERY_ANSWER_S,
        socket_connect_timeout=_DISCOVERY_ANSWER_S,
        retry=Retry(NoBackoff(), 0),
        protocol=_PROTOCOL,
    )
