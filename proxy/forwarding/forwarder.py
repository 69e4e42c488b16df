"""One attempt at an upstream: sends, relays the answer and meters it on the way. What an ending costs is ``tokens/usage.py``'s.

The answer's end is booked exactly once, however it comes: whole, cut, cancelled or never read. The booking is made before the
last bytes go out, so that a client which asks again at once meets its own settlement.
"""

from __future__ import annotations

import asyncio
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from proxy.errors import UpstreamFault, UpstreamRefusedKey
from proxy.forwarding import headers
from proxy.forwarding.headers import RawHeaders
from proxy.forwarding.sse import SseSplitter, data_of
from proxy.forwarding.transport import Transport, UpstreamRequest, UpstreamResponse
from proxy.limits.limiter import settled
from proxy.tokens.estimate import BYTES_PER_TOKEN
from proxy.tokens.usage import Ending, StreamMeter, Usage, usage_of_body
from proxy.upstreams.pool import Lease

LARGEST_METERED_BYTES = 64 * 2**20  # of a plain answer that is kept to read its usage
LARGEST_ERROR_BYTES = 2**20
END_WITHIN_S = 1.0  # how long a stream may stay open after its terminal marker

_KEY_LIKE = re.compile(rb"\bsk-[A-Za-z0-9_*\-.]{4,}")

Book = Callable[[Ending, Usage | None, int], "asyncio.Future[None] | None"]


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A request ready to be sent with any key. ``hides_usage``: the usage chunk was asked for by us, not by the client."""

    method: str
    path: str
    query: bytes
    headers: RawHeaders
    body: bytes | None
    hides_usage: bool


class Answer:
    """An upstream's answer on its way to the client. Iterate ``chunks`` once, and ``close`` it in any case."""

    def __init__(self, status: int, answer_headers: RawHeaders, body: bytes | _Metered, *, is_stream: bool = False) -> None:
        self.status = status
        self.headers = answer_headers
        self.is_stream = is_stream
        self._body = body

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body. Raises UpstreamFault when the upstream ends it early."""
        if isinstance(self._body, bytes):
            yield self._body
            return
        async for chunk in self._body.chunks():
            yield chunk

    def close(self) -> None:
        """Book the end if it was not booked, and give the connection back or close it."""
        if not isinstance(self._body, bytes):
            self._body.close()


class Forwarder:
    """Sends through ``transport``."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def send(self, lease: Lease, outgoing: Outgoing, book: Book) -> Answer:
        """One attempt with the leased key. ``book`` is called once when the ending is known. Raises UpstreamFault."""
        secret = lease.key.secret.get_secret_value()
        request = UpstreamRequest(
            upstream=lease.upstream,
            method=outgoing.method,
            url=_url(lease, outgoing),
            headers=headers.to_upstream(outgoing.headers, secret=secret),
            body=outgoing.body,
        )
        try:
            response = await self._transport.send(request)
        except UpstreamFault:
            book(Ending.UPSTREAM_FAILED, None, 0)
            raise
        except BaseException:  # cancelled: the client left, or the gateway is draining
            book(Ending.LEFT_WAITING if request.is_sent else Ending.NEVER_SENT, None, 0)
            raise
        if response.status >= 400:
            return await self._error(response, secret, book)
        return _metered(response, outgoing, book)

    async def _error(self, response: UpstreamResponse, secret: str, book: Book) -> Answer:
        has_failed = response.status == 429 or response.status >= 500
        booking = book(Ending.UPSTREAM_FAILED if has_failed else Ending.UPSTREAM_REFUSED, None, 0)
        try:
            body = b""
            async for chunk in response.chunks():
                body += chunk
                if len(body) > LARGEST_ERROR_BYTES:
                    break
        finally:
            response.abort()
        await settled(booking)
        if response.status == 401:
            # The client's own key was fine: a 401 would send its owner looking in the wrong place, and the text quotes ours.
            raise UpstreamRefusedKey("The upstream does not accept the gateway's key. The gateway's operator must replace it.")
        body = _KEY_LIKE.sub(b"[redacted]", body.replace(secret.encode("ascii"), b"[redacted]"))
        kept = headers.to_client(response.headers, is_length_kept=False)
        kept.append((b"content-length", b"%d" % len(body)))
        return Answer(response.status, kept, body)


def _url(lease: Lease, outgoing: Outgoing) -> str:
    queries = [query for query in (lease.upstream.base_query, outgoing.query.decode("latin-1")) if query]
    return lease.upstream.base_url + outgoing.path + ("?" + "&".join(queries) if queries else "")


def _metered(response: UpstreamResponse, outgoing: Outgoing, book: Book) -> Answer:
    kind = headers.media_type(response.headers)
    if kind == "text/event-stream":
        kept = headers.to_client(response.headers, is_length_kept=False)
        kept.append((b"x-accel-buffering", b"no"))
        if headers.first(kept, b"cache-control") is None:
            kept.append((b"cache-control", b"no-cache"))
        return Answer(response.status, kept, _MeteredStream(response, book, hides_usage=outgoing.hides_usage), is_stream=True)
    kept = headers.to_client(response.headers, is_length_kept=True)
    return Answer(response.status, kept, _MeteredBody(response, book, is_json=kind == "application/json"))


class _Metered(ABC):
    """What both kinds of body share: the booking, made once."""

    def __init__(self, response: UpstreamResponse, book: Book) -> None:
        self._response = response
        self._book = book
        self._is_booked = False
        self._has_bytes = False

    @abstractmethod
    def chunks(self) -> AsyncIterator[bytes]:
        """The body on its way, metered."""

    @abstractmethod
    def _count(self) -> tuple[Usage | None, int]:
        """Usage as far as it is known, and output tokens counted so far."""

    def _end(self, ending: Ending) -> asyncio.Future[None] | None:
        if self._is_booked:
            return None
        self._is_booked = True
        return self._book(ending, *self._count())

    def close(self) -> None:
        self._end(Ending.STREAM_ENDED if self._has_bytes else Ending.LEFT_WAITING)
        self._response.abort()


class _MeteredStream(_Metered):
    def __init__(self, response: UpstreamResponse, book: Book, *, hides_usage: bool) -> None:
        super().__init__(response, book)
        self._hides_usage = hides_usage
        self._splitter = SseSplitter()
        self._meter = StreamMeter()

    async def chunks(self) -> AsyncIterator[bytes]:
        arriving = self._response.chunks()
        try:
            while (chunk := await self._next(arriving)) is not None:
                self._has_bytes = True
                passed = b"".join(record for record in self._splitter.feed(chunk) if self._passes(record))
                if self._meter.is_finished:
                    await settled(self._end(Ending.STREAM_ENDED))
                if passed:
                    yield passed
        except UpstreamFault:
            await settled(self._end(Ending.STREAM_ENDED))
            raise
        rest = self._splitter.rest()
        passes = not rest or self._passes(rest)
        await settled(self._end(Ending.STREAM_ENDED))
        if rest and passes:
            yield rest

    async def _next(self, arriving: AsyncIterator[bytes]) -> bytes | None:
        if not self._meter.is_finished:
            return await anext(arriving, None)
        try:
            async with asyncio.timeout(END_WITHIN_S):
                return await anext(arriving, None)
        except TimeoutError:
            return None  # an upstream that keeps the connection open after its last word

    def _passes(self, record: bytes) -> bool:
        data = data_of(record)
        return data is None or not (self._meter.see(data) and self._hides_usage)

    def _count(self) -> tuple[Usage | None, int]:
        return self._meter.usage, self._meter.counted_tokens


class _MeteredBody(_Metered):
    def __init__(self, response: UpstreamResponse, book: Book, *, is_json: bool) -> None:
        super().__init__(response, book)
        self._is_json = is_json
        self._kept = bytearray()
        self._size_bytes = 0
        self._is_whole = False

    async def chunks(self) -> AsyncIterator[bytes]:
        last = b""
        async for chunk in self._response.chunks():
            if last:  # held back by one, so that the booking comes before the end
                self._has_bytes = True
                yield last
            last = chunk
            self._size_bytes += len(chunk)
            if self._is_json and self._size_bytes <= LARGEST_METERED_BYTES:
                self._kept += chunk
        self._is_whole = True
        await settled(self._end(Ending.COMPLETE))
        if last:
            yield last

    def _count(self) -> tuple[Usage | None, int]:
        is_readable = self._is_whole and self._is_json and self._size_bytes <= LARGEST_METERED_BYTES
        return usage_of_body(bytes(self._kept)) if is_readable else None, -(-self._size_bytes // BYTES_PER_TOKEN)
