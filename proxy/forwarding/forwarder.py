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
from urllib.parse import parse_qsl

from proxy.errors import UpstreamFault, UpstreamGarbled, UpstreamRefusedKey
from proxy.forwarding import headers
from proxy.forwarding.headers import RawHeaders
from proxy.forwarding.sse import SseSplitter, data_of
from proxy.forwarding.transport import Transport, UpstreamRequest, UpstreamResponse
from proxy.limits.reservations import settled
from proxy.limits.settling import Booking
from proxy.tokens.estimate import BYTES_PER_TOKEN
from proxy.tokens.usage import Ending, StreamMeter, Usage, usage_of_body
from proxy.upstreams.pool import Lease

LARGEST_METERED_BYTES = 64 * 2**20  # of a plain answer that is kept to read its usage
LARGEST_ERROR_BYTES = 2**20
LARGEST_RECORD_BYTES = 16 * 2**20  # of one event; partial images are a few megabytes
SHORTEST_SECRET = 16  # shorter ones, such as the "none" that local servers are given, would mask ordinary words
END_WITHIN_S = 1.0  # how long a stream may stay open after its terminal marker

_KEY_LIKE = re.compile(rb"\bsk-[A-Za-z0-9_*\-.]{4,}")

Secrets = tuple[bytes, ...]
Book = Callable[[Ending, Usage | None, int], "Booking | None"]


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
        request = UpstreamRequest(
            upstream=lease.upstream,
            method=outgoing.method,
            url=_url(lease, outgoing),
            headers=headers.to_upstream(outgoing.headers, secret=lease.key.secret.get_secret_value()),
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
        secrets = _secrets_of(lease)
        response.headers = [(name, _mask(value, secrets)) for name, value in response.headers]
        if not 200 <= response.status <= 599:
            response.abort()
            book(Ending.UPSTREAM_FAILED, None, 0)
            raise UpstreamGarbled("The upstream answered with a status that HTTP does not have, or that nobody asked for.")
        if response.status >= 400:
            return await self._error(response, secrets, book)
        return _metered(response, outgoing, secrets, book)

    async def _error(self, response: UpstreamResponse, secrets: Secrets, book: Book) -> Answer:
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
        body = _KEY_LIKE.sub(b"[redacted]", _mask(body, secrets))
        kept = headers.to_client(response.headers, is_length_kept=False)
        kept.append((b"content-length", b"%d" % len(body)))
        return Answer(response.status, kept, body)


def _url(lease: Lease, outgoing: Outgoing) -> str:
    queries = [query for query in (lease.upstream.base_query, outgoing.query.decode("latin-1")) if query]
    return lease.upstream.base_url + outgoing.path + ("?" + "&".join(queries) if queries else "")


def _secrets_of(lease: Lease) -> Secrets:
    """What of ours an upstream may echo: the key, and what stands in the base address's query."""
    found = [lease.key.secret.get_secret_value(), *(value for _, value in parse_qsl(lease.upstream.base_query))]
    return tuple(secret.encode("utf-8") for secret in found if len(secret) >= SHORTEST_SECRET)


def _mask(text: bytes, secrets: Secrets) -> bytes:
    """``text`` with every secret replaced by as many asterisks, so that announced lengths stay true."""
    for secret in secrets:
        if secret in text:
            text = text.replace(secret, b"*" * len(secret))
    return text


def _metered(response: UpstreamResponse, outgoing: Outgoing, secrets: Secrets, book: Book) -> Answer:
    kind = headers.media_type(response.headers)
    if kind == "text/event-stream":
        kept = headers.to_client(response.headers, is_length_kept=False)
        kept.append((b"x-accel-buffering", b"no"))
        if headers.first(kept, b"cache-control") is None:
            kept.append((b"cache-control", b"no-cache"))
        stream = _MeteredStream(response, book, secrets, hides_usage=outgoing.hides_usage)
        return Answer(response.status, kept, stream, is_stream=True)
    # Of an answer without a body a length would promise one.
    kept = headers.to_client(response.headers, is_length_kept=response.status not in (204, 304))
    return Answer(response.status, kept, _MeteredBody(response, book, secrets, is_json=kind == "application/json"))


class _Metered(ABC):
    """What both kinds of body share: the booking, made once."""

    def __init__(self, response: UpstreamResponse, book: Book, secrets: Secrets) -> None:
        self._response = response
        self._book = book
        self._secrets = secrets
        self._is_booked = False
        self._has_bytes = False

    @abstractmethod
    def chunks(self) -> AsyncIterator[bytes]:
        """The body on its way, metered."""

    @abstractmethod
    def _count(self) -> tuple[Usage | None, int]:
        """Usage as far as it is known, and output tokens counted so far."""

    def _end(self, ending: Ending) -> Booking | None:
        if self._is_booked:
            return None
        self._is_booked = True
        return self._book(ending, *self._count())

    def close(self) -> None:
        self._end(Ending.STREAM_ENDED if self._has_bytes else Ending.LEFT_WAITING)
        self._response.abort()


class _MeteredStream(_Metered):
    def __init__(self, response: UpstreamResponse, book: Book, secrets: Secrets, *, hides_usage: bool) -> None:
        super().__init__(response, book, secrets)
        self._hides_usage = hides_usage
        self._splitter = SseSplitter()
        self._meter = StreamMeter()
        self._end_by: float | None = None  # event-loop time until which the rest must have come
        self._unmetered_bytes: int | None = None  # passed since a record outgrew its bound

    async def chunks(self) -> AsyncIterator[bytes]:
        arriving = self._response.chunks()
        try:
            while (chunk := await self._next(arriving)) is not None:
                self._has_bytes = True
                passed = _mask(self._passed(chunk), self._secrets)
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
        if self._end_by is None:
            self._end_by = asyncio.get_running_loop().time() + END_WITHIN_S
        try:
            async with asyncio.timeout_at(self._end_by):
                return await anext(arriving, None)
        except TimeoutError:
            return None  # an upstream that goes on after its last word

    def _passed(self, chunk: bytes) -> bytes:
        """What of a chunk may go out now: the records that it completes, without the usage that only we asked for."""
        if self._unmetered_bytes is not None:
            self._unmetered_bytes += len(chunk)
            return chunk
        passed = b"".join(record for record in self._splitter.feed(chunk) if self._passes(record))
        if self._splitter.pending_bytes > LARGEST_RECORD_BYTES:
            # Keeping more would let one upstream fill the memory: from here on bytes pass as they come, counted by size.
            passed += self._splitter.rest()
            self._unmetered_bytes = 0
        return passed

    def _passes(self, record: bytes) -> bool:
        data = data_of(record)
        return data is None or not (self._meter.see(data) and self._hides_usage)

    def _count(self) -> tuple[Usage | None, int]:
        return self._meter.usage, self._meter.counted_tokens + (self._unmetered_bytes or 0) // BYTES_PER_TOKEN


class _MeteredBody(_Metered):
    def __init__(self, response: UpstreamResponse, book: Book, secrets: Secrets, *, is_json: bool) -> None:
        super().__init__(response, book, secrets)
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
            last = _mask(chunk, self._secrets)
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
