"""Serves a simulator on a socket of its own inside the running event loop, by uvicorn's HTTP protocol.

Processes, signals and logs are left to whoever starts it: none is touched here.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import TYPE_CHECKING, Self

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from proxy.simulator.exchange import WIRE

if TYPE_CHECKING:
    from types import TracebackType

    from proxy.simulator.app import Simulator
    from proxy.simulator.script import Cut

_BACKLOG = 2048
_KEEP_ALIVE_S = 75
_LINGER_NOT = struct.pack("ii", 1, 0)


class _State(ServerState):
    """What the connections share: whether they are to close, and when the last one has."""

    def __init__(self) -> None:
        super().__init__()
        self.is_closing = False
        self.emptied = asyncio.Event()


class _Connection(HttpToolsProtocol):
    """uvicorn's protocol, which also is the Wire that the application cuts."""

    def __init__(self, config: Config, state: _State) -> None:
        super().__init__(config, state, {WIRE: self})
        self.access_log = False
        self._state = state

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn declares it
        super().connection_made(transport)
        if self._state.is_closing:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.app_state.clear()
        if not self.connections:
            self._state.emptied.set()

    def cut(self, how: Cut) -> None:
        """Close without an end of the answer: FIN after what was written, or RST in place of it."""
        # As if the client had left, so that uvicorn does not miss the end of the answer.
        self.cycle.disconnected = True
        if how == "fin":
            self.transport.close()
            return
        # A copy of the descriptor, since not every event loop lets options be set on the transport's own socket.
        with socket.socket(fileno=_duplicate(self.transport)) as same:
            same.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
        self.transport.abort()

    def is_closed(self) -> bool:
        """Whether either side closed the connection."""
        return self.transport.is_closing()


def _duplicate(transport: asyncio.Transport) -> int:
    own = transport.get_extra_info("socket")
    return socket.fromfd(own.fileno(), own.family, socket.SOCK_STREAM).detach()


class RunningSimulator:
    """A simulator behind a port. An asynchronous context manager, or ``start`` and ``stop``."""

    def __init__(self, simulator: Simulator, host: str = "127.0.0.1", port: int = 0, *, sock: socket.socket | None = None) -> None:
        """Port 0 takes a free one. A bound ``sock`` is used instead of host and port, and closed by ``stop``."""
        self.simulator = simulator
        self.host = host
        self.port = port if sock is None else sock.getsockname()[1]
        self._socket = sock
        self._server: asyncio.Server | None = None
        self._state: _State | None = None

    @property
    def base_url(self) -> str:
        """What a client takes as its base URL. The port is known once started."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/v1"

    async def start(self) -> None:
        """Listen. Raises OSError when the address is in use or not this machine's."""
        sock = self._socket or _bound(self.host, self.port)
        state = _State()
        config = Config(
            self.simulator,
            http=_Connection,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
        )
        config.load()
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(config, state), sock=sock, backlog=_BACKLOG)
        self._state = state
        self.host, self.port = sock.getsockname()[:2]

    async def stop(self) -> None:
        """Stop listening and drop every connection, without waiting for answers. Stopping twice does nothing."""
        server, state = self._server, self._state
        if server is None or state is None:
            return
        self._server = self._state = None
        state.is_closing = True
        server.close()
        for connection in list(state.connections):
            connection.transport.abort()
        if state.connections:
            state.emptied.clear()
            await state.emptied.wait()
        if state.tasks:
            # Each learns that its client has gone.
            await asyncio.wait(set(state.tasks))
        await server.wait_closed()

    async def __aenter__(self) -> Self:
        """Start."""
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop."""
        await self.stop()


async def serve(simulator: Simulator, sock: socket.socket) -> None:
    """Serve on a bound socket until cancelled."""
    running = RunningSimulator(simulator, sock=sock)
    await running.start()
    try:
        await asyncio.Event().wait()
    finally:
        await running.stop()


def _bound(host: str, port: int) -> socket.socket:
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.setblocking(False)
        stack.pop_all()
        return sock
