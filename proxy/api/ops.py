"""Operators' paths on the control port: ``/healthz``, ``/readyz``, ``/metrics``. What is counted is decided in ``metrics.py``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from proxy.clock import Clock
from proxy.errors import MetricsUnavailable, StoreUnavailable
from proxy.limits.model import BoundLimit, Level
from proxy.limits.store import Store
from proxy.metrics import LimitLevels, expose

SCRAPE_STORE_WITHIN_S = 0.3  # what a dead store may cost a scrape


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether the data workers serve."""

    workers_ready: int
    workers: int
    is_draining: bool


@dataclass(frozen=True, slots=True)
class LevelReader:
    """Reads every limit's level from the store within a bounded time."""

    service: str
    bounds: tuple[tuple[str, BoundLimit], ...]
    store: Store
    clock: Clock

    async def read(self) -> LimitLevels:
        """Levels, or None in their place when the store did not answer in time."""
        started = self.clock.monotonic()
        levels: tuple[Level, ...] | None = None
        try:
            async with asyncio.timeout(SCRAPE_STORE_WITHIN_S):
                levels = await self._levels()
        except (TimeoutError, StoreUnavailable):
            levels = None
        return LimitLevels(self.service, self.bounds, levels, self.clock.monotonic() - started)

    async def _levels(self) -> tuple[Level, ...]:
        await self.store.ping()
        return await self.store.peek([bound for _, bound in self.bounds])


def routes(reader: LevelReader, readiness: Callable[[], Readiness], metrics_files: Path, version: str) -> APIRouter:
    """The router; ``readiness`` is asked at each call."""
    router = APIRouter()

    @router.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @router.get("/readyz")
    async def readyz() -> JSONResponse:
        workers = readiness()
        levels = await reader.read()
        problems = []
        if workers.is_draining:
            problems.append("shutting down")
        if workers.workers_ready < workers.workers:
            problems.append(f"{workers.workers_ready} of {workers.workers} data workers accept requests")
        if levels.levels is None:
            problems.append("the limit store does not answer")
        content = {"status": "not ready" if problems else "ready", "problems": problems}
        return JSONResponse(content, status_code=503 if problems else 200)

    @router.get("/metrics")
    async def metrics() -> Response:
        try:
            text = await asyncio.to_thread(expose, metrics_files, await reader.read(), version)
        except (OSError, ValueError) as error:
            raise MetricsUnavailable(
                f"The metrics files can't be read ({type(error).__name__}): is the data directory gone?"
            ) from error
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    return router
