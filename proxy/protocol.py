"""HTTP/1.1 on the data port: uvicorn's httptools protocol, with bounds on a request's head that uvicorn does not set.

Decides how long, how large and how many headers may be; malformed HTTP is answered in OpenAI's shape. Bodies are bounded where
they are read (``api/openai.py``). Builds on uvicorn's internals, hence its pinned version and this module's own tests.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from proxy.api import errors
from proxy.errors import HeadersTooLarge, InvalidRequest, ProxyError, RequestTimeout

HEAD_WITHIN_S = 10.0  # from the first byte (or the connection) to the blank line
LARGEST_HEAD_BYTES = 64 * 1024
MOST_HEADERS = 100
LINGER_S = 1.0  # for a refused client to read why


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_timer: asyncio.TimerHandle | None = None
        self._raw_bytes = 0  # read since the head began, while it is incomplete
        self._line_bytes = 0  # of the header lines that are complete
        self._is_in_head = False
        self._is_refused = False
        self._fault: ProxyError | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connected: its first head must come in time."""
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser; whatever is not yet a complete head counts against its bounds."""
        if self._is_refused:
            return  # what still arrives is thrown away
        super().data_received(data)
        if self._is_refused or self.transport.is_closing():
            return
        is_idle = self.cycle is None or self.cycle.response_complete
        if not self._is_in_head and not is_idle:
            return
        self._raw_bytes += len(data)
        if self._raw_bytes > LARGEST_HEAD_BYTES and self._is_in_head:
            self._refuse(HeadersTooLarge(f"Expected at most {MOST_HEADERS} headers and {LARGEST_HEAD_BYTES} bytes of them."))
        elif self._head_timer is None and is_idle and self.timeout_keep_alive_task is None:
            self._arm()

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._is_in_head = True
        self._raw_bytes = self._line_bytes = 0
        if self._head_timer is None:
            self._arm()

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header line."""
        super().on_header(name, value)
        self._line_bytes += len(name) + len(value)
        if len(self.headers) > MOST_HEADERS or self._line_bytes > LARGEST_HEAD_BYTES:
            self._fault = HeadersTooLarge(f"Expected at most {MOST_HEADERS} headers and {LARGEST_HEAD_BYTES} bytes of them.")
            raise ValueError("too many headers")  # httptools turns it into a parser error, uvicorn into send_400_response

    def on_headers_complete(self) -> None:
        """The head is complete."""
        self._is_in_head = False
        self._disarm()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP, unless an earlier request on this connection is still being answered."""
        self._refuse(self._fault or InvalidRequest("The request is not valid HTTP/1.1."))

    def _refuse(self, fault: ProxyError) -> None:
        is_answering = self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete
        if not is_answering and not self.transport.is_closing():
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
        self._is_refused = True
        self._disarm()
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
