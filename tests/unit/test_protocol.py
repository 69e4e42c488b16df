"""Turns, bounds on what is sent ahead and on a head in time; a head's count and size are tried through the served gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
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
        self.is_paused = False

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
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False


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


class Application:
    """Reads each request, and answers with its path and body when it is let; a client that leaves first is noted."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, bytes, dict[bytes, bytes]]] = []
        self.left: list[str] = []
        self.may_answer = asyncio.Event()
        self.may_read = asyncio.Event()
        self.may_read.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.may_read.wait()
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left.append(scope["path"])
                return
            body, more = body + message["body"], message["more_body"]
        self.seen.append((scope["path"], body, dict(scope["headers"])))
        watch = asyncio.ensure_future(receive())
        let = asyncio.ensure_future(self.may_answer.wait())
        await asyncio.wait([watch, let], return_when=asyncio.FIRST_COMPLETED)
        watch.cancel()
        let.cancel()
        if not self.may_answer.is_set():
            self.left.append(scope["path"])
            return
        answer = scope["path"].encode() + b" " + body
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(answer))]})
        await send({"type": "http.response.body", "body": answer})


Connection = tuple[BoundedHttpProtocol, FakeTransport, Timers]


@pytest_asyncio.fixture
async def application() -> Application:
    """What the protocol serves."""
    return Application()


@pytest_asyncio.fixture
async def connection(application: Application, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Connection]:
    """A protocol on a fake transport, with its timers."""
    loop = asyncio.get_running_loop()
    timers = Timers(loop, monkeypatch)
    config = server_config(application, BoundedHttpProtocol)
    connected = BoundedHttpProtocol(config=config, server_state=ServerState(), app_state={}, _loop=loop)
    transport = FakeTransport()
    connected.connection_made(transport)
    yield connected, transport, timers
    tasks = list(connected.tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _settle() -> None:
    """Let the application run until it waits."""
    for _ in range(300):
        await asyncio.sleep(0)


def _post(path: str, body: bytes = b"", *lines: str) -> bytes:
    head = [f"POST {path} HTTP/1.1", "host: x", f"content-length: {len(body)}", *lines, "", ""]
    return "\r\n".join(head).encode() + body


def _chunked(path: str, *chunks: bytes, trailers: bytes = b"") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    return head + b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n" + trailers + b"\r\n"


async def test_silent_connection_is_closed(connection: Connection) -> None:
    """Who connects and says nothing is let go without a word."""
    _, transport, timers = connection
    assert timers.fire(protocol.HEAD_WITHIN_S) == 1
    assert transport.is_closed
    assert transport.written == b""


async def test_slow_head_is_408(connection: Connection) -> None:
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


async def test_complete_head_stops_the_timer(connection: Connection) -> None:
    """Once the head is there, its timer does not fire into the request."""
    connected, transport, timers = connection
    connected.data_received(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
    assert timers.fire(protocol.HEAD_WITHIN_S) == 0
    assert not transport.is_closed


async def test_stray_line_ends_do_not_hold_a_connection(connection: Connection) -> None:
    """Blank lines between requests do not switch the timers off."""
    connected, transport, timers = connection
    connected.data_received(b"\r\n")
    assert timers.fire(protocol.HEAD_WITHIN_S) == 1
    assert transport.is_closed


# sent ahead --------------------------------------------------------------------------------------------------------------


async def test_reading_goes_on_while_requests_wait(connection: Connection, application: Application) -> None:
    """However requests were sent ahead, the socket is read, and whoever is served learns that the client left."""
    connected, transport, _ = connection
    connected.data_received(_post("/a") + _post("/b", b"x" * 100_000) + _post("/c"))
    await _settle()
    assert not transport.is_paused
    connected.connection_lost(None)
    await _settle()
    assert [path for path, _, _ in application.seen] == ["/a"]
    assert application.left == ["/a"]


@pytest.mark.parametrize("size", [1, 7, 100_000])
async def test_answers_in_order(connection: Connection, application: Application, size: int) -> None:
    """Requests sent ahead are answered in their order, each with its own body, however they were cut into packets."""
    connected, transport, _ = connection
    sent = _post("/a", b"1") + _chunked("/b", b"2" * 300, b"3") + _post("/c", b"4")
    for start in range(0, len(sent), size):
        connected.data_received(sent[start : start + size])
    application.may_answer.set()
    await _settle()
    assert [line.rpartition(b"HTTP/1.1")[0] or line for line in transport.written.split(b"\r\n\r\n")[1:]] == [
        b"/a 1", b"/b " + b"2" * 300 + b"3", b"/c 4",
    ]  # fmt: skip
    assert not transport.is_closed


FLOODS = [
    pytest.param(b"".join(_post("/w") for _ in range(protocol.MOST_WAITING + 1)), id="requests"),
    pytest.param(_post("/w", b"x" * protocol.LARGEST_WAITING_BYTES), id="a body"),
    pytest.param(_post("/w", b"x" * 50_000) * 6, id="bodies"),
    pytest.param(_chunked("/w", *[b"x" * 1000] * 300), id="chunks"),
    pytest.param(_post("/w", b"", "long: " + "x" * 60_000) * 5, id="heads"),
]


@pytest.mark.parametrize("flood", FLOODS)
async def test_too_much_sent_ahead(connection: Connection, application: Application, flood: bytes) -> None:
    """Who sends more ahead than may wait loses the connection, and the request that was served ends with it."""
    connected, transport, _ = connection
    connected.data_received(_post("/a"))
    await _settle()
    connected.data_received(flood)
    assert transport.is_closed
    await _settle()
    assert application.left == ["/a"]
    assert transport.written == b""


async def test_as_much_as_may_wait(connection: Connection, application: Application) -> None:
    """What stays within the bounds is served, also when it comes for longer than the bounds are wide."""
    connected, transport, _ = connection
    connected.data_received(_post("/w") * (protocol.MOST_WAITING + 1))
    assert not transport.is_closed
    application.may_answer.set()
    await _settle()
    for _ in range(3):
        connected.data_received(_post("/w", b"x" * 100_000) * 3)
        await _settle()
    assert transport.written.count(b"200 OK") == protocol.MOST_WAITING + 1 + 9
    assert not transport.is_closed


async def test_large_body_is_held_up_until_it_is_read(connection: Connection, application: Application) -> None:
    """While a large body lies unread the socket is not read; once it is complete the socket is, and so the end is seen."""
    connected, transport, _ = connection
    application.may_read.clear()
    sent = _post("/a", b"x" * 300_000)
    connected.data_received(sent[:150_000])
    await _settle()
    assert transport.is_paused
    application.may_read.set()
    await _settle()
    assert not transport.is_paused
    connected.data_received(sent[150_000:])
    await _settle()
    assert not transport.is_paused
    assert len(application.seen[0][1]) == 300_000
    connected.connection_lost(None)
    await _settle()
    assert application.left == ["/a"]


BAD_FOLLOWERS = [
    pytest.param(b"garbage\r\n\r\n", id="garbage"),
    pytest.param(b"POST /b HTTP/1.1\r\n\r\n", id="no Host"),
    pytest.param(_chunked("/b", b"x").replace(b"\r\n1\r\n", b"\r\n?\r\n"), id="chunk"),
]


@pytest.mark.parametrize("follower", BAD_FOLLOWERS)
async def test_refusal_waits_for_its_turn(connection: Connection, application: Application, follower: bytes) -> None:
    """What can't be read is refused behind the answers to what came before it, never in their place."""
    connected, transport, _ = connection
    connected.data_received(_post("/a") + _post("/w") + follower + _post("/lost"))
    await _settle()
    assert transport.written == b""
    application.may_answer.set()
    await _settle()
    statuses = [part[:3] for part in transport.written.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [b"200", b"200", b"400"]
    assert transport.written.endswith(b"<eof>")
    assert [path for path, _, _ in application.seen] == ["/a", "/w"]


async def test_late_head_waits_for_its_turn(connection: Connection, application: Application) -> None:
    """Half a head behind a request that takes long does not answer that request."""
    connected, transport, timers = connection
    connected.data_received(_post("/a") + b"POST /b HT")
    await _settle()
    assert timers.fire(protocol.HEAD_WITHIN_S) == 1
    assert transport.written == b""
    application.may_answer.set()
    await _settle()
    assert [part[:3] for part in transport.written.split(b"HTTP/1.1 ")[1:]] == [b"200", b"408"]


async def test_bad_body_ends_its_own_request(connection: Connection, application: Application) -> None:
    """A request whose body can't be read is refused at once, and the application told that nothing more comes."""
    connected, transport, _ = connection
    connected.data_received(_chunked("/a", b"x").replace(b"\r\n1\r\n", b"\r\n?\r\n"))
    await _settle()
    assert transport.written.startswith(b"HTTP/1.1 400 ")
    assert application.left == ["/a"]


async def test_head_behind_a_large_body_is_no_large_head(connection: Connection, application: Application) -> None:
    """Bytes of a body that came in the same packet do not count against the next request's head."""
    connected, transport, _ = connection
    connected.data_received(_post("/a", b"x" * 200_000) + b"POST /b HTTP/1.1\r\nhost: x\r\ncontent-")
    connected.data_received(b"length: 0\r\n\r\n")
    application.may_answer.set()
    await _settle()
    assert [path for path, _, _ in application.seen] == ["/a", "/b"]
    assert b"431" not in transport.written


# upgrades and trailers ---------------------------------------------------------------------------------------------------

H2C = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk")


@pytest.mark.parametrize("size", [1, 7, 100_000])
async def test_upgrade_is_ignored(connection: Connection, application: Application, size: int) -> None:
    """A request that offers another protocol is served as it is, body and all, and so are those behind it."""
    connected, _, _ = connection
    sent = _post("/a", b"hello", *H2C) + _chunked("/b", b"he", b"llo").replace(
        b"host: x", b"\r\n".join([b"host: x", *map(str.encode, H2C)])
    )
    sent += b"GET /c HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n" + _post("/d", b"last")
    application.may_answer.set()
    for start in range(0, len(sent), size):
        connected.data_received(sent[start : start + size])
    await _settle()
    assert [(path, body) for path, body, _ in application.seen] == [
        ("/a", b"hello"), ("/b", b"hello"), ("/c", b""), ("/d", b"last"),
    ]  # fmt: skip
    assert application.seen[0][2][b"upgrade"] == b"h2c"
    assert application.seen[2][2][b"upgrade"] == b"websocket"


async def test_upgrade_hides_no_bad_framing(connection: Connection) -> None:
    """A head that asks for an upgrade is held to the same rules as any."""
    connected, transport, _ = connection
    connected.data_received(_post("/a", b"hello", *H2C, "transfer-encoding: chunked"))
    await _settle()
    assert transport.written.startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("size", [1, 100_000])
async def test_trailers_are_dropped(connection: Connection, application: Application, size: int) -> None:
    """A trailer is no header, and what follows it is the next request."""
    connected, _, _ = connection
    sent = _chunked("/a", b"x", trailers=b"authorization: Bearer sg-x\r\nhost: y\r\nupgrade: h2c\r\n") + _post(
        "/b", b"y", "kept: 1"
    )
    application.may_answer.set()
    for start in range(0, len(sent), size):
        connected.data_received(sent[start : start + size])
    await _settle()
    assert [(path, body) for path, body, _ in application.seen] == [("/a", b"x"), ("/b", b"y")]
    assert application.seen[0][2] == {b"host": b"x", b"transfer-encoding": b"chunked"}
    assert application.seen[1][2][b"kept"] == b"1"


TRAILERS = [
    pytest.param(b"a: b\r\n" * 200, id="many"),
    pytest.param(b"a: " + b"b" * 70_000 + b"\r\n", id="long"),
    pytest.param(b"a: " + b"b" * 200_000, id="endless"),
]


@pytest.mark.parametrize("trailers", TRAILERS)
async def test_trailers_are_bounded(connection: Connection, application: Application, trailers: bytes) -> None:
    """Too many trailers, or too long ones, are refused like headers, and the request they belong to with them."""
    connected, transport, _ = connection
    connected.data_received(_chunked("/a", b"x" * 100_000, trailers=trailers))
    await _settle()
    assert transport.written.startswith(b"HTTP/1.1 431 ")
    assert application.left == ["/a"]
    assert application.seen == []


HOSTS = [
    pytest.param(b"HTTP/1.1\r\nhost: x", True, id="one"),
    pytest.param(b"HTTP/1.1\r\nhost:", True, id="empty"),
    pytest.param(b"HTTP/1.1\r\nhost: x\r\nHOST: x", False, id="two"),
    pytest.param(b"HTTP/1.1\r\na: b", False, id="none"),
    pytest.param(b"HTTP/1.0\r\na: b", True, id="none in 1.0"),
    pytest.param(b"HTTP/1.0\r\nhost: x\r\nhost: y", False, id="two in 1.0"),
    pytest.param(b"HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c", False, id="none with an upgrade"),
]


@pytest.mark.parametrize(("rest", "is_served"), HOSTS)
async def test_one_host(connection: Connection, application: Application, rest: bytes, is_served: bool) -> None:
    """A request names one host; only one of HTTP/1.0 may name none (RFC 9112, 3.2)."""
    connected, transport, _ = connection
    connected.data_received(b"GET /a " + rest + b"\r\n\r\n")
    await _settle()
    assert len(application.seen) == is_served
    assert transport.written.startswith(b"HTTP/1.1 400 ") is not is_served


async def test_connect_is_refused(connection: Connection, application: Application) -> None:
    """A tunnel is asked for in vain."""
    connected, transport, _ = connection
    connected.data_received(b"CONNECT x:443 HTTP/1.1\r\nhost: x\r\n\r\nhello")
    await _settle()
    assert transport.written.startswith(b"HTTP/1.1 400 ")
    assert application.seen == []
