"""Which headers cross the gateway, in either direction. Values are never read here but for the names in ``Connection``.

Hop-by-hop headers end at each hop; credentials and cookies belong to one side; rate-limit headers of the upstream speak of the
gateway's account, not of the tenant's, and are replaced by the gateway's own.
"""

from __future__ import annotations

from collections.abc import Iterable

RawHeaders = list[tuple[bytes, bytes]]

_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"trailers",
        b"transfer-encoding",
        b"upgrade",
    }
)
_NOT_UPSTREAM = _HOP_BY_HOP | {
    b"host",
    b"content-length",
    b"expect",
    b"authorization",
    b"api-key",
    b"x-api-key",
    b"cookie",
    b"openai-organization",  # these choose an account of the client's, and the key is the gateway's
    b"openai-project",
    b"accept-encoding",  # answers must be readable for metering
    b"forwarded",
    b"x-http-method-override",  # would turn the request into one that was not admitted
    b"x-http-method",
    b"x-method-override",
    b"x-forwarded-for",
    b"x-forwarded-host",
    b"x-forwarded-proto",
    b"x-forwarded-port",
    b"x-real-ip",
}
_NOT_DOWNSTREAM = _HOP_BY_HOP | {
    b"set-cookie",
    b"www-authenticate",  # how the upstream knows us
    b"alt-svc",  # would send clients past the gateway
    b"strict-transport-security",
    b"openai-organization",  # the account behind the gateway's key
    b"openai-project",
    b"x-request-id",
    b"x-should-retry",
    b"x-accel-buffering",
}
_OWN_PREFIX = b"x-sluicegate-"
_RATE_LIMIT_PREFIX = b"x-ratelimit-"


def _named_in_connection(headers: Iterable[tuple[bytes, bytes]]) -> frozenset[bytes]:
    values = [value for name, value in headers if name.lower() == b"connection"]
    return frozenset(token.strip().lower() for value in values for token in value.split(b","))


def to_upstream(headers: RawHeaders, *, secret: str) -> RawHeaders:
    """The client's headers as the upstream gets them, with the gateway's key. Framing and Host are the transport's."""
    dropped = _NOT_UPSTREAM | _named_in_connection(headers)
    kept = [(name, value) for name, value in headers if name.lower() not in dropped and not name.lower().startswith(_OWN_PREFIX)]
    kept.append((b"authorization", b"Bearer " + secret.encode("ascii")))
    kept.append((b"accept-encoding", b"identity"))
    return kept


def to_client(headers: RawHeaders, *, is_length_kept: bool) -> RawHeaders:
    """The upstream's headers as the client gets them. ``is_length_kept``: the body goes out as it came in.

    The upstream's request id stays visible under ``x-upstream-request-id``: its support asks for it.
    """
    dropped = _NOT_DOWNSTREAM | _named_in_connection(headers)
    if not is_length_kept:
        dropped |= {b"content-length"}
    kept: RawHeaders = []
    for raw_name, value in headers:
        name = raw_name.lower()
        if name == b"x-request-id":
            kept.append((b"x-upstream-request-id", value))
        elif name not in dropped and not name.startswith(_RATE_LIMIT_PREFIX):
            kept.append((name, value))
    return kept


def first(headers: RawHeaders, name: bytes) -> bytes | None:
    """The first value of ``name`` (lower case), or None."""
    return next((value for found, value in headers if found.lower() == name), None)


def media_type(headers: RawHeaders) -> str:
    """The content type without parameters, in lower case; empty where there is none."""
    value = first(headers, b"content-type") or b""
    return value.split(b";")[0].strip().lower().decode("latin-1")
