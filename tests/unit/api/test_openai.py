"""The endpoint in process: a client that is there and does not read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from proxy.api import openai
from proxy.app import build_data_plane
from proxy.clock import Clock
from proxy.config import load_config
from proxy.forwarding.transport import UpstreamRequest
from proxy.limits.memory import MemoryStore


class Endless:
    """An upstream that streams without end, and knows whether it was cut off."""

    status = 200
    headers = [(b"content-type", b"text/event-stream")]  # noqa: RUF012  (never changed)
    is_aborted = False

    async def send(self, _request: UpstreamRequest) -> Endless:
        return self

    async def chunks(self) -> AsyncIterator[bytes]:
        while True:
            yield b'data: {"choices": [{"delta": {"content": "x"}}]}\n\n'

    def abort(self) -> None:
        self.is_aborted = True

    async def close(self) -> None:
        """Nothing to close."""


async def test_reader_that_stops_is_let_go(tmp_path: Path, monkeypatch: Any) -> None:
    """A client that leaves what was sent unread for too long counts as gone: its upstream call ends, nothing piles up."""
    monkeypatch.setattr(openai, "READER_PAUSE_S", 0.0)
    path = tmp_path / "gateway.json"
    upstreams = {"u": {"base_url": "http://127.0.0.1:9/v1", "keys": [{"id": "k", "secret": "${UP}"}]}}
    config = {"upstreams": upstreams, "models": {"m": {"upstream": "u"}}, "tenants": {"t": {"keys": ["${TENANT}"]}}}
    path.write_text(json.dumps(config))
    loaded = load_config(path, {"UP": "sk-up", "TENANT": "sg-tenant"}.get)
    upstream = Endless()
    plane = build_data_plane(loaded, MemoryStore(lambda: 0), Clock(), CollectorRegistry(), upstream)
    sent: list[str] = []

    async def send(message: Any) -> None:
        sent.append(message["type"])
        if len(sent) > 3:
            await asyncio.Event().wait()  # its buffers are full

    body = b'{"model": "m", "stream": true}'
    received = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        return received.pop() if received else await asyncio.Event().wait()

    scope = {
        "method": "POST",
        "raw_path": b"/v1/chat/completions",
        "query_string": b"",
        "headers": [(b"authorization", b"Bearer sg-tenant")],
    }
    async with asyncio.timeout(10):
        await plane.endpoint(scope, receive, send)
    assert upstream.is_aborted
    assert sent == ["http.response.start"] + ["http.response.body"] * 3
    await plane.close()
