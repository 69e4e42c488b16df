"""How errors look to clients."""

from __future__ import annotations

import json

import pytest

from proxy import errors as faults
from proxy.api.errors import body_of, headers_of, in_stream
from proxy.errors import InternalError, InvalidRequest, LimitExceeded, ProxyError, StoreUnavailable
from proxy.forwarding.sse import SseSplitter, data_of


def refused(retry_after, should_retry=None):
    return LimitExceeded("Rate limit reached", unit="tokens", limit_name="tpm", retry_after=retry_after, should_retry=should_retry)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (InvalidRequest("no", param="model"), {"message": "no", "type": "invalid_request_error", "param": "model", "code": None}),
        (refused(1), {"message": "Rate limit reached", "type": "tokens", "param": None, "code": "rate_limit_exceeded"}),
        (
            StoreUnavailable("no"),
            {"message": "no", "type": "service_unavailable_error", "param": None, "code": "store_unavailable"},
        ),
        (InvalidRequest("a \ud83d b"), {"message": "a ? b", "type": "invalid_request_error", "param": None, "code": None}),
        (InvalidRequest('"\\\n\x00é'), {"message": '"\\\n\x00é', "type": "invalid_request_error", "param": None, "code": None}),
    ],
)
def test_body(error, expected):
    """The body is OpenAI's error object with all four members, valid JSON for any message (D26, D28)."""
    assert json.loads(body_of(error)) == {"error": expected}


def kinds(base=ProxyError):
    return [kind for child in base.__subclasses__() for kind in (child, *kinds(child))]


@pytest.mark.parametrize(
    "kind", [kind for kind in kinds() if kind not in (LimitExceeded, InternalError)], ids=lambda kind: kind.__name__
)
def test_every_error_renders(kind):
    """Every kind of error has an error status and renders, as a whole answer and in a stream."""
    error = kind("words")
    assert 400 <= error.status < 600
    assert json.loads(body_of(error))["error"]["message"] == "words"
    assert b"words" in in_stream(error, "/chat/completions")
    assert faults.ProxyError in kind.__mro__


@pytest.mark.parametrize(
    ("retry_after", "should_retry", "expected"),
    [
        (None, None, {}),
        (None, False, {"x-should-retry": "false"}),
        (0, None, {"retry-after": "1", "retry-after-ms": "1"}),
        (-5, None, {"retry-after": "1", "retry-after-ms": "1"}),
        (0.0004, None, {"retry-after": "1", "retry-after-ms": "1"}),
        (0.3, None, {"retry-after": "1", "retry-after-ms": "300"}),
        (1.0001, None, {"retry-after": "2", "retry-after-ms": "1001"}),
        (59.9999, None, {"retry-after": "60", "retry-after-ms": "60000"}),
        (60, None, {"retry-after": "60", "retry-after-ms": "60000"}),
        (60.001, None, {"retry-after": "61", "retry-after-ms": "60001", "x-should-retry": "false"}),
        (86400, None, {"retry-after": "86400", "retry-after-ms": "86400000", "x-should-retry": "false"}),
        (86400, True, {"retry-after": "86400", "retry-after-ms": "86400000", "x-should-retry": "true"}),
        (5, False, {"retry-after": "5", "retry-after-ms": "5000", "x-should-retry": "false"}),
        (5, True, {"retry-after": "5", "retry-after-ms": "5000", "x-should-retry": "true"}),
        (10**9, None, {"retry-after": str(10**9), "retry-after-ms": str(10**12), "x-should-retry": "false"}),
    ],
)
def test_when_to_come_back(retry_after, should_retry, expected):
    """Retry-After is a whole number, rounded up, at least 1; above 60 s no SDK may retry by itself (A12)."""
    rendered = {name.decode(): value.decode() for name, value in headers_of(refused(retry_after, should_retry))}
    assert rendered == {"content-type": "application/json", **expected}


def test_chat_stream_ends_with_an_error_and_done():
    """A chat stream ends with an event that SDKs raise on, then the end marker."""
    splitter = SseSplitter()
    records = splitter.feed(in_stream(InvalidRequest("no\n\nway"), "/chat/completions"))
    assert splitter.rest() == b""
    assert [data_of(record) for record in records] == [body_of(InvalidRequest("no\n\nway")), b"[DONE]"]


def test_responses_stream_ends_with_an_error_event():
    """A responses stream ends with an event of type error, flat and nested, and no end marker."""
    records = SseSplitter().feed(in_stream(refused(1), "/responses"))
    assert len(records) == 1
    assert records[0].startswith(b"event: error\n")
    event = json.loads(data_of(records[0]))
    assert event["type"] == "error"
    assert event["message"] == event["error"]["message"] == "Rate limit reached"
    assert event["error"]["type"] == "tokens"
