"""What can go wrong, sorted by whose fault it is; each error carries a status and OpenAI's ``type``, ``code`` and ``param``.

Errors are raised where the fault is found and rendered in one place (``api/errors.py``); nothing here knows HTTP bytes.
A refused limit is a Decision inside the limiter and becomes ``LimitExceeded`` only at the gateway.
"""

from __future__ import annotations

from typing import ClassVar


class ProxyError(Exception):
    """Base of all errors that a client may see. The message is shown to the client: it must hold no secret.

    ``retry_after`` is in seconds, None when waiting is no remedy. ``should_retry`` overrides what SDKs would do by status.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after: float | None = None,
        should_retry: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after
        self.should_retry = should_retry

    @property
    def error_type(self) -> str:
        """OpenAI's ``error.type``."""
        return self.type

    @property
    def error_code(self) -> str | None:
        """OpenAI's ``error.code``."""
        return self.code


# The client's fault ---------------------------------------------------------------------------------------------------


class RequestFault(ProxyError):
    """The request can never succeed as it stands."""

    status = 400
    type = "invalid_request_error"


class InvalidRequest(RequestFault):
    """The body, a member of it or the path is not usable."""


class InvalidApiKey(RequestFault):
    """No key, several keys, or a key that no tenant has."""

    status = 401
    code = "invalid_api_key"


class Forbidden(RequestFault):
    """A path that this gateway does not pass on."""

    status = 403
    code = "path_not_allowed"


class ModelNotFound(RequestFault):
    """The model is unknown, or this tenant may not use it: the two are deliberately not told apart."""

    status = 404
    code = "model_not_found"


class NotFound(RequestFault):
    """No such path."""

    status = 404
    code = "not_found"


class MethodNotAllowed(RequestFault):
    """The path exists, the method does not."""

    status = 405
    code = "method_not_allowed"


class BodyTooLarge(RequestFault):
    """The body exceeds ``server.max_body``."""

    status = 413
    code = "request_too_large"


class UnsupportedMediaType(RequestFault):
    """A body that the gateway can't read, so that limits could be evaded by it."""

    status = 415
    code = "unsupported_media_type"


class RequestTimeout(RequestFault):
    """The client stopped sending in the middle of its request."""

    status = 408
    code = "request_timeout"


class HeadersTooLarge(RequestFault):
    """More header lines or bytes than the server accepts."""

    status = 431
    code = "request_headers_too_large"


class UpgradeRefused(RequestFault):
    """A protocol upgrade that is not offered. 426 makes clients fall back to plain HTTP at once."""

    status = 426
    code = "upgrade_not_offered"


# The tenant's quota ---------------------------------------------------------------------------------------------------


class LimitExceeded(ProxyError):
    """A limit refused the request. ``error_type`` is the limit's unit, as OpenAI's own bodies have it."""

    status = 429
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, unit: str, limit_name: str, retry_after: float | None, should_retry: bool | None) -> None:
        super().__init__(message, retry_after=retry_after, should_retry=should_retry)
        self.unit = unit
        self.limit_name = limit_name

    @property
    def error_type(self) -> str:
        """``requests`` or ``tokens``."""
        return self.unit


# The upstream's fault -------------------------------------------------------------------------------------------------


class UpstreamFault(ProxyError):
    """The upstream failed. ``fault`` is the label under which it is counted."""

    status = 502
    code = "upstream_error"
    fault: ClassVar[str] = "upstream"


class UpstreamUnreachable(UpstreamFault):
    """No connection could be made: refused, name not found, TLS failure, or no answer to the connect in time."""

    code = "upstream_unreachable"
    fault = "unreachable"


class UpstreamDisconnected(UpstreamFault):
    """The connection ended before the answer, or in the middle of it."""

    code = "upstream_disconnected"
    fault = "disconnected"


class UpstreamGarbled(UpstreamFault):
    """What the upstream sent is not HTTP."""

    code = "upstream_garbled"
    fault = "garbled"


class UpstreamTimeout(UpstreamFault):
    """The upstream accepted the request and then stayed silent for too long."""

    status = 504
    code = "upstream_timeout"
    fault = "timeout"


class UpstreamRefusedKey(UpstreamFault):
    """The upstream does not accept the gateway's own key: not the client's affair, hence no 401."""

    code = "upstream_key_refused"
    fault = "key"


# The gateway's own fault ----------------------------------------------------------------------------------------------


class GatewayFault(ProxyError):
    """The gateway itself can't serve just now."""

    status = 503
    type = "service_unavailable_error"


class StoreUnavailable(GatewayFault):
    """The store that holds the limits gave no answer in time, so the request could not be admitted."""

    code = "store_unavailable"


class MetricsUnavailable(GatewayFault):
    """The workers' metrics files are not readable."""

    code = "metrics_unavailable"


class Draining(GatewayFault):
    """The gateway is shutting down and its drain time is over."""

    code = "gateway_shutting_down"


class InternalError(ProxyError):
    """A bug. The message is fixed: details go to the log only."""

    code = "internal_error"

    def __init__(self) -> None:
        super().__init__("The gateway failed to handle this request.")


class NotBuilt(ProxyError):
    """A part of the design that this version does not have yet."""

    status = 501
    code = "not_built"


# The operator's fault -------------------------------------------------------------------------------------------------


class AdminRefused(RequestFault):
    """The admin API was called without the right to."""

    status = 401
    code = "admin_unauthorized"


# Faults that no client sees -------------------------------------------------------------------------------------------


class ClientGone(Exception):
    """The client closed the connection before its answer was complete."""


class StartupError(Exception):
    """The command can't start. The message is one sentence that says what to do; the exit code is 2."""


class ConfigError(StartupError):
    """The configuration is not usable. ``problems`` holds one line each: file, path in it, what was expected."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems
