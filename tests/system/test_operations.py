"""What operators see and set: metrics, logs, health, the admin API, the store's address, the first start."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import stat
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2

from proxy.clock import Clock
from proxy.embedded_store import find_server
from tests.system.harness import Gateway, Setup, running

TPM = {"name": "tpm", "unit": "tokens", "rate": "1000/min"}
TURBO = {"name": "turbo", "unit": "requests", "rate": "7/day", "models": ["gpt-4-turbo"]}


async def test_counters_tell_what_happened(tmp_path: Path) -> None:
    """Requests, tokens and refusals are counted by tenant and model, by no label that a caller chose."""
    async with running(tmp_path, Setup(limits=[TPM, TURBO], workers=2)) as (gateway, _):
        for _ in range(3):
            await gateway.chat(max_tokens=5)
        await gateway.chat(max_tokens=5, stream=True)
        await gateway.chat(max_tokens=5000)
        await gateway.chat(script={"status": 500})
        await gateway.chat(key="sg-nobody")
        await gateway.chat(model="made-up-by-the-caller")
        await gateway.chat(path="/made-up-by-the-caller")
        samples = await gateway.samples()
        ok = 'endpoint="chat/completions",model="gpt-4o",outcome="ok",status_class="2xx",tenant="team"'
        assert samples[f"sluicegate_requests_total{{{ok}}}"] == 4
        by_outcome = _sum_by(samples, "sluicegate_requests_total", "outcome")
        assert by_outcome == {"ok": 5, "denied_limit": 1, "upstream_error": 1, "denied_auth": 1, "client_error": 1}
        assert _sum_by(samples, "sluicegate_limit_refusals_total", "limit") == {"tpm": 1}
        assert _sum_by(samples, "sluicegate_tokens_total", "direction") == {"input": 4 * 3, "output": 4 * 5}
        assert _sum_by(samples, "sluicegate_upstream_errors_total", "fault") == {"status_5xx": 1}
        assert "made-up-by-the-caller" not in await gateway.metrics()


def _sum_by(samples: dict[str, float], name: str, label: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for key, value in samples.items():
        if key.startswith(name + "{"):
            of = re.search(rf'[{{,]{label}="([^"]*)"', key)
            assert of is not None
            found[of[1]] = found.get(of[1], 0) + value
    return found


async def test_limit_gauges(tmp_path: Path) -> None:
    """rate_limit_remaining and rate_limit_total carry the six labels and the store's levels."""
    async with running(tmp_path, Setup(limits=[TPM, TURBO])) as (gateway, _):
        await gateway.chat(model="gpt-4-turbo", max_tokens=5)
        samples = await gateway.samples()
        labels = 'key="tenant:team",limit="turbo",model="gpt-4-turbo",service="test",tenant="team",unit="requests"'
        assert samples[f"rate_limit_remaining{{{labels}}}"] == 6
        assert samples[f"rate_limit_total{{{labels}}}"] == 7
        assert samples["sluicegate_store_up"] == 1


async def test_dead_store_costs_a_scrape_little(tmp_path: Path) -> None:
    """With the store paused a scrape takes 0.3 s at most for it, shows store_up 0 and no level; readyz says what is wrong (A17)."""
    async with running(tmp_path, Setup(limits=[TPM])) as (gateway, _):
        await gateway.chat()
        store = gateway.pids("sluicegate-store")[0]
        os.kill(store, signal.SIGSTOP)
        clock = Clock()
        started = clock.monotonic()
        samples = await gateway.samples()
        took = clock.monotonic() - started
        ready = await gateway.http.get(gateway.control_url + "/readyz")
        refused = await gateway.chat()
        os.kill(store, signal.SIGCONT)
        assert took < 1.0
        assert samples["sluicegate_store_up"] == 0
        assert not [name for name in samples if name.startswith("rate_limit")]
        assert (ready.status_code, ready.json()["problems"]) == (503, ["the limit store does not answer"])
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unavailable")
        await gateway.until(lambda: _is_ready(gateway))
        assert (await gateway.chat()).status_code == 200


async def _is_ready(gateway: Gateway) -> bool:
    return (await gateway.http.get(gateway.control_url + "/readyz")).status_code == 200


async def test_store_that_can_not_write_is_not_ready(tmp_path: Path) -> None:
    """A store that still reads but refuses writes is not ready, and the log says why."""
    async with _own_valkey(tmp_path, "--maxmemory", "1") as url:
        (tmp_path / "g").mkdir()
        setup = Setup(limits=[TPM], environment={"SLUICEGATE_STORE_URL": url})
        async with running(tmp_path / "g", setup) as (gateway, _):
            assert (await gateway.chat()).status_code == 503
            assert not await _is_ready(gateway)
            assert (await gateway.samples())["sluicegate_store_up"] == 0
            assert any("maxmemory" in str(line.get("reason")) for line in gateway.log_lines)


async def test_one_log_line_a_request(tmp_path: Path) -> None:
    """Each request is one JSON line with what operators ask for, and without a word of the prompt."""
    async with running(tmp_path, Setup(limits=[TPM])) as (gateway, _):
        answer = await gateway.chat(max_tokens=5, messages=[{"role": "user", "content": "a very private matter"}])
        await gateway.until(gateway.requests_logged)
        (line,) = gateway.requests_logged()
        assert line["request_id"] == answer.headers["x-request-id"]
        expected = {"tenant": "team", "model": "gpt-4o", "upstream": "sim", "status": 200, "outcome": "ok", "output_tokens": 5}
        assert {name: line[name] for name in expected} == expected
        assert line["upstream_key"] in ("key-0", "key-1")
        assert line["duration_ms"] > 0
        assert "private" not in gateway.log


async def test_health_and_unknown_paths(tmp_path: Path) -> None:
    """healthz and readyz answer, anything else on the control port is a 404 in OpenAI's shape, and /v1 is not there."""
    async with running(tmp_path) as (gateway, _):
        assert (await gateway.http.get(gateway.control_url + "/healthz")).json() == {"status": "ok"}
        assert (await gateway.http.get(gateway.control_url + "/readyz")).json() == {"status": "ready", "problems": []}
        for path in ("/v1/models", "/docs", "/openapi.json", "/nothing"):
            answer = await gateway.http.get(gateway.control_url + path, headers=gateway.headers())
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "not_found"
        assert (await gateway.http.post(gateway.control_url + "/healthz")).status_code == 405


async def test_admin_needs_its_token(tmp_path: Path) -> None:
    """The admin API shows every limit to the token's owner, and nothing to a tenant."""
    async with running(tmp_path, Setup(limits=[TPM, TURBO])) as (gateway, _):
        url = gateway.control_url + "/admin/limits"
        for headers in ({}, gateway.headers(), {"authorization": "Bearer x"}, {"authorization": gateway.admin_token}):
            assert (await gateway.http.get(url, headers=headers)).status_code == 401
        answer = await gateway.http.get(url, headers={"authorization": f"Bearer {gateway.admin_token}"})
        assert [row["limit"] for row in answer.json()["limits"]] == ["tpm", "turbo"]
        assert answer.json()["limits"][0]["remaining"] == 1000


@asynccontextmanager
async def _own_valkey(folder: Path, *options: str) -> AsyncIterator[str]:
    """A server that the gateway does not run itself."""
    socket_path = folder / "s"
    process = await asyncio.create_subprocess_exec(
        find_server(), "--port", "0", "--unixsocket", str(socket_path), "--save", "", "--dir", str(folder), *options,
        stdout=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        async with asyncio.timeout(10):
            while not socket_path.exists():
                await asyncio.sleep(0.01)
        yield f"unix://{socket_path}"
    finally:
        process.terminate()
        await process.wait()


async def test_shared_store_by_url(tmp_path: Path) -> None:
    """With a store URL no server of ours is started, and two gateways share one limit through it."""
    async with _own_valkey(tmp_path) as url:
        limits = [{"name": "rpd", "unit": "requests", "rate": "10/day"}]
        setup = Setup(limits=limits, environment={"SLUICEGATE_STORE_URL": url})
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
        async with running(tmp_path / "a", setup) as (first, _), running(tmp_path / "b", setup) as (second, _):
            assert first.pids("sluicegate-store") == []
            answers = await asyncio.gather(*(gateway.chat() for gateway in (first, second) for _ in range(20)))
            assert [answer.status_code for answer in answers].count(200) == 10


async def test_store_that_evicts_is_refused(tmp_path: Path) -> None:
    """A server whose maxmemory-policy would forget limits is refused in one sentence."""
    async with _own_valkey(tmp_path, "--maxmemory", "10mb", "--maxmemory-policy", "allkeys-lru") as url:
        gateway = Gateway(tmp_path, Setup(environment={"SLUICEGATE_STORE_URL": url}), "http://127.0.0.1:9/v1")
        output, errors, code = await _run_cli(gateway.environment, tmp_path, "serve", "--config", str(gateway.config_path))
        assert (code, output) == (2, "")
        assert "maxmemory-policy is allkeys-lru, which would forget limits; set it to noeviction" in errors


async def test_store_that_comes_up_later(tmp_path: Path) -> None:
    """A gateway that starts before its store is not ready, answers 503, and recovers by itself."""
    url = f"unix://{tmp_path}/s"
    async with running(tmp_path, Setup(limits=[TPM], environment={"SLUICEGATE_STORE_URL": url})) as (gateway, _):
        assert not await _is_ready(gateway)
        assert (await gateway.chat()).status_code == 503
        async with _own_valkey(tmp_path):
            await gateway.until(lambda: _is_ready(gateway))
            assert (await gateway.chat()).status_code == 200


async def _run_cli(environment: dict[str, str], folder: Path, *arguments: str) -> tuple[str, str, int]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "proxy", *arguments, env=environment, cwd=folder,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, errors = await process.communicate()
    assert process.returncode is not None
    return output.decode(), errors.decode(), process.returncode


async def test_demo_from_nothing(tmp_path: Path) -> None:
    """`sluicegate demo` in an empty folder prints lines that work when pasted, keeps its key, and never logs it."""
    keys = []
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLUICEGATE_", "OPENAI_"))}
    for _ in range(2):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "proxy", "demo", "--port", "0", "--control-port", "0", env=environment, cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        printed = ""
        async with asyncio.timeout(30):
            while "-d '" not in printed:
                printed += (await process.stdout.readline()).decode()
        base_url, key = re.search(r"OPENAI_BASE_URL=(\S+) OPENAI_API_KEY=(sg-\S+)", printed).groups()  # type: ignore[union-attr]
        keys.append(key)
        curl = re.search(r"(curl .*)\\\n\s*(-d '.*')", printed)
        assert curl is not None
        async with httpx2.AsyncClient(trust_env=False) as http:
            assert (await http.get(f"{base_url}/models", headers={"authorization": f"Bearer {key}"})).status_code == 200
        shell = await asyncio.create_subprocess_shell(f"{curl[1]} {curl[2]} -s", stdout=asyncio.subprocess.PIPE)
        answer, _ = await shell.communicate()
        assert json.loads(answer)["choices"][0]["message"]["content"]
        process.send_signal(signal.SIGINT)
        _, errors = await process.communicate()
        assert process.returncode == 0
        assert key not in errors.decode()
        assert "Traceback" not in errors.decode()
    assert keys[0] == keys[1]
    kept = tmp_path / ".sluicegate" / "tenant.key"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert kept.read_text().strip() == keys[0]


async def test_own_key_pasted_as_upstream_secret(tmp_path: Path) -> None:
    """Who pastes a key of this gateway as the upstream's is told so by name."""
    environment = {**os.environ, "OPENAI_API_KEY": "sg-pasted-in-the-wrong-place", "SLUICEGATE_DATA_DIR": str(tmp_path / "data")}
    config = Path(__file__).parents[2] / "config" / "gateway.yaml"
    output, errors, code = await _run_cli(environment, tmp_path, "serve", "--config", str(config))
    assert (code, output) == (2, "")
    assert "upstreams.openai.keys[0].secret: this is a key of this gateway" in errors
    assert "wrong-place" not in errors
