"""Which headers cross the gateway."""

from __future__ import annotations

import pytest

from proxy.forwarding.headers import first, media_type, to_client, to_upstream

KEPT_UP = [
    (b"content-type", b"application/json"),
    (b"accept", b"application/json"),
    (b"user-agent", b"OpenAI/Python 3"),
    (b"x-stainless-retry-count", b"0"),
    (b"x-client-request-id", b"abc"),
    (b"openai-beta", b"assistants=v2"),
    (b"x-sluice", b"no prefix of ours"),
    (b"x-twice", b"1"),
    (b"x-twice", b"2"),
]
OWN = [(b"authorization", b"Bearer sk-up"), (b"accept-encoding", b"identity")]


def test_ordinary_headers_go_up_in_order():
    """What is not ours, the hop's or a credential goes up as it came, repeated names and order included."""
    assert to_upstream(KEPT_UP, secret="sk-up") == KEPT_UP + OWN


@pytest.mark.parametrize(
    "name",
    [
        "Host",
        "Content-Length",
        "Transfer-Encoding",
        "TE",
        "Trailer",
        "Upgrade",
        "Connection",
        "Keep-Alive",
        "Proxy-Authorization",
        "Proxy-Connection",
        "Expect",
        "Authorization",
        "Api-Key",
        "X-Api-Key",
        "Cookie",
        "OpenAI-Organization",
        "OpenAI-Project",
        "Accept-Encoding",
        "Forwarded",
        "X-Forwarded-For",
        "X-Forwarded-Host",
        "X-Forwarded-Proto",
        "X-Real-IP",
        "X-Sluicegate-Priority",
        "x-hop",
        "x-other-hop",
    ],
)
def test_not_sent_up(name):
    """Host, framing, hop-by-hop, named in Connection, credentials and origins stay here, in any spelling (D21, D23)."""
    connection = (b"Connection", b"close, X-Hop ,,x-OTHER-hop")
    for spelling in (name, name.lower(), name.upper()):
        assert to_upstream([connection, (spelling.encode(), b"v"), *KEPT_UP], secret="sk-up") == KEPT_UP + OWN


def test_upstream_gets_our_key_only():
    """The client's key never goes up, and ours goes exactly once."""
    sent = to_upstream([(b"authorization", b"Bearer tenant"), (b"Authorization", b"Bearer other")], secret="sk-up")
    assert [value for name, value in sent if name.lower() == b"authorization"] == [b"Bearer sk-up"]


KEPT_DOWN = [(b"content-type", b"application/json"), (b"openai-processing-ms", b"12"), (b"x-twice", b"1"), (b"x-twice", b"2")]


@pytest.mark.parametrize(
    "name",
    [
        "Transfer-Encoding",
        "Connection",
        "Keep-Alive",
        "Proxy-Authenticate",
        "Trailer",
        "Set-Cookie",
        "Alt-Svc",
        "Strict-Transport-Security",
        "X-RateLimit-Limit-Requests",
        "x-ratelimit-reset-tokens",
        "x-ratelimit-anything",
        "X-Should-Retry",
        "X-Accel-Buffering",
        "OpenAI-Organization",
        "OpenAI-Project",
        "X-Secret",
    ],
)
def test_not_sent_down(name):
    """Framing, hop-by-hop, named in Connection, cookies, the upstream's own limits and account stay behind (D21, D24)."""
    for spelling in (name, name.lower()):
        headers = [(b"Connection", b"x-secret"), (spelling.encode(), b"v"), *KEPT_DOWN]
        assert to_client(headers, is_length_kept=True) == KEPT_DOWN


def test_upstream_request_id_gets_another_name():
    """The upstream's request id is kept for its support, and ours takes its place."""
    assert to_client([(b"X-Request-Id", b"req_1")], is_length_kept=True) == [(b"x-upstream-request-id", b"req_1")]


@pytest.mark.parametrize(("is_length_kept", "kept"), [(True, [(b"content-length", b"5")]), (False, [])])
def test_length_goes_with_an_unchanged_body(is_length_kept, kept):
    """The length is passed on only where the body is (D21)."""
    assert to_client([(b"Content-Length", b"5")], is_length_kept=is_length_kept) == kept


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (b"application/json", "application/json"),
        (b"Application/JSON; charset=utf-8", "application/json"),
        (b" text/event-stream ;charset=utf-8", "text/event-stream"),
        (b"", ""),
        (b";", ""),
        (b"\xff", "\xff"),
        (None, ""),
    ],
)
def test_media_type(value, kind):
    """The media type is read without parameters and case; an odd one raises nothing (D28)."""
    headers = [] if value is None else [(b"Content-Type", value)]
    assert media_type(headers) == kind
    assert first(headers, b"content-type") == value
