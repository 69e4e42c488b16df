"""Bounds on a request's head in time; count and size are tried through the served gateway."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import pytest_asyncio
from uvicorn.server import ServerState

from proxy import protocol
from proxy.protocol import BoundedHttpProtocol
from proxy.worker import server_config


class FakeTransport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_closed = False

    def write(self, data: Any) -> None:
        self.written += data

    def write_eof(self) -> None:
        self.written += b"<eof>"

    def can_write_eof(self) -> bool:
        return True

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def pause_reading(self) -> None:
        """Nothing reads."""

    def resume_reading(self) -> None:
        """Nothing reads."""


class Timers:
    """An event loop's timers, fired by hand."""

    def __init__(self, loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pending: dict[asyncio.TimerHandle, tuple[float, Any]] = {}
        monkeypatch.setattr(loop, "call_later", self._later)
        self._loop = loop

    def _later(self, delay: float, callback: Any, *args: Any) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(self._loop.time() + delay, callback, args, self._loop)
        self.pending[handle] = (delay, callback)
        return handle

    def fire(self, delay: float) -> int:
        """Fire the live timers of that delay; how many there were."""
        live = [handle for handle, (after, _) in self.pending.items() if after == delay and not handle.cancelled()]
        for handle in live:
            self.pending.pop(handle)[1]()
        return len(live)


async def _never(_scope: Any, _receive: Any, _send: Any) -> None:
    await asyncio.Event().wait()


@pytest_asyncio.fixture
async def connection(monkeypatch: pytest.MonkeyPatch) -> tuple[BoundedHttpProtocol, FakeTransport, Timers]:
    """A protocol on a fake transport, with its timers."""
    loop = asyncio.get_running_loop()
    timers = Timers(loop, monkeypatch)
    config = server_config(_never, BoundedHttpProtocol)
    connected = BoundedHttpProtocol(config=config, server_state=ServerState(), app_state={}, _loop=loop)
    transport = FakeTransport()
    connected.connection_made(transport)
    return connected, transport, timers


async def test_silent_connection_is_closed(connection: tuple[BoundedHttpProtocol, FakeTransport, Timers]) -> None:
    """Who connects and says nothing is let go without a word."""
    _, transport, timers = connection
    assert timers.fire(protocol.HEAD_WITHIN_S) == 1
    assert transport.is_closed
    assert transport.written == b""


async def test_slow_head_is_408(connection: tuple[BoundedHttpProtocol, FakeTransport, Timers]) -> None:
    """A head that trickles in is cut off after its time, however busy the trickle is."""
    connected, transport, timers = connection
    for byte in b"GET /v1/models HTTP/1.1\r\nx-slow: ":
        connected.data_received(bytes([byte]))
    assert timers.fire(protocol.HEAD_WITHIN_S) == 1
    assert transport.written.startswith(b"HTTP/1.1 408 ")
    assert transport.written.endswith(b"<eof>")
    connected.data_received(b"more")
    assert timers.fire(protocol.LINGER_S) == 1
    assert transport.is_closed


async def test_complete_head_stops_the_timer(connection: tuple[BoundedHttpProtocol, FakeTransport, Timers]) -> None:
    """Once the head is there, its timer does not fire into the request."""
    connected, transport, timers = connection
    connected.data_received(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
    assert timers.fire(protocol.HEAD_WITHIN_S) == 0
    assert not transport.is_closed
    for task in connected.tasks:
        task.cancel()
    await asyncio.gather(*connected.tasks, return_exceptions=True)


async def test_stray_line_ends_do_not_hold_a_connection(connection: tuple[BoundedHttpProtocol, FakeTransport, Timers]) -> None:
    """Blank lines between requests do not switch the timers off."""
    connected, transport, timers = connection
    connected.data_received(b"\r\n")
    assert timers.fire(protocol.HEAD_WITHIN_S) == 1
    assert transport.is_closed
