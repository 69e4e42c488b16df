"""HTTP/1.1 on the data port: uvicorn's httptools protocol, with bounds and refusals that uvicorn does not have.

Decides how long, how large and how many headers may be, how much may be sent ahead of an answer, which Host is one, and that
upgrades and trailers are ignored; malformed HTTP is answered in OpenAI's shape, in its turn. The socket is read as long as a
request is served, for only a socket that is read shows that its client has left. The body of the request that is served is
bounded where it is read (``api/openai.py``). Builds on uvicorn's internals, hence its pinned version and this module's own tests.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from proxy.api import errors
from proxy.errors import HeadersTooLarge, InvalidRequest, ProxyError, RequestTimeout

HEAD_WITHIN_S = 10.0  # from the first byte (or the connection) to the blank line
LARGEST_HEAD_BYTES = 64 * 1024
MOST_HEADERS = 100  # trailers included
MOST_WAITING = 16  # requests sent ahead, behind the one that is served
LARGEST_WAITING_BYTES = 256 * 1024  # of them all, with their bodies
PIECE_BYTES = 16 * 1024  # fed to the parser at once: how exactly the bytes of an incomplete line are known
LINGER_S = 1.0  # for a refused client to read why


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. ``cycle`` is the request that was begun last, ``_served`` the one that the application has."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_timer: asyncio.TimerHandle | None = None
        self._raw_bytes = 0  # read since the head, or the chunk's first line, began
        self._line_bytes = 0  # of the request's header and trailer lines that are complete
        self._lines = 0
        self._is_in_head = False
        self._is_in_trailers = False  # or in the first line of a chunk
        self._is_replaying = False
        self._is_refused = False
        self._fault: ProxyError | None = None
        self._served: RequestResponseCycle | None = None
        self._waiting_bytes: deque[int] = deque()  # of each request in ``pipeline``, oldest first

    @property
    def _is_answering(self) -> bool:
        return self._served is not None and not self._served.response_complete

    @property
    def _is_ahead(self) -> bool:
        """Whether the request that was begun last waits for the one that is served."""
        return self.cycle is not self._served

    @property
    def _is_in_own_body(self) -> bool:
        """Whether the request that is served, or was last, is not complete itself."""
        return self.cycle is not None and self.cycle is self._served and self.cycle.more_body

    # the connection -----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connected: its first head must come in time."""
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._disarm()
        self._abandon_served()  # uvicorn tells the request that was begun last alone
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser; whatever is not yet a complete line counts against its bounds."""
        self._unset_keepalive_if_required()
        for start in range(0, len(data), PIECE_BYTES):
            if self._is_refused or self.transport.is_closing():
                return  # what still arrives is thrown away
            self._feed(data[start : start + PIECE_BYTES])
        if self._is_refused or self.transport.is_closing():
            return
        is_idle = self.cycle is None or self.cycle.response_complete
        if is_idle and self._head_timer is None and self.timeout_keep_alive_task is None:
            self._arm()

    def _feed(self, piece: bytes) -> None:
        self._raw_bytes += len(piece)  # before the parser, which resets it where a head begins
        try:
            self._parse(piece)
        except httptools.HttpParserError:
            self._refuse(self._fault or InvalidRequest("The request is not valid HTTP/1.1."))
        if self._raw_bytes > LARGEST_HEAD_BYTES and (self._is_in_head or self._is_in_trailers):
            self._refuse(_headers_too_large())

    def _parse(self, piece: bytes) -> None:
        while piece:
            try:
                self.parser.feed_data(piece)
            except httptools.HttpParserUpgrade as upgrade:
                piece = piece[upgrade.args[0] :]  # from behind the head on
                self._ignore_upgrade()
            else:
                return

    def _ignore_upgrade(self) -> None:
        """Read on as if no upgrade had been asked for (RFC 9110, 7.8).

        The parser ends where a head asks for an upgrade, and drops the body. A new one is told the same head without that line.
        The application still sees the head as it was sent.
        """
        head = [self.parser.get_method(), b" ", self.url, b" HTTP/", self.parser.get_http_version().encode("ascii"), b"\r\n"]
        for name, value in self.headers:
            if name != b"upgrade":
                head += [name, b": ", value, b"\r\n"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self._is_replaying = True
        self.parser.feed_data(b"".join([*head, b"\r\n"]))

    # what the parser finds ----------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A head begins."""
        if self._is_replaying:
            return
        super().on_message_begin()
        self._is_in_head = True
        self._raw_bytes = self._line_bytes = self._lines = 0
        if self._head_timer is None:
            self._arm()

    def on_url(self, url: bytes) -> None:
        """A part of the target."""
        if not self._is_replaying:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One line of the head, or a trailer: these are counted and dropped, for they must not pass for headers."""
        if self._is_replaying:
            return
        self._lines += 1
        self._line_bytes += len(name) + len(value)
        if self._lines > MOST_HEADERS or self._line_bytes > LARGEST_HEAD_BYTES:
            self._stop(_headers_too_large())
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is complete: its request is served, or waits for its turn."""
        if not self._is_replaying:
            self._is_in_head = False
            self._disarm()
            self._check_head()
            if self.parser.should_upgrade():
                return  # ``_ignore_upgrade`` comes next
        self._is_replaying = False
        super().on_headers_complete()
        if self._is_ahead:
            self._waiting_bytes.append(len(self.url) + self._line_bytes)
            self._bound_waiting()

    def _check_head(self) -> None:
        if self.parser.get_method() == b"CONNECT":
            self._stop(InvalidRequest("CONNECT is not offered here."))
        hosts = sum(name == b"host" for name, _ in self.headers)
        is_old = self.parser.get_http_version() in ("0.9", "1.0")
        if hosts != 1 and not (is_old and hosts == 0):
            self._stop(InvalidRequest(f"Expected one Host header, got {hosts}."))

    def on_chunk_header(self) -> None:
        """The first line of a chunk is complete. If it is the last chunk's, trailers follow."""
        self._is_in_trailers = True
        self._raw_bytes = 0

    def on_body(self, body: bytes) -> None:
        """A piece of a body. uvicorn stops reading when much of one lies unread."""
        self._is_in_trailers = False
        super().on_body(body)
        if self._is_ahead:
            self._waiting_bytes[-1] += len(body)
            self._bound_waiting()

    def on_message_complete(self) -> None:
        """A request is complete; what follows it is bounded, so that it may be read."""
        self._is_in_trailers = False
        if self.parser.should_upgrade():
            return  # that was its head alone
        super().on_message_complete()
        self.cycle.more_body = False  # also if it was answered early, when uvicorn looks away
        self.flow.resume_reading()

    def _bound_waiting(self) -> None:
        """Read on, which uvicorn does not, unless too much waits."""
        self.flow.resume_reading()
        if len(self._waiting_bytes) > MOST_WAITING or sum(self._waiting_bytes) > LARGEST_WAITING_BYTES:
            self._abandon_served()
            self.transport.close()
            raise ValueError("too much sent ahead")  # which stops the parser

    def _stop(self, fault: ProxyError) -> None:
        """End parsing: httptools turns whatever a callback raises into a parser error."""
        self._fault = fault
        raise ValueError(fault.message)

    # turns --------------------------------------------------------------------------------------------------------------

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._served = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """An answer is complete: the next request's turn, and after the last one that of what could not be read."""
        if self._waiting_bytes:
            self._waiting_bytes.popleft()
        super().on_response_complete()
        if self._is_refused and self._fault is not None and not self._is_answering:
            self._write_refusal(self._fault)

    def _abandon_served(self) -> None:
        """Tell the application that its client is gone."""
        if self._served is not None and self._is_answering:
            self._served.disconnected = True
            self._served.message_event.set()

    # refusing -----------------------------------------------------------------------------------------------------------

    def _refuse(self, fault: ProxyError) -> None:
        """Read no more requests. Those that came before the bad one are answered first."""
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        self._fault = fault
        self._disarm()
        if self._is_ahead and self.cycle.more_body:
            self.pipeline.popleft()  # the bad one itself, cut in its body
            self._waiting_bytes.pop()
        if not self._is_answering or self._is_in_own_body:
            self._write_refusal(fault)

    def _write_refusal(self, fault: ProxyError) -> None:
        if self.transport.is_closing():
            return
        has_answer = self._is_in_own_body and self.cycle.response_started  # one request has one answer
        self._abandon_served()
        if not has_answer:
            body = errors.body_of(fault)
            lines = [STATUS_LINE[fault.status]]
            for name, value in [
                *errors.headers_of(fault),
                (b"content-length", b"%d" % len(body)),
                (b"connection", b"close"),
            ]:
                lines += [name, b": ", value, b"\r\n"]
            self.transport.write(b"".join([*lines, b"\r\n", body]))
            if self.transport.can_write_eof():
                self._linger()
                return
        self.transport.close()

    def _linger(self) -> None:
        """Close after a moment: at once, with input unread, the kernel would reset the connection and take the answer along."""
        self._unset_keepalive_if_required()
        self.transport.write_eof()
        self._head_timer = self.loop.call_later(LINGER_S, self.transport.close)

    def _arm(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_WITHIN_S, self._head_is_late)

    def _disarm(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._is_in_head:
            self._refuse(RequestTimeout("The request's headers did not arrive in time."))
        elif not self.transport.is_closing():
            self.transport.close()  # connected, and never said anything


def _headers_too_large() -> HeadersTooLarge:
    return HeadersTooLarge(f"Expected at most {MOST_HEADERS} headers and {LARGEST_HEAD_BYTES} bytes of them.")
