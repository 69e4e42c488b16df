"""The transport against servers that misbehave: nothing hidden, every fault by its name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from pydantic import SecretStr

from proxy.errors import UpstreamDisconnected, UpstreamGarbled, UpstreamUnreachable
from proxy.forwarding.transport import AiohttpTransport, UpstreamRequest, _proxy_for
from proxy.upstreams.model import Upstream, UpstreamKey

Handler = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def server(handle: Handler) -> AsyncIterator[tuple[AiohttpTransport, Upstream, list[bytes]]]:
    """A server that hands each request's head to ``handle``; the heads are recorded."""
    heads: list[bytes] = []
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        try:
            while True:
                heads.append(await reader.readuntil(b"\r\n\r\n"))
                await handle(heads[-1], writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    upstream = Upstream("u", f"http://127.0.0.1:{port}/v1", "", (UpstreamKey("k", SecretStr("s")),))
    transport = AiohttpTransport({"u": upstream})
    try:
        yield transport, upstream, heads
    finally:
        await transport.close()
        listening.close()
        for writer in writers:
            writer.close()
            await asyncio.gather(writer.wait_closed(), return_exceptions=True)


def get(upstream: Upstream, path: str = "/x") -> UpstreamRequest:
    """A GET without any header of its own."""
    return UpstreamRequest(upstream, "GET", upstream.base_url + path, [], None)


async def test_get_is_not_repeated_in_secret() -> None:
    """A GET on a reused connection that the server hangs up is reported, not sent again by the client library."""

    async def answer_then_hang_up(_head: bytes, writer: asyncio.StreamWriter) -> None:
        if len(heads) == 1:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        else:
            writer.close()

    async with server(answer_then_hang_up) as (transport, upstream, heads):
        first = await transport.send(get(upstream))
        assert [chunk async for chunk in first.chunks()] == []
        request = get(upstream)
        with pytest.raises(UpstreamDisconnected):
            await transport.send(request)
        assert request.is_sent
        assert len(heads) == 2


async def test_redirects_are_answers() -> None:
    """A redirect is passed on as it is."""

    async def redirect(_head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 307 Temporary Redirect\r\nlocation: /elsewhere\r\ncontent-length: 0\r\n\r\n")

    async with server(redirect) as (transport, upstream, heads):
        response = await transport.send(get(upstream))
        response.abort()
        assert response.status == 307
        assert (b"location", b"/elsewhere") in response.headers
        assert len(heads) == 1


async def test_only_framing_headers_are_added() -> None:
    """The library adds Host and the length, and no header of its own; the path is sent as it stands."""

    async def answer(_head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")

    async with server(answer) as (transport, upstream, heads):
        (await transport.send(get(upstream, "/a%2Fb/%C3%A9?x=%20y&z"))).abort()
        lines = heads[0].decode().split("\r\n")
        assert lines[0] == "GET /v1/a%2Fb/%C3%A9?x=%20y&z HTTP/1.1"
        assert [line.split(":")[0].lower() for line in lines[1:] if line] == ["host"]


async def test_compressed_and_cookie_answers_stay_raw() -> None:
    """Bytes are not decompressed, and a cookie is not sent back."""
    body = b"\x1f\x8bnot really gzip"

    async def answer(_head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\nset-cookie: a=b\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
        )

    async with server(answer) as (transport, upstream, heads):
        for _ in range(2):
            response = await transport.send(get(upstream))
            assert b"".join([chunk async for chunk in response.chunks()]) == body
        assert b"cookie" not in heads[1].lower()


@pytest.mark.parametrize(
    "sent",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nhalf\r\n",
    ],
)
async def test_body_that_ends_early(sent: bytes) -> None:
    """A body that is shorter than promised is a fault and never a whole answer (D10)."""

    async def cut(_head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(sent)
        await writer.drain()
        writer.close()

    async with server(cut) as (transport, upstream, _):
        response = await transport.send(get(upstream))
        with pytest.raises(UpstreamDisconnected, match="in the middle of its answer"):
            assert [chunk async for chunk in response.chunks()]
        response.abort()


@pytest.mark.parametrize("sent", [b"SSH-2.0-nope\r\n", b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nnonsense\r\n"])
async def test_what_is_not_http(sent: bytes) -> None:
    """A server that does not speak HTTP, or breaks its rules, is a fault of its own kind."""

    async def talk(_head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(sent)
        await writer.drain()
        writer.close()

    async with server(talk) as (transport, upstream, _):
        with pytest.raises(UpstreamGarbled):
            await transport.send(get(upstream))


async def test_unreachable_was_not_sent() -> None:
    """A refused connection is told apart from a lost one, and nothing counts as sent."""

    async def never(_head: bytes, _writer: asyncio.StreamWriter) -> None:
        raise AssertionError

    async with server(never) as (transport, _, _):
        nowhere = Upstream("u", "http://127.0.0.1:9/v1", "", ())
        request = get(nowhere)
        with pytest.raises(UpstreamUnreachable) as caught:
            await transport.send(request)
        assert not request.is_sent
        assert "127.0.0.1" not in caught.value.message


async def test_abort_closes_the_connection() -> None:
    """Aborting an answer closes its connection, which is how an upstream learns that nobody listens (D01)."""
    closed = asyncio.Event()

    async def endless(_head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n")
        await writer.drain()
        await writer.wait_closed()

    async with server(endless) as (transport, upstream, _):
        response = await transport.send(get(upstream))
        assert await anext(response.chunks()) == b"x"
        response.abort()
        response.abort()
        closed.set()
    assert closed.is_set()


def test_proxy_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """HTTPS_PROXY and NO_PROXY decide whether an upstream is reached through a proxy."""
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    monkeypatch.setenv("no_proxy", "internal.example")
    assert _proxy_for("https://api.openai.com/v1") == "http://proxy.example:3128"
    assert _proxy_for("https://internal.example/v1") is None
