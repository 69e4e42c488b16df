"""``/v1/*`` on the data port: one raw ASGI endpoint between the server and the gateway.

It reads and bounds the body, finds the tenant, watches for a client that leaves, relays the answer, and hands the fact of every
request to the metrics and the log. Everything that is decided about a request is decided in ``gateway.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from proxy.api import errors, rate_headers
from proxy.api.auth import authenticate
from proxy.api.paths import OTHER_ENDPOINT, label_of, path_below_v1
from proxy.clock import Clock
from proxy.errors import (
    BodyTooLarge,
    ClientGone,
    Draining,
    InternalError,
    InvalidApiKey,
    LimitExceeded,
    ModelNotFound,
    ProxyError,
    RequestFault,
    RequestTimeout,
    UpgradeRefused,
    UpstreamFault,
)
from proxy.forwarding import headers
from proxy.forwarding.forwarder import Answer
from proxy.forwarding.headers import RawHeaders
from proxy.gateway import Call, Gateway
from proxy.logs import logger
from proxy.metrics import Metrics, RequestFact
from proxy.tenants import Tenant, TenantDirectory

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

BODY_PAUSE_S = 30.0  # between two pieces of a request body
READER_PAUSE_S = 60.0  # how long a client may leave what was sent unread before it counts as gone
LINGER_S = 2.0  # how long a body that was refused for its size is still taken in, so that the sender gets to read the answer
CLIENT_GONE_STATUS = 499


@dataclass(slots=True, eq=False)
class Exchange:
    """One request on its connection: what has gone out already, and why it was cut, if it was."""

    request_id: str
    started: float
    receive: Receive
    send: Send
    task: asyncio.Task[Any]
    endpoint: str = OTHER_ENDPOINT
    tenant: Tenant | None = None
    call: Call | None = None
    status: int = 0
    is_stream: bool = False
    first_byte_at: float | None = None
    error: BaseException | None = None
    cut: ProxyError | ClientGone | None = field(default=None)

    def end(self, why: ProxyError | ClientGone) -> None:
        """Cut the request short, wherever it is."""
        if self.cut is None:
            self.cut = why
            self.task.cancel()


class OpenAIEndpoint:
    """The ASGI application mounted at ``/v1``."""

    def __init__(self, gateway: Gateway, tenants: TenantDirectory, metrics: Metrics, clock: Clock, *, max_body_bytes: int) -> None:
        self._gateway = gateway
        self._tenants = tenants
        self._metrics = metrics
        self._clock = clock
        self._max_body_bytes = max_body_bytes
        self._log = logger("requests")
        self._open: set[Exchange] = set()
        self._started_unix = int(clock.unix())

    def end_all(self) -> None:
        """End what is still open: streams by an in-stream error, the rest by 503."""
        for exchange in list(self._open):
            exchange.end(Draining("The gateway is shutting down. Please try again.", retry_after=1.0))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        task = asyncio.current_task()
        assert task is not None  # noqa: S101  (an ASGI server runs every request in a task)
        request_id = "req_" + self._clock.token(16)
        exchange = Exchange(request_id, self._clock.monotonic(), receive, send, task)
        self._open.add(exchange)
        self._metrics.in_flight.inc()
        try:
            await self._serve(exchange, scope)
        finally:
            self._open.discard(exchange)
            self._metrics.in_flight.dec()
            self._record(exchange, scope["method"])

    async def _serve(self, exchange: Exchange, scope: Scope) -> None:
        try:
            await self._answer(exchange, scope)
        except asyncio.CancelledError:
            if exchange.cut is None:
                raise  # not ours: the loop itself is closing
            exchange.task.uncancel()
            await self._fail(exchange, exchange.cut)
        except (ProxyError, ClientGone) as error:
            await self._fail(exchange, error)
        except Exception as error:  # noqa: BLE001  (the last line: a bug must not reach the client as a traceback)
            self._log.error("request_failed", request_id=exchange.request_id, exc_info=error)
            await self._fail(exchange, InternalError())

    async def _answer(self, exchange: Exchange, scope: Scope) -> None:
        path = path_below_v1(scope["raw_path"])
        exchange.endpoint = label_of(path)
        request_headers: RawHeaders = scope["headers"]
        if (headers.first(request_headers, b"upgrade") or b"").lower() == b"websocket":
            raise UpgradeRefused("WebSocket is not offered here: use plain HTTP requests.")
        exchange.tenant = authenticate(request_headers, self._tenants)
        body = await self._read_body(request_headers, exchange.receive)
        if exchange.endpoint == "models" and scope["method"] in ("GET", "HEAD"):
            await self._send_models(exchange, path)
            return
        exchange.call = Call(
            request_id=exchange.request_id,
            method=scope["method"],
            path=path,
            query=scope["query_string"],
            headers=request_headers,
            body=body,
            tenant=exchange.tenant,
            started=exchange.started,
        )
        watcher = asyncio.create_task(_watch(exchange))
        try:
            answer = await self._gateway.handle(exchange.call)
            try:
                await self._relay(exchange, answer)
            finally:
                answer.close()
        finally:
            watcher.cancel()

    async def _read_body(self, request_headers: RawHeaders, receive: Receive) -> bytes:
        declared = headers.first(request_headers, b"content-length")
        if declared is not None and declared.isdigit() and int(declared) > self._max_body_bytes:
            raise self._too_large()
        pieces: list[bytes] = []
        size_bytes = 0
        while True:
            try:
                async with asyncio.timeout(BODY_PAUSE_S):
                    message = await receive()
            except TimeoutError:
                raise RequestTimeout("The request body did not arrive in time.") from None
            if message["type"] == "http.disconnect":
                raise ClientGone
            piece = message.get("body", b"")
            size_bytes += len(piece)
            if size_bytes > self._max_body_bytes:
                raise self._too_large()
            pieces.append(piece)
            if not message.get("more_body", False):
                return b"".join(pieces)

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"The request body exceeds the maximum of {self._max_body_bytes} bytes.")

    # answering ----------------------------------------------------------------------------------------------------------

    async def _start(self, exchange: Exchange, status: int, answer_headers: RawHeaders) -> None:
        exchange.status = status
        own = [(b"x-request-id", exchange.request_id.encode("ascii"))]
        if exchange.call is not None:
            own += rate_headers.of(exchange.call.decisions)
        await exchange.send({"type": "http.response.start", "status": status, "headers": [*answer_headers, *own]})

    async def _relay(self, exchange: Exchange, answer: Answer) -> None:
        exchange.is_stream = answer.is_stream
        if answer.is_stream:
            self._metrics.open_streams.inc()
        try:
            await self._start(exchange, answer.status, answer.headers)
            async for chunk in answer.chunks():
                if exchange.first_byte_at is None:
                    exchange.first_byte_at = self._clock.monotonic()
                try:
                    async with asyncio.timeout(READER_PAUSE_S):
                        await exchange.send({"type": "http.response.body", "body": chunk, "more_body": True})
                except TimeoutError:
                    raise ClientGone from None  # it is there, but has stopped reading
                await asyncio.sleep(0)  # an upstream that is always ahead must leave others their turn
            await exchange.send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            if answer.is_stream:
                self._metrics.open_streams.dec()

    async def _send_models(self, exchange: Exchange, path: str) -> None:
        assert exchange.tenant is not None  # noqa: S101  (authenticated before)
        wanted = path.removeprefix("/models").removeprefix("/")
        known = [
            {"id": name, "object": "model", "created": self._started_unix, "owned_by": "sluicegate"}
            for name in self._gateway.models_of(exchange.tenant)
        ]
        if wanted:
            known = [model for model in known if model["id"] == wanted]
            if not known:
                raise ModelNotFound(f"The model `{wanted[:100]}` does not exist or you do not have access to it.", param="model")
        content: object = known[0] if wanted else {"object": "list", "data": known}
        await self._send_whole(exchange, 200, [(b"content-type", b"application/json")], msgspec.json.encode(content))

    async def _send_whole(self, exchange: Exchange, status: int, answer_headers: RawHeaders, body: bytes) -> None:
        await self._start(exchange, status, [*answer_headers, (b"content-length", b"%d" % len(body))])
        await exchange.send({"type": "http.response.body", "body": body, "more_body": False})

    async def _fail(self, exchange: Exchange, error: ProxyError | ClientGone) -> None:
        exchange.error = error
        if isinstance(error, ClientGone):
            return
        if exchange.status == 0:
            await self._send_error(exchange, error)
        elif exchange.is_stream and exchange.call is not None:
            events = errors.in_stream(error, exchange.call.path)
            await exchange.send({"type": "http.response.body", "body": events, "more_body": True})
            await exchange.send({"type": "http.response.body", "body": b"", "more_body": False})
        # Else a plain body is cut: returning now makes the server close the connection, which no client takes for the end.

    async def _send_error(self, exchange: Exchange, error: ProxyError) -> None:
        body = errors.body_of(error)
        found = errors.headers_of(error)
        if isinstance(error, BodyTooLarge | RequestTimeout | Draining):
            found.append((b"connection", b"close"))
        await self._start(exchange, error.status, [*found, (b"content-length", b"%d" % len(body))])
        await exchange.send({"type": "http.response.body", "body": body, "more_body": True})
        if isinstance(error, BodyTooLarge):
            await _discard_body(exchange.receive)
        await exchange.send({"type": "http.response.body", "body": b"", "more_body": False})

    # the fact of it -----------------------------------------------------------------------------------------------------

    def _record(self, exchange: Exchange, method: str) -> None:
        fact = _fact_of(exchange, self._clock.monotonic())
        self._metrics.record(fact)
        call = exchange.call
        self._log.info(
            "request",
            request_id=exchange.request_id,
            tenant=fact.tenant,
            method=method,
            endpoint=fact.endpoint,
            model=fact.model,
            upstream=fact.upstream,
            upstream_key=fact.upstream_key,
            status=fact.status,
            outcome=fact.outcome,
            stream=fact.is_stream,
            estimated_tokens=call.estimate.total_tokens if call else 0,
            input_tokens=fact.input_tokens,
            output_tokens=fact.output_tokens,
            duration_ms=round(fact.duration * 1000, 2),
            **({"refused_by": fact.refused_by} if fact.refused_by else {}),
            **({"upstream_fault": fact.upstream_fault} if fact.upstream_fault else {}),
        )


async def _watch(exchange: Exchange) -> None:
    while (await exchange.receive())["type"] != "http.disconnect":
        continue
    exchange.end(ClientGone())


async def _discard_body(receive: Receive) -> None:
    """Take in what is still sent, for a while: closing with input unread would reset the connection and lose the answer."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while (message := await receive())["type"] == "http.request" and message.get("more_body", False):
                continue


def _outcome(exchange: Exchange) -> str:  # noqa: PLR0911  (a table)
    error = exchange.error
    if isinstance(error, ClientGone):
        return "client_abort"
    if isinstance(error, InvalidApiKey):
        return "denied_auth"
    if isinstance(error, LimitExceeded):
        return "denied_limit"
    if isinstance(error, UpstreamFault) or (exchange.call and exchange.call.upstream_fault):
        return "upstream_error"
    if isinstance(error, RequestFault):
        return "client_error"
    if error is not None or exchange.status == 0:
        return "internal_error"
    return "client_error" if exchange.status >= 400 else "ok"


def _fact_of(exchange: Exchange, now: float) -> RequestFact:
    call, error = exchange.call, exchange.error
    fault = call.upstream_fault if call else ""
    if isinstance(error, UpstreamFault):
        fault = error.fault
    upstream_duration = None
    if call and call.upstream_started is not None:
        upstream_duration = (call.upstream_ended or now) - call.upstream_started
    usage = call.usage if call else None
    return RequestFact(
        tenant=exchange.tenant.id if exchange.tenant else "",
        model=call.model if call else "",
        endpoint=exchange.endpoint,
        upstream=call.upstream if call else "",
        upstream_key=call.upstream_key if call else "",
        status=CLIENT_GONE_STATUS if isinstance(error, ClientGone) else exchange.status or 500,
        outcome=_outcome(exchange),
        is_stream=exchange.is_stream,
        duration=now - exchange.started,
        overhead=call.upstream_started - exchange.started if call and call.upstream_started is not None else None,
        upstream_duration=upstream_duration,
        first_byte_after=exchange.first_byte_at - exchange.started if exchange.first_byte_at is not None else None,
        input_tokens=usage.input_tokens if usage else 0,
        output_tokens=usage.output_tokens if usage else 0,
        refused_by=call.refused_by if call else "",
        exceeded_shadows=tuple(decision.limit.name for decision in call.decisions if decision.would_refuse) if call else (),
        upstream_fault=fault,
        is_estimate_guessed=bool(call and call.estimate.is_guess_of_size),
    )
