"""How one answer is sent as its script wants it: late, in pieces, held, cut or never; always with an eye on the client.

What is in the answer is left to ``answers.py``; how a connection is closed abruptly, to the server (``server.py``).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, NoReturn, Protocol

from proxy.simulator.script import NOTHING, Cut, Script

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.types import Receive, Scope, Send

    from proxy.simulator.journal import Journal, Seen
    from proxy.simulator.reply import Headers, Record, Reply

WIRE: Final = "proxy.simulator.wire"
"""Where in the ASGI state the server puts the connection's Wire."""


class ClientLeft(Exception):  # noqa: N818  (a fact rather than a fault)
    """The client closed the connection before its answer was complete."""


class ConnectionCut(Exception):  # noqa: N818  (a fact rather than a fault)
    """The script had the connection cut. A server that offers no Wire sees this exception."""


class Wire(Protocol):
    """What ASGI does not offer of a connection."""

    def cut(self, how: Cut) -> None:
        """Close it without an end of the answer."""

    def is_closed(self) -> bool:
        """Whether either side closed it."""


class Gates:
    """Named gates, closed at first. A released gate stays open."""

    def __init__(self) -> None:
        self._gates: dict[str, asyncio.Event] = {}

    def gate(self, name: str) -> asyncio.Event:
        """The gate of this name."""
        return self._gates.setdefault(name, asyncio.Event())

    def release(self, name: str) -> None:
        """Open it, now or beforehand."""
        self.gate(name).set()


class Exchange:
    """One request and its answer. Every method that waits or sends raises ClientLeft when the client has left."""

    __slots__ = ("_pending", "_receive", "_send", "_watcher", "_wire", "chunk_bytes", "is_head")

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.get("state")
        self._wire: Wire | None = state.get(WIRE) if state else None
        self._receive = receive
        self._send = send
        self._watcher: asyncio.Task[None] | None = None
        self._pending = b""
        self.chunk_bytes: int | None = None
        self.is_head = scope["method"] == "HEAD"

    @property
    def is_served(self) -> bool:
        """Whether the server offers a Wire."""
        return self._wire is not None

    async def read_body(self) -> bytes:
        """The whole body of the request."""
        parts: list[bytes] = []
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            body: bytes = message.get("body", b"")
            if not message.get("more_body", False):
                return b"".join([*parts, body]) if parts else body
            parts.append(body)

    async def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Send the status and headers."""
        self._check()
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes) -> None:
        """Send a piece of the body, or several where the script wants small ones."""
        size = self.chunk_bytes
        if size is None:
            await self._write(data)
            return
        data = self._pending + data
        end = len(data) - len(data) % size
        self._pending = data[end:]
        for at in range(0, end, size):
            await self._write(data[at : at + size])

    async def flush(self) -> None:
        """Send what was kept back to fill a piece."""
        if self._pending:
            data, self._pending = self._pending, b""
            await self._write(data)

    async def finish(self, data: bytes = b"") -> None:
        """Send the last piece of the body."""
        if self.chunk_bytes is not None:
            await self.write(data)
            data, self._pending = self._pending, b""
        self._check()
        await self._send({"type": "http.response.body", "body": b"" if self.is_head else data})

    async def pause(self, seconds: float) -> None:
        """Let time pass."""
        if seconds > 0:
            await self.flush()
            await asyncio.wait({self._leaving()}, timeout=seconds)
            self._check()

    async def wait_at(self, gate: asyncio.Event) -> None:
        """Wait until the gate opens."""
        await self.flush()
        opening = asyncio.ensure_future(gate.wait())
        try:
            await asyncio.wait({opening, self._leaving()}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            opening.cancel()
        self._check()

    async def hang(self) -> NoReturn:
        """Do nothing more until the client leaves."""
        await self.flush()
        await self._leaving()
        raise ClientLeft

    async def cut(self, how: Cut | None) -> NoReturn:
        """Close the connection in the middle of the answer."""
        await self.flush()
        self.close()
        if self._wire is not None:
            self._wire.cut(how or "fin")
        raise ConnectionCut

    def close(self) -> None:
        """Stop watching the client."""
        if self._watcher is not None:
            self._watcher.cancel()

    async def _write(self, data: bytes) -> None:
        self._check()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    def _check(self) -> None:
        if self._watcher is not None:
            if self._watcher.done():
                raise ClientLeft
        elif self._wire is not None and self._wire.is_closed():
            raise ClientLeft

    def _leaving(self) -> asyncio.Task[None]:
        """Ends when the client leaves. It begins with the first wait: an answer without one needs no task."""
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._watch())
        return self._watcher

    async def _watch(self) -> None:
        message = await self._receive()
        while message["type"] != "http.disconnect":
            message = await self._receive()


class Performance:
    """Sends one reply by its script and keeps the log entry true meanwhile."""

    __slots__ = ("_exchange", "_gates", "_journal", "_script", "_seen")

    def __init__(self, exchange: Exchange, script: Script, seen: Seen, journal: Journal, gates: Gates) -> None:
        exchange.chunk_bytes = script.chunk_bytes
        self._exchange = exchange
        self._script = script
        self._seen = seen
        self._journal = journal
        self._gates = gates

    async def before_headers(self) -> None:
        """All that the script wants before the status is sent."""
        script, exchange = self._script, self._exchange
        if script is NOTHING:
            return
        await exchange.pause(script.latency_s or 0.0)
        if script.hold is not None and script.hold_after is None:
            await exchange.wait_at(self._gates.gate(script.hold))
        if script.hang == "headers":
            await exchange.hang()
        if script.drop:
            await exchange.cut(script.cut)

    async def send(self, reply: Reply, headers: Headers | list[tuple[bytes, bytes]]) -> None:
        """Status, headers and body."""
        self._seen.answered_status = reply.status
        await self._exchange.start(reply.status, list(headers))
        self._journal.note()
        if self._script.hang == "body":
            await self._exchange.hang()
        if reply.records is not None:
            await self._stream(reply.records)
        else:
            await self._whole(reply)

    async def _whole(self, reply: Reply) -> None:
        script, body = self._script, reply.body
        if self._has_positions() and not self._exchange.is_head:
            half = len(body) // 2
            await self._exchange.write(body[:half])
            await self._stop_at(script.cut_after, script.hang_after, script.hold_after)
            body = body[half:]
        await self._exchange.finish(body)
        self._seen.tokens_sent = reply.tokens

    async def _stream(self, records: Iterable[Record]) -> None:
        exchange, seen, journal = self._exchange, self._seen, self._journal
        pace = self._script.token_pace_s or 0.0
        has_positions = self._has_positions()
        if has_positions:
            await self._stop_after(0)
        for record, is_token in records:
            if is_token and pace and seen.tokens_sent:
                await exchange.pause(pace)
            await exchange.write(record)
            if is_token:
                seen.tokens_sent += 1
                journal.note()
                if has_positions:
                    await self._stop_after(seen.tokens_sent)
        await exchange.finish()

    def _has_positions(self) -> bool:
        script = self._script
        return script.cut_after is not None or script.hang_after is not None or script.hold_after is not None

    async def _stop_after(self, sent: int) -> None:
        script = self._script
        at = [position if position == sent else None for position in (script.cut_after, script.hang_after, script.hold_after)]
        await self._stop_at(*at)

    async def _stop_at(self, cut: int | None, hang: int | None, hold: int | None) -> None:
        """Do what the script wants at this place: wait, and then be cut or hang."""
        if hold is not None and self._script.hold is not None:
            await self._exchange.wait_at(self._gates.gate(self._script.hold))
        if cut is not None:
            await self._exchange.cut(self._script.cut)
        if hang is not None:
            await self._exchange.hang()
