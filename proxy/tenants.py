"""Who calls: tenants, found by the SHA-256 of their key, with what they may use and their limits. Counting is ``limits/``'s."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from proxy.limits.model import BoundLimit

GENERATED_KEY_PREFIX = "sg-"


def hash_key(key: str) -> str:
    """The hexadecimal SHA-256 of a tenant key: the only form in which it is kept."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


@dataclass(frozen=True, slots=True)
class Tenant:
    """A team or application with its own keys and limits. ``models`` are shell patterns; None allows every model."""

    id: str
    key_hashes: tuple[str, ...]
    models: tuple[str, ...] | None
    limits: tuple[BoundLimit, ...]

    def may_use(self, model: str) -> bool:
        """Whether this tenant may use a configured model."""
        return self.models is None or any(fnmatchcase(model, pattern) for pattern in self.models)

    def limits_for(self, model: str | None) -> list[BoundLimit]:
        """The limits that count a request for ``model`` (None: it names none)."""
        return [bound for bound in self.limits if bound.limit.is_for(model)]


class TenantDirectory:
    """All tenants. Look-up is by digest, so comparing takes no time that depends on a stored key."""

    def __init__(self, tenants: Iterable[Tenant]) -> None:
        self._tenants = tuple(tenants)
        self._by_hash = {key_hash: tenant for tenant in self._tenants for key_hash in tenant.key_hashes}

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._tenants)

    def __repr__(self) -> str:
        return f"<TenantDirectory {[tenant.id for tenant in self._tenants]}>"

    def find(self, key: str) -> Tenant | None:
        """The tenant that holds ``key``, or None."""
        return self._by_hash.get(hash_key(key))
