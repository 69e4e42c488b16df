"""Who calls, from the Authorization header."""

from __future__ import annotations

import pytest

from proxy.api.auth import authenticate, bearer_key
from proxy.errors import InvalidApiKey
from proxy.tenants import Tenant, TenantDirectory, hash_key

KEY = "sk-Tenant-A"
TENANT = Tenant("a", (hash_key(KEY), hash_key("\udcffkey")), None, ())
TENANTS = TenantDirectory([TENANT])


@pytest.mark.parametrize("value", ["Bearer K", "bearer K", "BEARER  K", "bEaReR K ", "  Bearer K", "Bearer \t K"])
def test_scheme_in_any_case(value):
    """The scheme's case and the number of spaces don't matter: it is one tenant with one key (A27)."""
    found = authenticate([(b"authorization", value.replace("K", KEY).encode())], TENANTS)
    assert found is TENANT


def test_key_of_odd_bytes():
    """A key that is no UTF-8 is compared by its bytes."""
    assert authenticate([(b"authorization", b"Bearer \xffkey")], TENANTS) is TENANT


@pytest.mark.parametrize(
    "values",
    [
        [],
        [b""],
        [b"Bearer"],
        [b"Bearer "],
        [b"Bearer  "],
        [KEY.encode()],
        [b"Basic " + KEY.encode()],
        [b"Bearer:" + KEY.encode()],
        [b"Bearer" + KEY.encode()],
        [b"Bearer " + KEY.lower().encode()],
        [b"Bearer " + KEY.upper().encode()],
        [b"Bearer " + KEY.encode() + b"x"],
        [b"Bearer " + KEY.encode() + b" x"],
        [b"Bearer " + KEY.encode() + b"," + KEY.encode()],
        [b"Bearer " + hash_key(KEY).encode()],
        [b"Bearer " + KEY.encode()] * 2,
        [b"Bearer " + KEY.encode(), b""],
    ],
)
def test_refused(values):
    """No key, a wrong one (case counts), another scheme or several headers are refused without showing the key (A27)."""
    with pytest.raises(InvalidApiKey) as caught:
        authenticate([(b"authorization", value) for value in values], TENANTS)
    assert caught.value.status == 401
    assert KEY.lower() not in caught.value.message.lower()


def test_key_is_read_as_it_is():
    """The key is what stands after the scheme, trimmed."""
    assert bearer_key([(b"x", b"y"), (b"authorization", b"Bearer  a b ")]) == "a b"
