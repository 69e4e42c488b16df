"""A simulator on a port, a clock moved by hand, and an HTTP client. What is asked is left to the tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx2
import pytest

from proxy.clock import Clock
from proxy.simulator import RunningSimulator, Simulator

KEY = "sk-simulated-0123456789-wxyz"


class HandClock(Clock):
    """Stands still until moved."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def monotonic(self) -> float:
        return self.now - 1_600_000_000.0

    def unix(self) -> float:
        return self.now

    def token(self, size_bytes: int = 12) -> str:
        return "ab" * size_bytes


@pytest.fixture
def key() -> str:
    return KEY


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def simulator(clock: HandClock) -> Simulator:
    return Simulator(clock)


@pytest.fixture
async def running(simulator: Simulator) -> AsyncIterator[RunningSimulator]:
    async with RunningSimulator(simulator) as running:
        yield running


@pytest.fixture
async def client(running: RunningSimulator) -> AsyncIterator[httpx2.AsyncClient]:
    headers = {"authorization": f"Bearer {KEY}"}
    root = running.base_url.removesuffix("/v1")
    async with httpx2.AsyncClient(base_url=root, headers=headers, timeout=30) as client:
        yield client
