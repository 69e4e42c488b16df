"""The stores under contract: in memory, on an embedded Valkey, and on the server that SLUICEGATE_TEST_REDIS_URL names, if any."""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as NotYet

from proxy.clock import Clock
from proxy.embedded_store import find_server
from proxy.limits.memory import MemoryStore
from proxy.limits.redis import RedisStore
from proxy.limits.store import Store

START_US = 1_700_000_000_123_456
OTHER_SERVER = os.environ.get("SLUICEGATE_TEST_REDIS_URL", "")
SERVERS = ["embedded", "other"] if OTHER_SERVER else ["embedded"]


class ValkeyProcess:
    """A server without files, on a unix socket of its own."""

    def __init__(self, folder: Path) -> None:
        self.url = f"unix://{folder / 'store'}"
        self._arguments = ["--port", "0", "--unixsocket", str(folder / "store"), "--save", "", "--dir", str(folder)]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen([find_server(), *self._arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with Redis.from_url(self.url) as client:
            while not _answers(client):
                assert self.process.poll() is None, "the server ended at once"

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def _answers(client: Redis) -> bool:
    try:
        return bool(client.ping())
    except NotYet:
        return False


@pytest.fixture
def own_server() -> Iterator[ValkeyProcess]:
    """A server that the test may stop and pause."""
    with tempfile.TemporaryDirectory(prefix="sg-") as folder:
        server = ValkeyProcess(Path(folder))
        yield server
        server.stop()


@pytest.fixture(scope="session")
def embedded_url() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="sg-") as folder:
        server = ValkeyProcess(Path(folder))
        yield server.url
        server.stop()


def _url_of(kind: str, request: pytest.FixtureRequest) -> str:
    return OTHER_SERVER if kind == "other" else request.getfixturevalue("embedded_url")


@pytest.fixture(scope="session", params=SERVERS)
def server_url(request: pytest.FixtureRequest) -> str:
    """Each server in turn. Tests may flush it."""
    return _url_of(request.param, request)


@pytest.fixture(scope="session")
def runner() -> Iterator[asyncio.Runner]:
    """One event loop for all examples that hypothesis makes."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture
def client(server_url: str) -> Iterator[Redis]:
    """A plain client of an emptied server, to look at what the store wrote."""
    with Redis.from_url(server_url, decode_responses=True) as client:
        client.flushdb()
        yield client


@pytest.fixture
async def redis_store(server_url: str, client: Redis) -> AsyncIterator[RedisStore]:
    """A store on an emptied server, its clock standing still."""
    store = RedisStore(server_url, Clock())
    store.fake_time_us = START_US
    yield store
    await store.close()


@dataclass
class Timed:
    """A store, and the clock it decides on."""

    store: Store
    set_time: Callable[[int], None]
    now_us: int = START_US

    def advance(self, microseconds: int) -> None:
        self.now_us += microseconds
        self.set_time(self.now_us)


@pytest.fixture(params=["memory", *SERVERS])
async def timed(request: pytest.FixtureRequest) -> AsyncIterator[Timed]:
    """Every store in turn, empty."""
    if request.param == "memory":
        now = [START_US]
        yield Timed(MemoryStore(lambda: now[0]), lambda value: now.__setitem__(0, value))
        return
    url = _url_of(request.param, request)
    with Redis.from_url(url) as plain:
        plain.flushdb()
    store = RedisStore(url, Clock())
    store.fake_time_us = START_US
    yield Timed(store, lambda value: setattr(store, "fake_time_us", value))
    await store.close()
