"""The control process: locks, sockets, the embedded store, data workers and the control port; signals and the end of it all.

Decides which processes exist. What a worker does is ``worker.py``'s, how the store is run ``embedded_store.py``'s. Control binds
one SO_REUSEPORT socket per worker slot and keeps them all open: connections that reach the slot of a worker that died wait in
its socket for the replacement.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxy import metrics
from proxy.api.ops import Readiness
from proxy.app import build_control_app, make_store
from proxy.clock import Clock
from proxy.config import GatewayConfig
from proxy.data_dir import DataDir
from proxy.embedded_store import EmbeddedStore
from proxy.errors import StartupError, StoreUnavailable
from proxy.limits.redis import RedisStore
from proxy.logs import logger
from proxy.worker import PULSE_S, QuietServer, WorkerOrder, server_config

BACKLOG = 2048
READY_WITHIN_S = 30.0
SILENT_PULSES = 5  # a worker that misses so many is not ready
DRAIN_MARGIN_S = 5.0  # beyond drain_timeout, before a worker is killed
PREDECESSOR_GONE_WITHIN_S = 5.0
_RESTART_PAUSES_S = (0.0, 0.2, 1.0, 5.0)


@dataclass(frozen=True, slots=True)
class Started:
    """What is known once everything serves: for the lines that the command prints."""

    host: str
    port: int
    control_port: int


class Worker:
    """One slot: its socket, and the process that serves it now."""

    def __init__(self, slot: int, listener: socket.socket, order: WorkerOrder, store_url: str, clock: Clock) -> None:
        self.slot = slot
        self._listener = listener
        self._order = order
        self._store_url = store_url
        self._clock = clock
        self._process: asyncio.subprocess.Process | None = None
        self._last_pulse: float | None = None
        self._ending = asyncio.Event()
        self._link: asyncio.StreamWriter | None = None
        self._log = logger("control")
        self.supervisor: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        pid = self._process.pid if self._process else None
        return f"<Worker slot={self.slot} pid={pid} {'ready' if self.is_ready else 'not ready'}>"

    @property
    def is_ready(self) -> bool:
        """Whether it accepts requests and its event loop turns."""
        return self._last_pulse is not None and self._clock.monotonic() - self._last_pulse < SILENT_PULSES * PULSE_S

    async def start(self) -> None:
        """Start it, and watch over it from then on. Raises StartupError when it ends instead of serving."""
        await self._launch()
        assert self._process is not None  # noqa: S101
        exited = asyncio.create_task(self._process.wait())
        deadline = self._clock.monotonic() + READY_WITHIN_S
        while not self.is_ready:
            if exited.done() or self._clock.monotonic() > deadline:
                raise StartupError(f"Data worker {self.slot} did not start: see the log lines above.")
            await asyncio.sleep(0.01)
        self.supervisor = asyncio.create_task(self._supervise())

    async def _launch(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            order = WorkerOrder(
                slot=self.slot,
                config=self._order.config,
                data_dir=self._order.data_dir,
                listen_fd=self._listener.fileno(),
                link_fd=theirs.fileno(),
                drain_timeout=self._order.drain_timeout,
                has_embedded_store=self._order.has_embedded_store,
            )
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "proxy.worker",
                order.to_argument(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.stderr,  # standard output is the greeting's; an orphan must not hold its reader
                env={**os.environ, "SLUICEGATE_STORE_URL": self._store_url},
                pass_fds=(self._listener.fileno(), theirs.fileno()),
                start_new_session=True,  # Ctrl-C is for the control process only
            )
        ours.setblocking(False)
        reader, self._link = await asyncio.open_unix_connection(sock=ours)
        self._reading = asyncio.create_task(self._read_pulses(reader))

    async def _read_pulses(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            while await reader.read(64):
                self._last_pulse = self._clock.monotonic()
        self._last_pulse = None

    async def _supervise(self) -> None:
        failures = 0
        while True:
            assert self._process is not None  # noqa: S101
            started = self._clock.monotonic()
            code = await self._process.wait()
            self._last_pulse = None
            if self._link is not None:
                self._link.close()
            if self._ending.is_set():
                return
            failures = 0 if self._clock.monotonic() - started > 5 else failures + 1
            self._log.error("worker_died", slot=self.slot, exit_code=code)
            await asyncio.sleep(_RESTART_PAUSES_S[min(failures, len(_RESTART_PAUSES_S) - 1)])
            if not self._ending.is_set():
                await self._launch()
            if self._ending.is_set():
                self._process.terminate()  # the end was asked for while the replacement was being started

    async def end(self, within: float) -> None:
        """Ask it to drain; kill it when it has not ended in time."""
        self._ending.set()
        if self._process is None:
            return
        if self._process.returncode is None:
            self._process.terminate()
        supervisor = self.supervisor or asyncio.create_task(self._supervise())
        _, is_late = await asyncio.wait([supervisor], timeout=within)
        if is_late:
            self._log.error("worker_killed", slot=self.slot, reason="it was given no more time to end")
            self._process.kill()
            await supervisor


class Control:
    """The gateway as a whole. ``run`` serves until a signal comes."""

    def __init__(self, config: GatewayConfig, config_path: Path, data_dir: DataDir, clock: Clock) -> None:
        self._config = config
        self._config_path = config_path
        self._data_dir = data_dir
        self._clock = clock
        self._workers: list[Worker] = []
        self._listeners: list[socket.socket] = []
        self._is_draining = False
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()
        self._log = logger("control")

    async def run(self, announce: Callable[[Started], None]) -> None:
        """Start everything, call ``announce``, serve, and end in order. Raises StartupError when it can't start."""
        lock = self._data_dir.control_lock
        if not lock.take():
            raise StartupError(
                f"Another gateway uses the data directory {self._data_dir.path}: stop it, or set SLUICEGATE_DATA_DIR."
            )
        try:
            await self._run_locked(announce)
        finally:
            lock.give_back()

    async def _run_locked(self, announce: Callable[[Started], None]) -> None:
        has_predecessor = self._data_dir.mark_running()
        async with contextlib.AsyncExitStack() as cleanup:
            cleanup.callback(self._data_dir.mark_ended)
            self._catch_signals()
            control_socket = await self._bind(has_predecessor)
            cleanup.callback(self._close_listeners)
            store_url = await self._start_store(cleanup)
            store = make_store(store_url, self._clock)
            cleanup.push_async_callback(store.close)
            await self._check_store(store)
            metrics.wipe(self._data_dir.metrics_files)
            cleanup.push_async_callback(self._end_workers)
            await self._start_workers(store_url)
            await self._serve_control_port(control_socket, store, cleanup)
            server = self._config.server
            announce(Started(server.host, self._listeners[0].getsockname()[1], control_socket.getsockname()[1]))
            self._log.info("serving", workers=len(self._workers))
            await self._stop.wait()
            self._is_draining = True
            self._log.info("shutting_down", drain_timeout=server.drain_timeout)

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_stop_signal)
        loop.add_signal_handler(
            signal.SIGHUP,
            lambda: self._log.warning("reload_not_built", hint="restart the gateway to change its configuration"),
        )

    def _on_stop_signal(self) -> None:
        if self._stop.is_set():
            self._stop_now.set()  # asked twice: open answers are cut
        self._stop.set()

    # sockets ------------------------------------------------------------------------------------------------------------

    async def _bind(self, has_predecessor: bool) -> socket.socket:
        """Bind all sockets. Workers of a killed predecessor may need a moment to let go of theirs."""
        server = self._config.server
        deadline = self._clock.monotonic() + (PREDECESSOR_GONE_WITHIN_S if has_predecessor else 0.0)
        while True:
            try:
                control_socket = _bound(server.host, server.control_port)
                self._listeners = _bound_together(server.host, server.port, server.workers)
            except StartupError:
                self._close_listeners()
                if self._clock.monotonic() >= deadline:
                    raise
                await asyncio.sleep(0.05)
            else:
                return control_socket

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._listeners = []

    # store --------------------------------------------------------------------------------------------------------------

    async def _start_store(self, cleanup: contextlib.AsyncExitStack) -> str:
        if self._config.store_url is not None:
            return self._config.store_url.get_secret_value()
        embedded = EmbeddedStore(self._data_dir, self._clock)
        cleanup.push_async_callback(embedded.stop)
        await embedded.start()
        return embedded.url

    async def _check_store(self, store: RedisStore) -> None:
        try:
            await store.check_server()
        except StoreUnavailable:
            # Not a reason to stay down: it may come up after us, and requests say clearly what is missing until then.
            self._log.error("store_unavailable", hint="requests are answered 503 until the server at store.url answers")

    # workers ------------------------------------------------------------------------------------------------------------

    async def _start_workers(self, store_url: str) -> None:
        order = WorkerOrder(
            slot=0,
            config=str(self._config_path),
            data_dir=str(self._data_dir.path),
            listen_fd=-1,
            link_fd=-1,
            drain_timeout=self._config.server.drain_timeout,
            has_embedded_store=self._config.store_url is None,
        )
        self._workers = [Worker(slot, listener, order, store_url, self._clock) for slot, listener in enumerate(self._listeners)]
        await asyncio.gather(*(worker.start() for worker in self._workers))

    async def _end_workers(self) -> None:
        self._is_draining = True
        self._close_listeners()  # ours too, or connections would go on waiting in them
        ending = asyncio.gather(*(worker.end(self._config.server.drain_timeout + DRAIN_MARGIN_S) for worker in self._workers))
        hurry = asyncio.create_task(self._stop_now.wait())
        waited_for: list[asyncio.Future[Any]] = [ending, hurry]
        await asyncio.wait(waited_for, return_when=asyncio.FIRST_COMPLETED)
        if not ending.done():
            await asyncio.gather(*(worker.end(0.0) for worker in self._workers))
        await ending
        hurry.cancel()

    def _readiness(self) -> Readiness:
        return Readiness(sum(worker.is_ready for worker in self._workers), self._config.server.workers, self._is_draining)

    # control port -------------------------------------------------------------------------------------------------------

    async def _serve_control_port(
        self, control_socket: socket.socket, store: RedisStore, cleanup: contextlib.AsyncExitStack
    ) -> None:
        app = build_control_app(self._config, store, self._clock, self._readiness, self._data_dir.metrics_files)
        server = QuietServer(server_config(app, "httptools"))
        serving = asyncio.create_task(server.serve(sockets=[control_socket]))

        async def end() -> None:
            server.should_exit = True
            _, is_late = await asyncio.wait([serving], timeout=1.0)
            server.force_exit = bool(is_late)
            await serving

        cleanup.push_async_callback(end)
        await server.is_serving.wait()


def _bound(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if is_shared:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        bound.bind((host, port))
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        raise StartupError(_why_not_bound(host, port, error)) from None
    bound.setblocking(False)
    return bound


def _why_not_bound(host: str, port: int, error: OSError) -> str:
    where = f"Port {port} on {host}"
    if isinstance(error, PermissionError):
        return f"{where} may not be opened by this user: choose one above 1023 with --port or --control-port."
    if isinstance(error, socket.gaierror):
        return f"{host} is not an address of this machine: set server.host or --host to one that is."
    return f"{where} can't be opened ({error.strerror}): stop what listens there, or choose another with --port or --control-port."


def _bound_together(host: str, port: int, count: int) -> list[socket.socket]:
    """``count`` sockets on one port. A first bind without SO_REUSEPORT finds out whether anybody else is on it."""
    probe = _bound(host, port)
    port = probe.getsockname()[1]
    probe.close()
    bound: list[socket.socket] = []
    try:
        while len(bound) < count:
            bound.append(_bound(host, port, is_shared=True))
    except StartupError:
        for listener in bound:
            listener.close()
        raise
    return bound
