"""The only place that renders errors: as a whole answer in OpenAI's shape, or as the last events of a stream.

What went wrong, and how to treat it, is decided where the error is raised.
"""

from __future__ import annotations

import math

import msgspec

from proxy.errors import ProxyError
from proxy.forwarding.headers import RawHeaders

SDK_LONGEST_WAIT_S = 60  # what every SDK sleeps as told; beyond it some come back at once


def body_of(error: ProxyError) -> bytes:
    """``{"error": {message, type, param, code}}``: all four members, always."""
    return msgspec.json.encode({"error": _members(error)})


def headers_of(error: ProxyError) -> RawHeaders:
    """Headers that tell a client when to come back: ``retry-after`` is whole seconds, at least 1."""
    found: RawHeaders = [(b"content-type", b"application/json")]
    if error.retry_after is not None:
        found.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after))))
        found.append((b"retry-after-ms", b"%d" % max(1, math.ceil(error.retry_after * 1000))))
    should_retry = error.should_retry
    if should_retry is None and error.retry_after is not None and error.retry_after > SDK_LONGEST_WAIT_S:
        should_retry = False
    if should_retry is not None:
        found.append((b"x-should-retry", b"true" if should_retry else b"false"))
    return found


def in_stream(error: ProxyError, endpoint: str) -> bytes:
    """The events that end a stream which has begun, so that every SDK raises instead of taking half for whole.

    Responses streams carry flat members and a nested ``error``: different SDKs look at different ones.
    """
    if endpoint == "/responses":
        event = {**_members(error), "type": "error", "sequence_number": 0, "error": _members(error)}
        return b"event: error\ndata: " + msgspec.json.encode(event) + b"\n\n"
    return b"data: " + body_of(error) + b"\n\ndata: [DONE]\n\n"


def _members(error: ProxyError) -> dict[str, str | None]:
    message = error.message.encode("utf-8", "replace").decode()
    return {"message": message, "type": error.error_type, "param": error.param, "code": error.error_code}
