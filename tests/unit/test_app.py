"""The composed application: no secret shows in the repr of anything it is made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from proxy.app import build_data_plane
from proxy.clock import Clock
from proxy.config import load_config
from proxy.limits.memory import MemoryStore

SECRETS = {"UP": "sk-upstream-0123456789", "TENANT": "sg-tenant-0123456789", "ADMIN": "admin-0123456789"}


def _everything(found: Any, seen: dict[int, Any]) -> dict[int, Any]:
    """All objects of ours that can be reached from ``found`` through attributes and containers."""
    if id(found) in seen:
        return seen
    seen[id(found)] = found
    parts: list[Any] = []
    if isinstance(found, dict):
        parts += found.values()
    elif isinstance(found, list | tuple | set | frozenset):
        parts += found
    elif type(found).__module__.startswith("proxy."):
        parts += [getattr(found, name) for name in getattr(found, "__dict__", {})]
        parts += [
            getattr(found, name) for kind in type(found).__mro__ for name in getattr(kind, "__slots__", ()) if hasattr(found, name)
        ]
    for part in parts:
        _everything(part, seen)
    return seen


async def test_no_secret_in_any_repr(tmp_path: Path) -> None:
    """Whatever of the running gateway lands in a log or a debugger by its repr shows no secret (D24)."""
    path = tmp_path / "gateway.json"
    config = {
        "admin": {"token": "${ADMIN}"},
        "upstreams": {"u": {"base_url": "http://127.0.0.1:9/v1", "keys": [{"id": "k", "secret": "${UP}"}]}},
        "models": {"m": {"upstream": "u"}},
        "tenants": {"t": {"keys": ["${TENANT}"], "limits": [{"name": "rpm", "unit": "requests", "rate": "1/min"}]}},
    }
    path.write_text(json.dumps(config))
    loaded = load_config(path, SECRETS.get)
    plane = build_data_plane(loaded, MemoryStore(lambda: 0), Clock(), CollectorRegistry())
    reachable = _everything([loaded, plane], {})
    kinds = {type(found).__name__ for found in reachable.values()}
    assert {"Gateway", "KeyPool", "UpstreamKey", "Tenant", "Limiter", "AiohttpTransport", "GatewayConfig"} <= kinds
    for found in reachable.values():
        if isinstance(found, str | bytes):
            continue
        for secret in SECRETS.values():
            assert secret not in repr(found), type(found)
    await plane.close()
