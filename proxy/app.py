"""The composition root: configuration -> objects -> the two applications. The only file that names concrete classes.

Processes and sockets are ``server.py``'s and ``worker.py``'s; what happens to a request is told in ``gateway.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import Response
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException

from proxy import __version__
from proxy.api import admin, errors, ops
from proxy.api.openai import OpenAIEndpoint
from proxy.api.ops import LevelReader, Readiness
from proxy.clock import Clock
from proxy.config import GatewayConfig
from proxy.errors import MethodNotAllowed, NotFound, ProxyError
from proxy.forwarding.forwarder import Forwarder
from proxy.forwarding.transport import AiohttpTransport, Transport
from proxy.gateway import Gateway
from proxy.limits.limiter import Limiter
from proxy.limits.redis import RedisStore
from proxy.limits.store import Store
from proxy.metrics import Metrics
from proxy.upstreams.pool import KeyPool


def make_store(url: str, clock: Clock) -> RedisStore:
    """The shared store at ``url``."""
    return RedisStore(url, clock)


@dataclass(frozen=True, slots=True)
class DataPlane:
    """One data worker's application, and what must be closed after it."""

    app: FastAPI
    endpoint: OpenAIEndpoint
    limiter: Limiter
    transport: Transport
    store: Store

    async def close(self) -> None:
        """Settle what is open, then give connections back."""
        await self.limiter.close()
        await self.transport.close()
        await self.store.close()


def build_data_plane(
    config: GatewayConfig, store: Store, clock: Clock, registry: CollectorRegistry, transport: Transport | None = None
) -> DataPlane:
    """The application of the data port. To be called inside the event loop that will serve it."""
    transport = transport or AiohttpTransport(config.upstreams)
    limiter = Limiter(store, clock.token(8), clock)
    gateway = Gateway(
        models=config.models,
        default_upstream=next(iter(config.upstreams)),
        limiter=limiter,
        pool=KeyPool(config.upstreams),
        forwarder=Forwarder(transport),
        clock=clock,
    )
    endpoint = OpenAIEndpoint(gateway, config.tenants, Metrics(registry), clock, max_body_bytes=config.server.max_body_bytes)
    app = _bare_app()
    app.mount("/v1", endpoint)
    return DataPlane(app, endpoint, limiter, transport, store)


def build_control_app(
    config: GatewayConfig, store: Store, clock: Clock, readiness: Callable[[], Readiness], metrics_files: Path
) -> FastAPI:
    """The application of the control port."""
    reader = LevelReader(config.service, tuple(config.bound_limits), store, clock)
    app = _bare_app()
    app.include_router(ops.routes(reader, readiness, metrics_files, __version__))
    app.include_router(admin.routes(reader, config.admin_token))
    return app


def _bare_app() -> FastAPI:
    """FastAPI without documentation routes and redirects, with errors in OpenAI's shape."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)

    async def render(_request: Request, error: Exception) -> Response:
        fault = error if isinstance(error, ProxyError) else _translated(error)
        answer = Response(errors.body_of(fault), status_code=fault.status)
        answer.raw_headers += errors.headers_of(fault)
        return answer

    app.add_exception_handler(ProxyError, render)
    app.add_exception_handler(HTTPException, render)
    return app


def _translated(error: Exception) -> ProxyError:
    if isinstance(error, HTTPException) and error.status_code == 405:
        return MethodNotAllowed("This path does not have that method.")
    return NotFound("There is no such path.")
