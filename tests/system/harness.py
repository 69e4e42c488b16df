"""Runs the gateway as its users do: as processes, from a configuration file, with a simulated upstream beside it.

Every gateway is given secrets of its own and searched for them when it ends: in its log, in what it exposes, in its error bodies.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from proxy.clock import Clock
from proxy.simulator import RunningSimulator, Simulator

START_WITHIN_S = 30.0
END_WITHIN_S = 20.0


def upstream_secret() -> str:
    """An upstream key that occurs nowhere else."""
    return "sk-" + secrets.token_hex(16)


@dataclass
class Setup:
    """What a gateway is started with. ``limits`` are of tenant ``team``, whose key is ``key``; ``other`` has none."""

    limits: list[dict[str, Any]] = field(default_factory=list)
    workers: int = 1
    server: dict[str, Any] = field(default_factory=dict)
    keys: int = 2
    tenant_models: list[str] | None = None
    environment: dict[str, str] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)  # further top-level options


class Gateway:
    """A gateway that runs in processes of its own."""

    def __init__(self, folder: Path, setup: Setup, base_url: str) -> None:
        self.folder = folder
        self.setup = setup
        self.key = "sg-" + secrets.token_hex(24)
        self.other_key = "sg-" + secrets.token_hex(24)
        self.upstream_keys = [upstream_secret() for _ in range(setup.keys)]
        self.admin_token = "admin-" + secrets.token_hex(16)
        self.process: asyncio.subprocess.Process | None = None
        self.base_url = ""
        self.control_url = ""
        self.seen_texts: list[str] = []  # everything that left the gateway, to be searched for secrets
        self.config_path = folder / "gateway.yaml"
        self.config_path.write_text(json.dumps(self._config(base_url)), "utf-8")  # JSON is YAML
        self._http: httpx2.AsyncClient | None = None
        self._output: asyncio.Task[None] | None = None

    def _config(self, base_url: str) -> dict[str, Any]:
        tenant = {"keys": ["${TEAM_KEY}"], "limits": self.setup.limits}
        if self.setup.tenant_models is not None:
            tenant["models"] = self.setup.tenant_models
        return {
            "service": "test",
            "server": {"port": 0, "control_port": 0, "workers": self.setup.workers, "drain_timeout": "5s", **self.setup.server},
            "admin": {"token": "${ADMIN_TOKEN}"},
            "upstreams": {
                "sim": {
                    "base_url": base_url,
                    "keys": [{"id": f"key-{i}", "secret": f"${{UPSTREAM_KEY_{i}}}"} for i in range(self.setup.keys)],
                }
            },
            "models": {
                "gpt-4o": {"upstream": "sim"},
                "gpt-4-turbo": {"upstream": "sim"},
                "text-embedding-3-small": {"upstream": "sim"},
                "fast": {"upstream": "sim", "upstream_model": "gpt-4o-mini"},
            },
            **self.setup.more,
            "tenants": {"team": tenant, "other": {"keys": ["${OTHER_KEY}"]}},
        }

    @property
    def log_path(self) -> Path:
        return self.folder / "gateway.log"

    @property
    def log(self) -> str:
        return self.log_path.read_text("utf-8") if self.log_path.exists() else ""

    @property
    def log_lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.splitlines()]

    def requests_logged(self) -> list[dict[str, Any]]:
        return [line for line in self.log_lines if line["event"] == "request"]

    @property
    def data_dir(self) -> Path:
        return self.folder / "data"

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLUICEGATE_", "OPENAI_"))}
        return kept | {
            "SLUICEGATE_DATA_DIR": str(self.data_dir),
            "SLUICEGATE_LOG_FORMAT": "json",
            "SLUICEGATE_LOG_LEVEL": "debug",
            "TEAM_KEY": self.key,
            "OTHER_KEY": self.other_key,
            "ADMIN_TOKEN": self.admin_token,
            **{f"UPSTREAM_KEY_{i}": secret for i, secret in enumerate(self.upstream_keys)},
            **self.setup.environment,
        }

    @property
    def secrets(self) -> list[str]:
        return [self.key, self.other_key, self.admin_token, *self.upstream_keys]

    # processes -----------------------------------------------------------------------------------------------------------

    async def start(self, *options: str) -> None:
        """Start it, and return when it has printed where it serves."""
        with self.log_path.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "proxy",
                "serve",
                "--config",
                str(self.config_path),
                *options,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=self.environment,
                start_new_session=True,
            )
        printed = ""
        assert self.process.stdout is not None
        async with asyncio.timeout(START_WITHIN_S):
            while "curl" not in printed:
                line = await self.process.stdout.readline()
                assert line, f"the gateway ended with {await self.process.wait()}:\n{printed}\n{self.log}"
                printed += line.decode()
        self._output = asyncio.create_task(self._drain_output(self.process.stdout))
        self.base_url = re.search(r"OPENAI_BASE_URL=(\S+)", printed)[1]  # type: ignore[index]
        self.control_url = re.search(r"metrics at (http://[^/]+)/metrics", printed)[1]  # type: ignore[index]

    async def _drain_output(self, stream: asyncio.StreamReader) -> None:
        while await stream.read(65536):
            continue

    async def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal to the control process and return its exit code."""
        assert self.process is not None
        if self.process.returncode is None:
            self.process.send_signal(number)
        return await self.exit_code()

    async def exit_code(self) -> int:
        assert self.process is not None
        async with asyncio.timeout(END_WITHIN_S):
            if self._output is not None:
                await self._output
            return await self.process.wait()

    def pids(self, title: str) -> list[int]:
        """Processes of this gateway whose title begins so: ``sluicegate: data worker``, ``sluicegate-store``."""
        return [pid for pid, command in _commands() if command.startswith(title) and self._is_ours(pid)]

    def _is_ours(self, pid: int) -> bool:
        with contextlib.suppress(OSError):
            return Path(f"/proc/{pid}/cwd").readlink() == self.data_dir / "store" or _opens(pid, self.data_dir)
        return False

    def all_pids(self) -> list[int]:
        return self.pids("sluicegate")

    async def until(self, holds: Any, within: float = 5.0) -> float:
        """Wait until ``holds()`` (plain or async) is true; the seconds it took. Fails after ``within``."""
        clock = Clock()
        started = clock.monotonic()
        while True:
            outcome = holds()
            if asyncio.iscoroutine(outcome):
                outcome = await outcome
            took = clock.monotonic() - started
            if outcome:
                return took
            assert took < within, f"did not come true within {within} s: {holds}\n{self.log[-4000:]}"
            await asyncio.sleep(0.01)

    # talking to it -------------------------------------------------------------------------------------------------------

    @property
    def http(self) -> httpx2.AsyncClient:
        if self._http is None:
            self._http = httpx2.AsyncClient(timeout=30.0, trust_env=False, limits=httpx2.Limits(max_connections=None))
        return self._http

    def headers(self, key: str | None = None, script: dict[str, Any] | None = None) -> dict[str, str]:
        found = {"authorization": f"Bearer {key or self.key}", "content-type": "application/json"}
        if script:
            found["x-sim-script"] = json.dumps(script)
        return found

    def body(self, **members: Any) -> dict[str, Any]:
        return {"model": "gpt-4o", "messages": [{"role": "user", "content": "Hello there"}], **members}

    async def chat(
        self, *, key: str | None = None, script: dict[str, Any] | None = None, path: str = "/chat/completions", **members: Any
    ) -> httpx2.Response:
        """One call, without any retry."""
        response = await self.http.post(
            self.base_url + path, headers=self.headers(key, script), content=json.dumps(self.body(**members))
        )
        self.seen_texts.append(response.text)
        return response

    async def metrics(self) -> str:
        text = (await self.http.get(self.control_url + "/metrics")).text
        self.seen_texts.append(text)
        return text

    async def samples(self) -> dict[str, float]:
        """Every sample by ``name{labels}``."""
        return parse(await self.metrics())

    async def requests_counted(self) -> float:
        return sum(value for name, value in (await self.samples()).items() if name.startswith("sluicegate_requests_total"))

    async def remaining(self, limit: str) -> float:
        """What the metrics say is left of one of ``team``'s limits."""
        for name, value in (await self.samples()).items():
            if name.startswith("rate_limit_remaining") and f'limit="{limit}"' in name:
                return value
        raise AssertionError(f"no gauge for {limit}")

    async def used(self, limit: str) -> float:
        total = next(spec for spec in self.setup.limits if spec["name"] == limit)
        return int(total.get("burst", total["rate"].split("/")[0])) - await self.remaining(limit)

    # the end -------------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        if self._http is not None:
            await self._http.aclose()
        if self.process is not None and self.process.returncode is None:
            await self.end()
        for pid in self.all_pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def assert_no_secret_leaked(self) -> None:
        """No secret stands in the log, in anything that was answered, or in the store's and metrics' files."""
        places = {"the log": self.log, "an answer": "\n".join(self.seen_texts)}
        for path in self.data_dir.rglob("*"):
            if path.is_file():
                places[str(path)] = path.read_bytes().decode("latin-1")
        for place, text in places.items():
            for secret in self.secrets:
                assert secret not in text, f"a secret stands in {place}"
        assert "Traceback" not in self.log, self.log


def parse(text: str) -> dict[str, float]:
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in text.splitlines() if line[:1] != "#")}


def _commands() -> Iterator[tuple[int, str]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                yield int(entry.name), (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")


def _opens(pid: int, folder: Path) -> bool:
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(entry.readlink()).startswith(str(folder)):
                return True
    return False


@asynccontextmanager
async def running(folder: Path, setup: Setup | None = None) -> AsyncIterator[tuple[Gateway, Simulator]]:
    """A gateway and its simulated upstream. At the end: everything stopped, and no secret found anywhere."""
    simulator = Simulator(Clock())
    async with RunningSimulator(simulator) as upstream:
        gateway = Gateway(folder, setup or Setup(), upstream.base_url)
        try:
            await gateway.start()
            yield gateway, simulator
        finally:
            await gateway.close()
        gateway.assert_no_secret_leaked()
