"""One data worker: a process that serves ``/v1/*`` on the socket its control process gave it, and drains when told to.

Decides how serving begins and ends; which workers exist is ``server.py``'s. Holds no state that matters: all of it is in the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import setproctitle
import uvicorn
import uvloop
from prometheus_client import CollectorRegistry

from proxy import metrics
from proxy.app import DataPlane, build_data_plane, make_store
from proxy.clock import Clock
from proxy.config import load_config
from proxy.data_dir import DataDir
from proxy.embedded_store import shut_down_if_last
from proxy.errors import StartupError
from proxy.logs import configure, logger
from proxy.protocol import BoundedHttpProtocol
from proxy.settings import read_settings

PULSE_S = 1.0
READY, PULSE = b"r", b"."
KEEP_ALIVE_S = 75
CUT_WITHIN_S = 2.0  # after the drain time: for the last events to reach their clients


@dataclass(frozen=True, slots=True)
class WorkerOrder:
    """What control tells a worker it starts. Nothing secret: the store's address travels in the environment."""

    slot: int
    config: str
    data_dir: str
    listen_fd: int
    link_fd: int
    drain_timeout: float
    has_embedded_store: bool

    def to_argument(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))


class QuietServer(uvicorn.Server):
    """uvicorn's server without its signal handling: control and this module decide when serving ends."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_serving = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept."""
        await super().startup(sockets)
        self.is_serving.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


def server_config(app: object, http: type[asyncio.Protocol] | str) -> uvicorn.Config:
    """How both ports are served: no headers, logs, proxies or upgrades of uvicorn's own."""
    return uvicorn.Config(
        app,  # type: ignore[arg-type]  # an ASGI application of any kind
        http=http,
        ws="none",
        interface="asgi3",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
    )


def main() -> None:
    """Entry point of ``python -m proxy.worker``."""
    order = WorkerOrder(**json.loads(sys.argv[1]))
    setproctitle.setproctitle(f"sluicegate: data worker {order.slot}")
    settings = read_settings()
    configure(settings.log_level, settings.log_format, worker=order.slot)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(order))
    except (StartupError, OSError) as error:
        logger("worker").error("worker_failed", reason=str(error))
        sys.exit(2)


async def _run(order: WorkerOrder) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    data_dir = DataDir(Path(order.data_dir))
    workers = data_dir.workers_lock
    workers.take(is_shared=True)
    metrics.use_slot(data_dir.metrics_files, order.slot)
    config = load_config(Path(order.config), os.environ.get)
    clock = Clock()
    plane = build_data_plane(config, make_store(os.environ["SLUICEGATE_STORE_URL"], clock), clock, CollectorRegistry())
    reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=order.link_fd))
    orphaned = asyncio.create_task(_watch_link(reader, stop))

    server = QuietServer(server_config(plane.app, BoundedHttpProtocol))
    serving = asyncio.create_task(server.serve(sockets=[socket.socket(fileno=order.listen_fd)]))
    await server.is_serving.wait()
    gc.freeze()  # what exists now lives as long as the process: later collections need not look at it
    writer.write(READY)
    pulse = asyncio.create_task(_pulse(writer))
    await stop.wait()
    pulse.cancel()
    await _drain(server, serving, plane, order.drain_timeout)
    if order.has_embedded_store and orphaned.done():
        await shut_down_if_last(data_dir, workers)
    orphaned.cancel()
    writer.close()


async def _watch_link(reader: asyncio.StreamReader, stop: asyncio.Event) -> None:
    """The link closes when control is gone, however that happened: then this worker drains."""
    with contextlib.suppress(ConnectionError):
        while await reader.read(64):
            continue
    stop.set()


async def _pulse(writer: asyncio.StreamWriter) -> None:
    """Tell control that the event loop turns."""
    while True:
        await asyncio.sleep(PULSE_S)
        writer.write(PULSE)


async def _drain(server: QuietServer, serving: asyncio.Task[None], plane: DataPlane, timeout: float) -> None:
    """Stop accepting, let open answers finish until ``timeout``, then end them with an error that clients understand."""
    log = logger("worker")
    log.info("draining", timeout_seconds=timeout)
    server.should_exit = True
    _, still_open = await asyncio.wait([serving], timeout=timeout)
    if still_open:
        log.warning("drain_timeout", open_requests=len(server.server_state.tasks))
        plane.endpoint.end_all()
        _, still_open = await asyncio.wait([serving], timeout=CUT_WITHIN_S)
    if still_open:
        server.force_exit = True
        await asyncio.wait([serving], timeout=1.0)
    await plane.close()
    log.info("drained")


if __name__ == "__main__":
    main()
