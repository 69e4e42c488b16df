"""The command line: parses arguments, calls, and turns the outcome into an exit code. What is served is decided elsewhere.

Exit codes: 0 ended in order, 2 could not start (one sentence on standard error says why).
"""

from __future__ import annotations

import asyncio
import getpass
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop

from proxy import __version__
from proxy.clock import Clock
from proxy.config import GatewayConfig, load_config
from proxy.data_dir import TENANT_KEY_VARIABLE, DataDir, new_tenant_key
from proxy.errors import StartupError
from proxy.logs import configure
from proxy.settings import Settings, checked_secret, read_settings
from proxy.tenants import hash_key

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="An OpenAI-compatible reverse proxy with exact limits per tenant, model and upstream key.",
)

HostOption = Annotated[str | None, typer.Option("--host", help="Address of both ports; beats server.host.")]
PortOption = Annotated[
    int | None, typer.Option("--port", min=0, max=65535, help="Data port (/v1); beats server.port. 0: a free one.")
]
ControlPortOption = Annotated[
    int | None,
    typer.Option("--control-port", min=0, max=65535, help="Control port (/metrics); beats server.control_port."),
]
WorkersOption = Annotated[int | None, typer.Option("--workers", min=1, max=64, help="Data processes; beats server.workers.")]


def main() -> None:
    """Entry point. No traceback reaches the user for what the user can mend."""
    try:
        app()
    except StartupError as error:
        print(f"sluicegate: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(0)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"sluicegate {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    del version  # handled by its callback


@app.command()
def serve(
    config: Annotated[Path | None, typer.Option("--config", "-c", help="Configuration file; beats SLUICEGATE_CONFIG.")] = None,
    host: HostOption = None,
    port: PortOption = None,
    control_port: ControlPortOption = None,
    workers: WorkersOption = None,
) -> None:
    """Serve the gateway until SIGTERM or Ctrl-C."""
    settings = read_settings()
    path = config or settings.config
    overrides = {"host": host, "port": port, "control_port": control_port, "workers": workers}
    _run(_serve(settings, path, overrides, note=None))


@app.command()
def demo(
    host: HostOption = None,
    port: PortOption = None,
    control_port: ControlPortOption = None,
    workers: WorkersOption = None,
) -> None:
    """Serve a simulated OpenAI behind the gateway: no key and no configuration needed."""
    settings = read_settings()
    overrides = {"host": host, "port": port, "control_port": control_port, "workers": workers}
    _run(_demo(settings, overrides))


@app.command()
def simulate(
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0: a free one.")] = 8080,
    latency: Annotated[float, typer.Option("--latency", min=0, help="Seconds before each answer.")] = 0.0,
    token_pace: Annotated[float, typer.Option("--token-pace", min=0, help="Seconds between streamed tokens.")] = 0.0,
    tokens: Annotated[int, typer.Option("--tokens", min=0, help="Tokens of an answer whose request sets no bound.")] = 16,
) -> None:
    """Run the simulated OpenAI upstream alone."""
    _run(_simulate(host, port, {"latency_s": latency, "token_pace_s": token_pace, "tokens": tokens}))


@app.command("check-config")
def check_config(file: Annotated[Path, typer.Argument(help="YAML or JSON configuration.")]) -> None:
    """Check a configuration file: exit code 0 when it is usable, else 2 and a line per problem."""
    settings = read_settings()
    config = load_config(file, _lookup(cache(lambda: _kept_tenant_key(settings) or new_tenant_key(Clock()))))
    limits = len(config.bound_limits)
    keys = sum(len(upstream.keys) for upstream in config.upstreams.values())
    print(
        f"{file}: usable: {len(config.upstreams)} upstreams with {keys} keys, {len(config.models)} models, "
        f"{len(list(config.tenants))} tenants with {limits} limits"
    )


@app.command("hash-key")
def hash_key_command() -> None:
    """Read a tenant key from standard input and print the hash that goes into the configuration."""
    is_typed = sys.stdin.isatty()
    key = (getpass.getpass("Key: ") if is_typed else sys.stdin.buffer.readline().decode("utf-8", "surrogateescape")).strip()
    if not key:
        raise StartupError("Expected a key on standard input, got nothing.")
    try:
        print(f"sha256:{hash_key(checked_secret(key, source='the key').get_secret_value())}")
    except ValueError as error:
        raise StartupError(str(error)) from None


# serving -----------------------------------------------------------------------------------------------------------------


def _run(serving: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serving)


async def _serve(settings: Settings, path: Path, overrides: dict[str, Any], note: str | None) -> None:
    # Here, since it takes as long as everything else together and no other command needs it.
    from proxy.server import Control, Started  # noqa: PLC0415

    configure(settings.log_level, settings.log_format, process="control")
    clock = Clock()
    data_dir = DataDir.open(settings.data_dir)
    made: list[str] = []

    def own_key() -> str:
        key = data_dir.make_tenant_key(clock)
        os.environ[TENANT_KEY_VARIABLE] = key  # the workers read the same file again
        made.append(key)
        return key

    config = _with_settings(load_config(path, _lookup(own_key)), settings, overrides)

    def announce(started: Started) -> None:
        host = "127.0.0.1" if started.host in ("0.0.0.0", "::") else started.host  # noqa: S104  (compared, not bound)
        host = f"[{host}]" if ":" in host else host
        shown_key = made[0] if made else "<a key of one of your tenants>"
        model = next(iter(config.models))
        print(_greeting(host, started.port, started.control_port, key=shown_key, model=model, note=note), flush=True)

    await Control(config, path, data_dir, clock).run(announce)


async def _demo(settings: Settings, overrides: dict[str, Any]) -> None:
    async with _simulator("127.0.0.1", 0, {"token_pace_s": 0.02}) as base_url:
        clock = Clock()
        os.environ["SLUICEGATE_DEMO_UPSTREAM"] = base_url
        os.environ["SLUICEGATE_DEMO_KEY_1"] = "sk-demo-" + clock.token(8)
        os.environ["SLUICEGATE_DEMO_KEY_2"] = "sk-demo-" + clock.token(8)
        note = f"demo: answers come from a simulated OpenAI at {base_url}; set OPENAI_API_KEY and start again for the real one"
        with resources.as_file(resources.files("proxy") / "demo.yaml") as path:
            await _serve(settings, path, overrides, note)


async def _simulate(host: str, port: int, script: dict[str, Any]) -> None:
    async with _simulator(host, port, script) as base_url:
        print(f"simulated OpenAI at {base_url} (any key is accepted); Ctrl-C ends it", flush=True)
        await asyncio.Event().wait()


@asynccontextmanager
async def _simulator(host: str, port: int, script: dict[str, Any]) -> AsyncIterator[str]:
    from proxy.simulator import Script, Simulator  # noqa: PLC0415
    from proxy.simulator.server import RunningSimulator  # noqa: PLC0415

    running = RunningSimulator(Simulator(Clock(), default_script=Script(**script), keep_bodies=False), host, port)
    try:
        await running.start()
    except OSError as error:
        raise StartupError(f"Port {port} on {host} can't be opened ({error.strerror}): choose another with --port.") from None
    try:
        yield running.base_url
    finally:
        await running.stop()


def _with_settings(config: GatewayConfig, settings: Settings, overrides: dict[str, Any]) -> GatewayConfig:
    """The environment beats the file, an option beats both."""
    server = replace(config.server, **{name: value for name, value in overrides.items() if value is not None})
    return replace(
        config,
        server=server,
        store_url=settings.store_url or config.store_url,
        admin_token=settings.admin_token or config.admin_token,
    )


def _lookup(own_key: Callable[[], str]) -> Callable[[str], str | None]:
    """Environment variables; the tenant key of our own is made when the file asks for it and nobody set it."""

    def look(name: str) -> str | None:
        value = os.environ.get(name)
        if name == TENANT_KEY_VARIABLE and not value:
            return own_key()
        return value

    return look


def _kept_tenant_key(settings: Settings) -> str | None:
    return DataDir(settings.data_dir).tenant_key()


def _greeting(host: str, port: int, control_port: int, *, key: str, model: str, note: str | None) -> str:
    base_url = f"http://{host}:{port}/v1"
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    lines = [
        f"Sluicegate {__version__}",
        *([f"  {note}"] if note else []),
        f"  metrics at http://{host}:{control_port}/metrics, readiness at http://{host}:{control_port}/readyz",
        "",
        "Paste this where your OpenAI client runs:",
        "",
        f"  export OPENAI_BASE_URL={base_url} OPENAI_API_KEY={key}",
        "",
        "or try:",
        "",
        f"  curl {base_url}/chat/completions -H 'Authorization: Bearer {key}' -H 'Content-Type: application/json' \\",
        f"    -d '{body}'",
        "",
    ]
    return "\n".join(lines)
