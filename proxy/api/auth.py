"""Who is calling: the bearer key of a request -> Tenant. What the tenant may do is the gateway's affair."""

from __future__ import annotations

from proxy.errors import InvalidApiKey
from proxy.forwarding.headers import RawHeaders
from proxy.tenants import Tenant, TenantDirectory


def bearer_key(request_headers: RawHeaders) -> str:
    """The key in ``Authorization: Bearer <key>``; the scheme in any case. Raises InvalidApiKey, never with the key in it."""
    values = [value for name, value in request_headers if name == b"authorization"]
    if not values:
        raise InvalidApiKey(
            "You didn't provide an API key. You need to provide your API key in an Authorization header using Bearer auth "
            "(i.e. Authorization: Bearer YOUR_KEY)."
        )
    if len(values) > 1:
        raise InvalidApiKey("There are several Authorization headers: expected one.")
    scheme, _, key = values[0].strip().partition(b" ")
    if scheme.lower() != b"bearer" or not key.strip():
        raise InvalidApiKey("The Authorization header must have the form: Bearer YOUR_KEY.")
    return key.strip().decode("utf-8", "surrogateescape")


def authenticate(request_headers: RawHeaders, tenants: TenantDirectory) -> Tenant:
    """The calling tenant. Raises InvalidApiKey."""
    tenant = tenants.find(bearer_key(request_headers))
    if tenant is None:
        raise InvalidApiKey("Incorrect API key provided. Check that it is a key of this gateway.")
    return tenant
