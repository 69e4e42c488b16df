"""Gateway: the story of one request, top to bottom. Read ``handle`` first.

Decides the order of things and nothing else: what a body asks for is read in ``forwarding/body.py``, whether it may go now is
the limiter's decision, which key it takes the pool's, how bytes travel the forwarder's, and how errors look ``api/errors.py``'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from proxy.clock import Clock
from proxy.errors import InvalidRequest, LimitExceeded, ModelNotFound, UnsupportedMediaType, UpstreamFault
from proxy.forwarding import headers
from proxy.forwarding.body import JsonBody, read_json_body
from proxy.forwarding.forwarder import Answer, Forwarder, Outgoing
from proxy.forwarding.headers import RawHeaders
from proxy.limits.costs import Ask
from proxy.limits.decisions import go_duration
from proxy.limits.limiter import Limiter
from proxy.limits.model import Decision, Spent, Unit
from proxy.limits.reservations import Refusal, Reservation
from proxy.limits.settling import Booking
from proxy.tenants import Tenant
from proxy.tokens.estimate import NOTHING, Estimate, estimate
from proxy.tokens.usage import Ending, Usage, booking
from proxy.upstreams.model import ModelRoute
from proxy.upstreams.pool import KeyPool, Lease

# The members of a request body that decide something here: two of the same name would let client and upstream differ.
READ_MEMBERS = frozenset(
    {"model", "stream", "stream_options", "n", "best_of", "max_tokens", "max_completion_tokens", "max_output_tokens"}
    | {"messages", "prompt", "input", "instructions", "tools", "functions", "response_format", "text"}
)
WITH_STREAM_OPTIONS = frozenset({"/chat/completions", "/completions"})
NEEDS_MODEL = frozenset({"/chat/completions", "/completions", "/embeddings"})
OTHER_MODEL = "other"  # label of whatever is not configured


@dataclass(slots=True)
class Call:
    """One request as it came in, and what was found out about it on the way. Times are the clock's monotonic seconds."""

    request_id: str
    method: str
    path: str  # below /v1, such as /chat/completions
    query: bytes
    headers: RawHeaders
    body: bytes
    tenant: Tenant
    started: float

    model: str = ""
    upstream: str = ""
    upstream_key: str = ""
    decisions: Sequence[Decision] = ()
    refused_by: str = ""
    estimate: Estimate = NOTHING
    usage: Usage | None = None
    ending: Ending | None = None
    upstream_fault: str = ""
    upstream_started: float | None = None
    upstream_ended: float | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks for."""

    body: JsonBody | None
    model: str | None
    is_stream: bool
    wants_usage: bool


@dataclass(slots=True)
class Gateway:
    """Everything that one request needs, put together by ``app.py``."""

    models: Mapping[str, ModelRoute]
    default_upstream: str
    limiter: Limiter
    pool: KeyPool
    forwarder: Forwarder
    clock: Clock = field(repr=False)

    async def handle(self, call: Call) -> Answer:
        """Serve one request. Raises ProxyError; the answer must be closed by the caller, whatever becomes of it."""
        asked = self._read(call)
        route = self._route(call, asked)
        reservation = await self._reserve(call, asked)
        try:
            outgoing = self._prepare(call, asked, route)
            lease = self.pool.lease(route.upstream if route else self.default_upstream)
        except BaseException:
            reservation.release()
            raise
        return await self._forward(call, reservation, lease, outgoing)

    def models_of(self, tenant: Tenant) -> list[str]:
        """The public names of the models that a tenant may use."""
        return [name for name in self.models if tenant.may_use(name)]

    # what does it ask for? ----------------------------------------------------------------------------------------------

    def _read(self, call: Call) -> Asked:
        if not call.body and not (call.method == "POST" and call.path in NEEDS_MODEL):
            return Asked(None, None, is_stream=False, wants_usage=False)
        self._refuse_unreadable(call)
        body = read_json_body(call.body, read_members=READ_MEMBERS)
        model = body.string("model")
        if model is None and call.path in NEEDS_MODEL:
            raise InvalidRequest("you must provide a model parameter", param="model")
        options = body.mapping("stream_options") or {}
        call.estimate = estimate(call.path, body.members) if model or call.path.startswith("/responses") else NOTHING
        return Asked(body, model, body.boolean("stream"), wants_usage=bytes(options.get("include_usage", b"")) == b"true")

    def _refuse_unreadable(self, call: Call) -> None:
        for name in (b"content-type", b"content-encoding"):
            if sum(found == name for found, _ in call.headers) > 1:
                raise InvalidRequest(f"There are several {name.decode()} headers: expected one.")
        encoding = headers.first(call.headers, b"content-encoding")
        if encoding is not None and encoding.lower() != b"identity":
            raise UnsupportedMediaType("Compressed request bodies are not supported: send the body without Content-Encoding.")
        kind = headers.media_type(call.headers)
        if kind.startswith("multipart/"):
            raise UnsupportedMediaType("Multipart bodies are not supported yet: the model in one could not be held to its limits.")

    # where does it go? --------------------------------------------------------------------------------------------------

    def _route(self, call: Call, asked: Asked) -> ModelRoute | None:
        if asked.model is None:
            return None
        route = self.models.get(asked.model)
        call.model = route.name if route else OTHER_MODEL
        if route is None or not call.tenant.may_use(asked.model):
            shown = asked.model[:100].encode("utf-8", "replace").decode()
            raise ModelNotFound(f"The model `{shown}` does not exist or you do not have access to it.", param="model")
        return route

    # may it go now? -----------------------------------------------------------------------------------------------------

    async def _reserve(self, call: Call, asked: Asked) -> Reservation:
        expected = call.estimate
        ask = Ask(expected.prompt_tokens, expected.completion_tokens, expected.is_completion_stated)
        reserved = await self.limiter.reserve(call.tenant.limits_for(asked.model), ask)
        call.decisions = reserved.decisions
        if isinstance(reserved, Refusal):
            call.refused_by = reserved.refuser.limit.name
            raise _refused(reserved.refuser, call, asked.model)
        return reserved

    # what is sent? ------------------------------------------------------------------------------------------------------

    def _prepare(self, call: Call, asked: Asked, route: ModelRoute | None) -> Outgoing:
        if asked.body is None:
            return Outgoing(call.method, call.path, call.query, call.headers, call.body or None, hides_usage=False)
        changes = {}
        if route is not None and route.upstream_model != route.name:
            changes["model"] = msgspec.json.encode(route.upstream_model)
        hides_usage = asked.is_stream and not asked.wants_usage and call.path in WITH_STREAM_OPTIONS
        if hides_usage:
            changes["stream_options"] = _with_usage(asked.body)
        return Outgoing(call.method, call.path, call.query, call.headers, asked.body.with_members(changes), hides_usage)

    # and what becomes of it? --------------------------------------------------------------------------------------------

    async def _forward(self, call: Call, reservation: Reservation, lease: Lease, outgoing: Outgoing) -> Answer:
        call.upstream, call.upstream_key = lease.upstream.name, lease.key.id
        call.upstream_started = self.clock.monotonic()

        def book(ending: Ending, usage: Usage | None, counted_tokens: int) -> Booking | None:
            call.upstream_ended = self.clock.monotonic()
            call.ending, call.usage = ending, usage
            end = booking(ending, usage=usage, prompt_tokens=call.estimate.prompt_tokens, counted_tokens=counted_tokens)
            used = end.usage
            spent = Spent(used.input_tokens, used.output_tokens, used.total_tokens) if used is not None else None
            return reservation.settle(spent, is_request_kept=end.is_request_kept)

        try:
            answer = await self.forwarder.send(lease, outgoing, book)
        except UpstreamFault as fault:
            call.upstream_fault = fault.fault
            raise
        if answer.status == 429 or answer.status >= 500:
            call.upstream_fault = f"status_{answer.status // 100}xx" if answer.status != 429 else "status_429"
        return answer


def _with_usage(body: JsonBody) -> bytes:
    """The client's ``stream_options`` with ``include_usage`` switched on, its other members kept."""
    options = {**(body.mapping("stream_options") or {}), "include_usage": True}
    return msgspec.json.encode(options)


_UNIT_NAMES = {
    Unit.REQUESTS: ("requests", "RP", "requests"),
    Unit.TOKENS: ("tokens", "TP", "tokens"),
    Unit.INPUT_TOKENS: ("input tokens", "ITP", "tokens"),
    Unit.OUTPUT_TOKENS: ("output tokens", "OTP", "tokens"),
    Unit.CONCURRENCY: ("concurrent requests", "", "requests"),
}  # as a person says it, in short, and as OpenAI's error type


def _refused(decision: Decision, call: Call, model: str | None) -> LimitExceeded:
    """The refusal in OpenAI's words, which clients parse; with the name of our limit."""
    limit = decision.limit
    unit, short, error_type = _UNIT_NAMES[limit.unit]
    where = f"for {model} in tenant {call.tenant.id}" if model else f"in tenant {call.tenant.id}"
    on = f"on limit {limit.name}, {unit}"
    if limit.rate is not None:
        period = limit.rate.period_name
        on += f" per {period} ({short}{period[0].upper()})"
    if decision.retry_after is None:
        what = "Request too large" if limit.capacity else "Blocked"
        text = f"{what} {where} {on}: Limit {limit.capacity}, Requested {decision.requested}. It can never be admitted as it is."
    else:
        text = (
            f"Rate limit reached {where} {on}: Limit {limit.capacity}, Used {max(0, decision.used)}, "
            f"Requested {decision.requested}. Please try again in {go_duration(decision.retry_after)}."
        )
    is_soon = decision.retry_after is not None and decision.retry_after <= 60
    return LimitExceeded(
        text,
        unit=error_type,
        limit_name=limit.name,
        retry_after=decision.retry_after,
        should_retry=None if is_soon else False,
    )
