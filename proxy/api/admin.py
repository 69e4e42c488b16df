"""The admin API on the control port: who may use it, and what it shows. With a token, by bearer; without, on loopback only."""

from __future__ import annotations

import hmac
import ipaddress
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse
from pydantic import SecretStr

from proxy.api.ops import LevelReader
from proxy.errors import AdminRefused, NotBuilt, StoreUnavailable


def routes(reader: LevelReader, token: SecretStr | None) -> APIRouter:
    """The router, every path behind the same check."""

    async def check(request: Request) -> None:
        if token is not None:
            given = request.headers.get("authorization", "").encode()
            if not hmac.compare_digest(given, f"Bearer {token.get_secret_value()}".encode()):
                raise AdminRefused("The admin API expects Authorization: Bearer and the admin token.")
        elif not _is_loopback(request):
            raise AdminRefused("Without admin.token in the configuration the admin API answers on loopback only.")

    router = APIRouter(prefix="/admin", dependencies=[Depends(check)])

    @router.get("/limits")
    async def limits() -> dict[str, list[dict[str, Any]]]:
        """Every limit with its level now."""
        read = await reader.read()
        if read.levels is None:
            raise StoreUnavailable("The limit store does not answer.", retry_after=1.0)
        rows = [
            {
                "tenant": tenant,
                "limit": bound.limit.name,
                "unit": bound.limit.unit.value,
                "rate": str(bound.limit.rate) if bound.limit.rate else None,
                "algorithm": bound.limit.algorithm.value,
                "models": bound.limit.models,
                "total": bound.limit.capacity,
                "remaining": level.remaining,
                "reset_after": level.reset_us / 1e6,
            }
            for (tenant, bound), level in zip(read.bounds, read.levels, strict=True)
        ]
        return {"limits": rows}

    @router.post("/reload")
    async def reload() -> JSONResponse:
        raise NotBuilt("Reloading the configuration is not built yet: restart the gateway.")

    return router


def _is_loopback(request: Request) -> bool:
    try:
        return request.client is not None and ipaddress.ip_address(request.client.host).is_loopback
    except ValueError:
        return False
