"""The shape of an answer before it is sent, and OpenAI's errors in that shape: status, type, code and wording.

When an error is due is left to ``app.py`` and the scripts, sending to ``exchange.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from proxy.simulator.script import Script

Headers: TypeAlias = tuple[tuple[bytes, bytes], ...]
Record: TypeAlias = tuple[bytes, bool]
"""A record of a stream, and whether it carries a token."""

JSON = b"application/json"
EVENT_STREAM = b"text/event-stream; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer: whole (``body``), or a stream when ``records`` is given. ``is_bare`` leaves OpenAI's headers out."""

    body: bytes = b""
    status: int = 200
    content_type: bytes = JSON
    tokens: int = 0
    headers: Headers = ()
    records: Iterator[Record] | None = None
    is_bare: bool = False


class Refusal(Exception):  # noqa: N818  (an answer, not a failure)
    """A request that is answered with an OpenAI error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        error_type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = error_body(message, error_type, code, param)

    def reply(self) -> Reply:
        """The error as an answer."""
        return Reply(self.body, self.status)


def error_object(message: str, error_type: str | None, code: str | None, param: str | None = None) -> dict[str, Any]:
    """The value of the member ``error``."""
    return {"message": message, "type": error_type, "param": param, "code": code}


def error_body(message: str, error_type: str | None, code: str | None, param: str | None = None) -> bytes:
    """An error body with its four members."""
    return msgspec.json.encode({"error": error_object(message, error_type, code, param)})


# status -> type, code, message. {model}, {key} and {wait} are filled in.
_ERRORS: dict[int, tuple[str, str | None, str]] = {
    400: ("invalid_request_error", None, "The simulator was told to refuse this request."),
    401: (
        "invalid_request_error",
        "invalid_api_key",
        "Incorrect API key provided: {key}. You can find your API key at https://platform.openai.com/account/api-keys.",
    ),
    403: ("request_forbidden", "unsupported_country_region_territory", "Country, region, or territory not supported"),
    404: (
        "invalid_request_error",
        "model_not_found",
        "The model `{model}` does not exist or you do not have access to it.",
    ),
    429: (
        "tokens",
        "rate_limit_exceeded",
        "Rate limit reached for {model} in organization org-simulated on tokens per min (TPM): Limit 2000000, "
        "Used 1999000, Requested 2000. Please try again in {wait}. "
        "Visit https://platform.openai.com/account/rate-limits to learn more.",
    ),
    500: ("server_error", None, "The server had an error while processing your request. Sorry about that!"),
    503: ("server_error", "server_is_overloaded", "The server is currently overloaded. Please try again later."),
}
_REQUESTS_PER_MINUTE = (
    "Rate limit reached for {model} in organization org-simulated on requests per min (RPM): Limit 10000, Used 10000, "
    "Requested 1. Please try again in {wait}. Visit https://platform.openai.com/account/rate-limits to learn more."
)
_NO_QUOTA = "You exceeded your current quota, please check your plan and billing details."
_QUOTA_CODES = frozenset(
    {
        "insufficient_quota",
        "credit_balance_exhausted",
        "organization_spend_limit_exceeded",
        "project_spend_limit_exceeded",
        "organization_usage_limit_exceeded",
    }
)


def no_key() -> Refusal:
    """No bearer key at all."""
    return Refusal(
        401,
        "You didn't provide an API key. You need to provide your API key in an Authorization header using Bearer auth "
        "(i.e. Authorization: Bearer YOUR_KEY). You can obtain an API key from https://platform.openai.com/account/api-keys.",
        code="invalid_api_key",
    )


def wrong_key(key: str) -> Refusal:
    """A key that is not accepted. As OpenAI does, the message shows the ends of it."""
    return Refusal(401, _ERRORS[401][2].format(key=masked(key)), code="invalid_api_key")


def masked(key: str) -> str:
    """Both ends of the key and stars between, as OpenAI shows it; a short key has one end only."""
    if len(key) < 16:
        return key[:3] + "*" * 8
    return key[:8] + "*" * (len(key) - 12) + key[-4:]


def scripted_error(script: Script, status: int, *, model: str | None, key: str) -> Reply:
    """The error that the script asks for, in OpenAI's words where the script has none of its own."""
    error_type, code, message = _defaults(script, status)
    wait = script.retry_after_s
    if wait is None and status == 429 and error_type != "insufficient_quota":
        wait = 1.0
    filled = message.format(model=model or "default", key=masked(key), wait=_duration(wait or 0.0))
    body = error_body(filled if script.error_message is None else script.error_message, error_type, code)
    headers = retry_headers(wait)
    if status == 429 and wait is not None:
        unit = b"requests" if error_type == "requests" else b"tokens"
        reset = _duration(wait).encode()
        headers += ((b"x-ratelimit-remaining-" + unit, b"0"), (b"x-ratelimit-reset-" + unit, reset))
    return Reply(body, status, headers=headers)


def _defaults(script: Script, status: int) -> tuple[str, str | None, str]:
    fallback = ("server_error" if status >= 500 else "invalid_request_error", None, f"The simulator answers {status}.")
    error_type, code, message = _ERRORS.get(status, fallback)
    if status == 429 and script.error_code in _QUOTA_CODES:
        error_type, message = "insufficient_quota", _NO_QUOTA
    elif status == 429 and script.error_type == "requests":
        message = _REQUESTS_PER_MINUTE
    return script.error_type or error_type, script.error_code or code, message


def stream_error(script: Script) -> dict[str, Any]:
    """The error that breaks into a stream."""
    error_type, code, message = _ERRORS[500]
    return error_object(script.error_message or message, script.error_type or error_type, script.error_code or code)


def retry_headers(wait_s: float | None) -> Headers:
    """``retry-after`` in whole seconds, rounded up, and ``retry-after-ms`` where that says more."""
    if wait_s is None:
        return ()
    whole = math.ceil(wait_s)
    after = (b"retry-after", b"%d" % whole)
    return (after,) if whole == wait_s else (after, (b"retry-after-ms", b"%d" % round(wait_s * 1000)))


def _duration(seconds: float) -> str:
    """Seconds in the form of OpenAI's headers: ``12ms``, ``1.146s``, ``6m0s``."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    minutes, rest = divmod(seconds, 60)
    return f"{int(minutes)}m{rest:g}s" if minutes else f"{rest:g}s"
