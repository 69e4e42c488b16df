"""The simulated upstream as an ASGI application: who may ask, which script applies, what is logged.

What answers contain is left to ``answers.py``, how they are sent to ``exchange.py``, and sockets to ``server.py``.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import replace
from email.utils import formatdate
from typing import TYPE_CHECKING, Any

import msgspec

from proxy.simulator import answers
from proxy.simulator.exchange import ClientLeft, ConnectionCut, Exchange, Gates, Performance
from proxy.simulator.journal import Journal, Seen, key_id_of
from proxy.simulator.reply import Refusal, Reply, error_body, no_key, scripted_error, wrong_key
from proxy.simulator.script import NOTHING, Script, ScriptError
from proxy.simulator.wording import Facts

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import Receive, Scope, Send

    from proxy.clock import Clock

_SECRET_HEADERS = frozenset({b"authorization", b"api-key", b"x-api-key"})
_REDACTED = b"[redacted]"
_FIXED_HEADERS = (
    (b"server", b"cloudflare"),
    (b"openai-organization", b"org-simulated"),
    (b"openai-version", b"2020-10-01"),
    (b"x-ratelimit-limit-requests", b"10000"),
    (b"x-ratelimit-limit-tokens", b"2000000"),
    (b"x-ratelimit-remaining-requests", b"9999"),
    (b"x-ratelimit-remaining-tokens", b"1999956"),
    (b"x-ratelimit-reset-requests", b"6ms"),
    (b"x-ratelimit-reset-tokens", b"1ms"),
    (b"access-control-expose-headers", b"X-Request-ID"),
    (b"strict-transport-security", b"max-age=31536000; includeSubDomains; preload"),
    (b"x-content-type-options", b"nosniff"),
    (b"cf-ray", b"0000000000000000-SIM"),
    (b"set-cookie", b"__cf_bm=simulated; path=/; HttpOnly; Secure; SameSite=None"),
)


class _Scripts:
    """What was scripted for one key: the next requests first, then all others."""

    __slots__ = ("standing", "timed")

    def __init__(self, standing: Script = NOTHING) -> None:
        self.standing = standing
        self.timed: deque[tuple[Script, int]] = deque()

    def set(self, script: Script, times: int | None) -> None:
        if times is None:
            self.standing = script
            self.timed.clear()
        elif times > 0:
            self.timed.append((script, times))

    def take(self) -> Script:
        """The script for the next request."""
        if not self.timed:
            return self.standing
        script, times = self.timed.popleft()
        if times > 1:
            self.timed.appendleft((script, times - 1))
        return script.over(self.standing)


class Simulator:
    """A simulated OpenAI. Serve it with ``RunningSimulator``, or hand it to any ASGI server.

    Scripts come, from the least specific to the most, from ``default_script``, from ``script_key`` and from the
    request header ``x-sim-script``, and are merged field by field. ``keys`` are the only keys accepted; None accepts
    all. A simulator belongs to one event loop.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        default_script: Script = NOTHING,
        keys: frozenset[str] | None = None,
        keep_bodies: bool = True,
    ) -> None:
        self._clock = clock
        self._default = _Scripts(default_script)
        self._by_key: dict[str, _Scripts] = {}
        self._allowed = None if keys is None else frozenset(map(key_id_of, keys))
        self._keep_bodies = keep_bodies
        self._journal = Journal()
        self._gates = Gates()
        self._count = 0
        self._boot = clock.token(8)
        self._date = (-1, b"")

    @property
    def log(self) -> list[Seen]:
        """The requests so far, oldest first: at most the last 100,000."""
        return self._journal.entries

    def clear_log(self) -> None:
        """Forget the requests so far."""
        self._journal.clear()

    async def wait_for(self, predicate: Callable[[list[Seen]], bool], timeout_s: float = 5.0) -> list[Seen]:
        """Wait until the log satisfies the predicate, and return it. Raises TimeoutError."""
        return await self._journal.wait_for(predicate, timeout_s)

    def script_key(self, key: str | None, script: Script, times: int | None = None) -> None:
        """Script the next ``times`` requests of a key, or all of them; a key of None stands for every key.

        Scripts with ``times`` queue up, and each is laid over the one without, which replaces all that came before.
        """
        scripts = self._default if key is None else self._by_key.setdefault(key_id_of(key), _Scripts())
        scripts.set(script, times)

    def release(self, gate: str) -> None:
        """Open a gate for all that wait at it and all to come."""
        self._gates.release(gate)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application."""
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif scope["type"] == "http":
            exchange = Exchange(scope, receive, send)
            try:
                if scope["path"].startswith("/_sim/"):
                    await self._control(scope, exchange)
                else:
                    await self._serve(scope, exchange)
            finally:
                exchange.close()

    async def _serve(self, scope: Scope, exchange: Exchange) -> None:
        seen, key, header = self._see(scope)
        is_entered = False
        try:
            body = await exchange.read_body()
            if self._keep_bodies:
                seen.body = body
            script, reply = self._plan(scope, seen, body, key, header)
            self._journal.add(seen)
            is_entered = True
            performance = Performance(exchange, script, seen, self._journal, self._gates)
            await performance.before_headers()
            await performance.send(reply, self._headers(seen, script, reply))
        except ClientLeft:
            seen.disconnected = True
            seen.disconnected_at = self._clock.monotonic()
            if not is_entered:
                self._journal.add(seen)
        except ConnectionCut:
            seen.cut = True
            if not exchange.is_served:
                raise
        else:
            seen.finished = True
        self._journal.note()

    def _see(self, scope: Scope) -> tuple[Seen, str, bytes | None]:
        """The log entry without a key in it, the key (empty if none), and the script in the headers."""
        key, script, headers = "", None, []
        for name, value in scope["headers"]:
            if name == b"authorization":
                scheme, _, rest = value.decode("latin-1").partition(" ")
                key = rest.strip() if scheme.lower() == "bearer" else ""
            elif name == b"x-sim-script":
                script = value
            headers.append((name, _REDACTED if name in _SECRET_HEADERS else value))
        self._count += 1
        seen = Seen(
            number=self._count,
            method=scope["method"],
            path=(scope.get("raw_path") or scope["path"].encode()).decode("latin-1"),
            query=scope["query_string"].decode("latin-1"),
            key_id=key_id_of(key) if key else None,
            headers=headers,
            started_at=self._clock.monotonic(),
        )
        return seen, key, script

    def _plan(self, scope: Scope, seen: Seen, body: bytes, key: str, header: bytes | None) -> tuple[Script, Reply]:
        """What to answer and by which script; a request that is refused follows none."""
        path = scope["path"]
        try:
            script = self._script_for(self._admitted(path, seen, key), header)
            return script, self._answer(path, seen, body, key, script)
        except Refusal as refusal:
            return NOTHING, refusal.reply()
        except ScriptError as error:
            return NOTHING, Refusal(400, str(error), param="x-sim-script").reply()

    def _admitted(self, path: str, seen: Seen, key: str) -> str:
        """The id of the key, if it is accepted and the path is one of the API's."""
        if not path.startswith("/v1/"):
            raise Refusal(404, f"Unknown request URL: {seen.method} {seen.path}.", code="unknown_url")
        if seen.key_id is None:
            raise no_key()
        if self._allowed is not None and seen.key_id not in self._allowed:
            raise wrong_key(key)
        return seen.key_id

    def _script_for(self, key_id: str, header: bytes | None) -> Script:
        sent = NOTHING if header is None else Script.from_json(header)
        script = self._default.take()
        scripts = self._by_key.get(key_id)
        if scripts is not None:
            script = scripts.take().over(script)
        return script if header is None else sent.over(script)

    def _answer(self, path: str, seen: Seen, body: bytes, key: str, script: Script) -> Reply:
        make = answers.POSTS.get(path) if seen.method == "POST" else None
        payload: dict[str, Any] = {}
        if make is not None:
            payload = _parsed(body)
            model = payload.get("model")
            seen.model = model if isinstance(model, str) else None
        elif path.startswith("/v1/models/"):
            seen.model = path.removeprefix("/v1/models/")
        status = script.status or 200
        if script.raw_body is not None:
            content_type = (script.raw_content_type or "application/json").encode("latin-1")
            return Reply(script.raw_body, status, content_type, is_bare=True)
        if status >= 400:
            return scripted_error(script, status, model=seen.model, key=key)
        if make is not None:
            reply = make(payload, Facts(seen.number, int(self._clock.unix()), script))
        elif seen.method in {"GET", "HEAD"} and path == "/v1/models":
            reply = answers.list_models()
        elif seen.method in {"GET", "HEAD"} and seen.model:
            reply = answers.retrieve_model(seen.model)
        else:
            reply = answers.echo(seen.method, seen.path, seen.query)
        if status in {204, 304}:
            return Reply(status=status)
        return reply if status == 200 else replace(reply, status=status)

    def _headers(self, seen: Seen, script: Script, reply: Reply) -> list[tuple[bytes, bytes]]:
        headers = [(b"content-type", reply.content_type)]
        if reply.records is None and not reply.content_type.startswith(b"text/event-stream"):
            headers.append((b"content-length", b"%d" % len(reply.body)))
        if not reply.is_bare:
            spent_ms = (self._clock.monotonic() - seen.started_at) * 1000
            headers += [
                (b"date", self._date_header()),
                (b"x-request-id", f"req_{self._boot}{seen.number:016x}".encode()),
                (b"openai-processing-ms", b"%d" % max(1, spent_ms)),
                *_FIXED_HEADERS,
            ]
        if reply.headers:
            headers = _replaced(headers, reply.headers)
        if script.raw_headers is not None:
            given = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in script.raw_headers]
            headers = _replaced(headers, given)
        return headers

    def _date_header(self) -> bytes:
        second = int(self._clock.unix())
        if second != self._date[0]:
            self._date = (second, formatdate(second, usegmt=True).encode())
        return self._date[1]

    async def _control(self, scope: Scope, exchange: Exchange) -> None:
        try:
            body = await exchange.read_body()
            try:
                reply = self._controlled(scope["method"], scope["path"], body)
            except ScriptError as error:
                reply = Reply(error_body(str(error), "invalid_request_error", None), 400)
            except Refusal as refusal:
                reply = refusal.reply()
            length = b"%d" % len(reply.body)
            await exchange.start(reply.status, [(b"content-type", reply.content_type), (b"content-length", length)])
            await exchange.finish(reply.body)
        except ClientLeft:
            return

    def _controlled(self, method: str, path: str, body: bytes) -> Reply:
        match (method, path):
            case ("POST", "/_sim/script"):
                self._script_remotely(_parsed(body))
            case ("POST", "/_sim/release"):
                gate = _parsed(body).get("gate")
                if not isinstance(gate, str):
                    raise Refusal(400, "'gate' must be a string.", param="gate")
                self.release(gate)
            case ("GET", "/_sim/log"):
                return Reply(msgspec.json.encode({"log": [seen.document() for seen in self.log]}))
            case ("DELETE", "/_sim/log"):
                self.clear_log()
            case _:
                raise Refusal(404, f"Unknown request URL: {method} {path}.", code="unknown_url")
        return Reply(b'{"ok":true}')

    def _script_remotely(self, payload: dict[str, Any]) -> None:
        unknown = sorted(payload.keys() - {"key", "script", "times"})
        if unknown:
            raise Refusal(400, f"Unknown member {unknown[0]!r}. Known members: key, script, times.", param=unknown[0])
        key, times = payload.get("key"), payload.get("times")
        if key is not None and not (isinstance(key, str) and key):
            raise Refusal(400, "'key' must be a non-empty string or null.", param="key")
        if times is not None and (not isinstance(times, int) or isinstance(times, bool) or times < 1):
            raise Refusal(400, "'times' must be a whole number of at least 1, or null.", param="times")
        self.script_key(key, Script.from_document(payload.get("script", {})), times)


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        payload = json.loads(body)  # unlike msgspec it accepts half a surrogate pair, as OpenAI does
    except (ValueError, RecursionError):
        payload = None
    if not isinstance(payload, dict):
        raise Refusal(400, "We could not parse the JSON body of your request. The API expects a JSON payload that is an object.")
    return payload


def _replaced(
    headers: list[tuple[bytes, bytes]], given: list[tuple[bytes, bytes]] | tuple[tuple[bytes, bytes], ...]
) -> list[tuple[bytes, bytes]]:
    names = {name for name, _ in given}
    return [*(pair for pair in headers if pair[0] not in names), *given]


async def _live(receive: Receive, send: Send) -> None:
    """Nothing to start and nothing to stop, said in ASGI."""
    while True:
        message = await receive()
        await send({"type": message["type"] + ".complete"})
        if message["type"] == "lifespan.shutdown":
            return
