"""One attempt at an upstream that does what it likes: what reaches the client, and what is booked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from pydantic import SecretStr

from proxy.errors import UpstreamDisconnected, UpstreamGarbled, UpstreamRefusedKey
from proxy.forwarding import forwarder
from proxy.forwarding.forwarder import Answer, Forwarder, Outgoing
from proxy.forwarding.headers import RawHeaders
from proxy.forwarding.transport import UpstreamRequest
from proxy.tokens.usage import Ending, Usage
from proxy.upstreams.model import Upstream, UpstreamKey
from proxy.upstreams.pool import Lease

SECRET = "sk-secret-0123456789abcdef"
QUERY_SECRET = "query-secret-0123456789"
EVENTS = b"text/event-stream; charset=utf-8"


class FakeResponse:
    """An answer in given pieces; an exception among them is raised in its place, an event is waited for."""

    def __init__(self, status: int, headers: RawHeaders, pieces: list[bytes | Exception | asyncio.Event]) -> None:
        self.status = status
        self.headers = headers
        self.pieces = pieces
        self.is_aborted = False

    async def chunks(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            if isinstance(piece, Exception):
                raise piece
            if isinstance(piece, asyncio.Event):
                await piece.wait()
            else:
                yield piece

    def abort(self) -> None:
        self.is_aborted = True


class FakeTransport:
    """Gives one prepared answer and keeps the request."""

    def __init__(self, response: FakeResponse) -> None:
        self.response = response
        self.request: UpstreamRequest | None = None

    async def send(self, request: UpstreamRequest) -> FakeResponse:
        self.request = request
        return self.response

    async def close(self) -> None:
        """Nothing to close."""


class Attempt:
    """A forwarder before one prepared answer, and what it books."""

    def __init__(self, status: int, *pieces: bytes | Exception | asyncio.Event, kind: bytes = b"application/json", **more: bytes):
        names = [(name.replace("_", "-").encode(), value) for name, value in more.items()]
        self.response = FakeResponse(status, [(b"content-type", kind), *names], list(pieces))
        self.transport = FakeTransport(self.response)
        self.booked: list[tuple[Ending, Usage | None, int]] = []

    def book(self, ending: Ending, usage: Usage | None, counted_tokens: int) -> None:
        self.booked.append((ending, usage, counted_tokens))

    async def send(self, *, hides_usage: bool = False) -> Answer:
        upstream = Upstream("u", "http://u/v1", f"api-key={QUERY_SECRET}", (UpstreamKey("k", SecretStr(SECRET)),))
        outgoing = Outgoing("POST", "/chat/completions", b"a=1", [(b"x-a", b"b")], b"{}", hides_usage)
        return await Forwarder(self.transport).send(Lease(upstream, upstream.keys[0]), outgoing, self.book)

    async def read(self, *, hides_usage: bool = False) -> bytes:
        answer = await self.send(hides_usage=hides_usage)
        try:
            return b"".join([chunk async for chunk in answer.chunks()])
        finally:
            answer.close()


async def test_base_query_and_key_go_upstream() -> None:
    """The base address's own query comes first, the client's follows, and the key stands in its header."""
    attempt = Attempt(200, b"{}")
    await attempt.read()
    assert attempt.transport.request is not None
    assert attempt.transport.request.url == f"http://u/v1/chat/completions?api-key={QUERY_SECRET}&a=1"
    assert (b"authorization", b"Bearer " + SECRET.encode()) in attempt.transport.request.headers


@pytest.mark.parametrize("status", [101, 199, 600, 999])
async def test_status_that_nobody_asked_for(status: int) -> None:
    """A switch of protocols, or a status outside HTTP's, is the upstream's fault, and costs nothing."""
    attempt = Attempt(status)
    with pytest.raises(UpstreamGarbled):
        await attempt.send()
    assert attempt.response.is_aborted
    assert attempt.booked == [(Ending.UPSTREAM_FAILED, None, 0)]


@pytest.mark.parametrize("status", [204, 304])
async def test_answer_without_body_promises_none(status: int) -> None:
    """A 304 may name the length of the body it does not have: passed on, it would leave the client waiting."""
    attempt = Attempt(status, content_length=b"100")
    answer = await attempt.send()
    answer.close()
    assert b"content-length" not in dict(answer.headers)


@pytest.mark.parametrize("status", [200, 302, 400, 500])
@pytest.mark.parametrize("secret", [SECRET, QUERY_SECRET])
async def test_echoed_secrets_are_masked(status: int, secret: str) -> None:
    """A secret of ours that an upstream echoes, in headers or body, comes out as asterisks of the same length (D24)."""
    attempt = Attempt(status, b'{"echo": "%s"}' % secret.encode(), location=b"/x?" + secret.encode())
    answer = await attempt.send()
    body = b"".join([chunk async for chunk in answer.chunks()])
    answer.close()
    assert secret.encode() not in body
    assert len(body) == len(b'{"echo": ""}') + len(secret)
    assert all(secret.encode() not in value for _, value in answer.headers)


async def test_echo_in_a_stream_is_masked() -> None:
    """The same for an event of a stream."""
    attempt = Attempt(200, b'data: {"error": "%s"}\n\n' % SECRET.encode(), kind=EVENTS)
    assert await attempt.read() == b'data: {"error": "%s"}\n\n' % (b"*" * len(SECRET))


async def test_refused_key_shows_nothing() -> None:
    """An upstream's 401 becomes an error of ours, and its words, which quote the key, are dropped."""
    attempt = Attempt(401, b"Incorrect key sk-sec...cdef", www_authenticate=b"Bearer")
    with pytest.raises(UpstreamRefusedKey):
        await attempt.send()
    assert attempt.booked == [(Ending.UPSTREAM_REFUSED, None, 0)]


async def test_booked_before_the_last_bytes() -> None:
    """A plain answer is booked before its last piece goes out, once."""
    attempt = Attempt(200, b'{"usage": {"prompt_tokens": 1, ', b'"completion_tokens": 2, "total_tokens": 3}}')
    answer = await attempt.send()
    pieces = answer.chunks()
    await anext(pieces)
    assert attempt.booked == []
    await anext(pieces)
    assert attempt.booked == [(Ending.COMPLETE, Usage(1, 2, 3), attempt.booked[0][2])]
    answer.close()
    answer.close()
    assert len(attempt.booked) == 1
    assert attempt.response.is_aborted


async def test_stream_is_booked_before_its_terminal_marker() -> None:
    """A stream is booked when its last record has come, before that goes out (A02)."""
    usage = b'data: {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}}\n\n'
    attempt = Attempt(200, usage, b"data: [DONE]\n\n", kind=EVENTS)
    answer = await attempt.send(hides_usage=True)
    pieces = answer.chunks()
    assert await anext(pieces) == b"data: [DONE]\n\n"
    assert attempt.booked == [(Ending.STREAM_ENDED, Usage(1, 2, 3), 0)]
    answer.close()


async def test_cut_stream_raises_and_keeps_whole_records() -> None:
    """What came before a cut goes out in whole records; then the fault is raised, for an in-stream error (D10)."""
    attempt = Attempt(200, b'data: {"choices": []}\n\ndata: {"cho', UpstreamDisconnected("cut"), kind=EVENTS)
    answer = await attempt.send()
    got = []
    with pytest.raises(UpstreamDisconnected):
        got += [chunk async for chunk in answer.chunks()]
    assert attempt.booked == [(Ending.STREAM_ENDED, None, 0)]


async def test_left_before_any_byte() -> None:
    """An answer that is closed unread was left while waiting: the reservation stands."""
    attempt = Attempt(200, b"{}")
    (await attempt.send()).close()
    assert attempt.booked[0][0] is Ending.LEFT_WAITING


async def test_stream_does_not_go_on_after_its_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """An upstream that keeps a stream open after its terminal marker is cut off, and the client's stream ends in order."""
    monkeypatch.setattr(forwarder, "END_WITHIN_S", 0.0)
    attempt = Attempt(200, b"data: [DONE]\n\n", asyncio.Event(), b"never", kind=EVENTS)
    assert await attempt.read() == b"data: [DONE]\n\n"
    assert attempt.response.is_aborted


async def test_record_without_end_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record beyond its bound passes as it comes, and is counted by its size."""
    monkeypatch.setattr(forwarder, "LARGEST_RECORD_BYTES", 100)
    attempt = Attempt(200, b"data: " + b"x" * 200, b"y" * 400, kind=EVENTS)
    answer = await attempt.send()
    pieces = answer.chunks()
    assert await anext(pieces) == b"data: " + b"x" * 200
    assert await anext(pieces) == b"y" * 400
    assert await anext(pieces, None) is None
    assert attempt.booked == [(Ending.STREAM_ENDED, None, 100)]
    answer.close()
