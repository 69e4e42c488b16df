"""Processes that die, end, and come back: nothing is lost, nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import stat
import sys
from pathlib import Path

import httpx2

from tests.system.harness import Gateway, Setup, running

RPD = {"name": "rpd", "unit": "requests", "rate": "100000/day"}


async def _load(gateway: Gateway, stop: asyncio.Event) -> dict[str, int]:
    """Calls one after the other on fresh connections until told to stop; how they ended."""
    ended = {"ok": 0, "lost": 0, "refused": 0}
    while not stop.is_set():
        try:
            async with httpx2.AsyncClient(trust_env=False, timeout=10) as http:
                answer = await http.post(gateway.base_url + "/chat/completions", headers=gateway.headers(), json=gateway.body())
            ended["ok" if answer.status_code == 200 else "refused"] += 1
        except httpx2.TransportError:
            ended["lost"] += 1
    return ended


async def test_killed_worker_is_replaced_under_load(tmp_path: Path) -> None:
    """After kill -9 of a data worker the others go on, it is back within 2 s, and totals never fall."""
    async with running(tmp_path, Setup(limits=[RPD], workers=2)) as (gateway, _):
        stop = asyncio.Event()
        load = [asyncio.create_task(_load(gateway, stop)) for _ in range(4)]
        await gateway.until(lambda: len(gateway.requests_logged()) > 50)
        counted = await gateway.requests_counted()
        victim = gateway.pids("sluicegate: data worker 0")[0]
        os.kill(victim, signal.SIGKILL)

        async def is_back() -> bool:
            nonlocal counted
            now = await gateway.requests_counted()
            assert now >= counted, "a total fell"
            counted = now
            ready = (await gateway.http.get(gateway.control_url + "/readyz")).status_code == 200
            return ready and gateway.pids("sluicegate: data worker 0") not in ([], [victim])

        took = await gateway.until(is_back, within=10.0)
        await gateway.until(lambda: any(line["worker"] == 0 for line in gateway.requests_logged()[-20:]))
        stop.set()
        ended = [await task for task in load]
        assert took < 2.0
        assert sum(end["lost"] for end in ended) <= 4, "more was lost than was in flight in the killed worker"
        assert sum(end["ok"] for end in ended) > 50
        assert await gateway.requests_counted() >= counted


async def test_killed_control_leaves_nothing_behind(tmp_path: Path) -> None:
    """After kill -9 of control its workers and store end by themselves; the next start works and limits remember."""
    async with running(tmp_path, Setup(limits=[RPD], workers=2)) as (gateway, _):
        for _ in range(5):
            await gateway.chat()
        assert await gateway.used("rpd") == 5
        await gateway.end(signal.SIGKILL)
        await gateway.until(lambda: gateway.all_pids() == [])
        await gateway.start()
        assert await gateway.used("rpd") == 5
        assert (await gateway.chat()).status_code == 200


async def test_killed_control_and_start_at_once(tmp_path: Path) -> None:
    """The same without a pause between: the new gateway takes ports and store over from the dying one, on the same port."""
    async with running(tmp_path, Setup(limits=[RPD])) as (gateway, _):
        await gateway.chat()
        port = gateway.base_url.split(":")[2].split("/")[0]
        await gateway.end(signal.SIGKILL)
        await gateway.start("--port", port)
        assert await gateway.used("rpd") == 1
        assert (await gateway.chat()).status_code == 200


async def test_everything_killed_but_the_store(tmp_path: Path) -> None:
    """A store that outlived everybody else is ended by the next start, which goes on with its data."""
    async with running(tmp_path, Setup(limits=[RPD])) as (gateway, _):
        await gateway.chat()
        store = gateway.pids("sluicegate-store")
        for pid in gateway.pids("sluicegate: data worker"):
            os.kill(pid, signal.SIGSTOP)  # so that it can't end the store in an orderly way
        await gateway.end(signal.SIGKILL)
        for pid in gateway.pids("sluicegate: data worker"):
            os.kill(pid, signal.SIGKILL)
        assert gateway.pids("sluicegate-store") == store
        await gateway.start()
        assert gateway.pids("sluicegate-store") not in ([], store)
        assert await gateway.used("rpd") == 1


async def test_killed_while_the_store_starts(tmp_path: Path) -> None:
    """A control process that is killed as soon as its store runs leaves one that the next start finds and ends."""
    async with running(tmp_path, Setup(limits=[RPD])) as (gateway, _):
        await gateway.chat()
        await gateway.end()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "proxy", "serve", "--config", str(gateway.config_path)),
            env=gateway.environment,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        await gateway.until(lambda: gateway.pids("sluicegate-store"), within=20.0)
        process.kill()
        await process.wait()
        left_behind = gateway.pids("sluicegate-store")
        assert left_behind
        await gateway.start()
        assert gateway.pids("sluicegate-store") not in ([], left_behind)
        assert await gateway.used("rpd") == 1


async def test_killed_store_comes_back_with_its_memory(tmp_path: Path) -> None:
    """After kill -9 the embedded store is back within a second, and limits remember what was used."""
    async with running(tmp_path, Setup(limits=[RPD])) as (gateway, _):
        for _ in range(5):
            await gateway.chat()
        os.kill(gateway.pids("sluicegate-store")[0], signal.SIGKILL)

        async def answers() -> bool:
            answer = await gateway.chat()
            assert answer.status_code in (200, 503)
            if answer.status_code == 503:
                assert answer.json()["error"]["code"] == "store_unavailable"
                assert answer.headers["retry-after"] == "1"
            return answer.status_code == 200

        assert await gateway.until(answers) < 1.0
        assert await gateway.used("rpd") == 6


async def test_stream_finishes_while_draining(tmp_path: Path) -> None:
    """SIGTERM during a short stream: it finishes, new connections are refused, exit code 0 (D31)."""
    async with running(tmp_path, Setup()) as (gateway, simulator):
        script = {"hold": "gate", "hold_after": 2}
        async with gateway.http.stream(
            "POST", gateway.base_url + "/chat/completions", headers=gateway.headers(script=script), json=gateway.body(stream=True)
        ) as response:
            pieces = response.aiter_text()
            text = await anext(pieces)
            assert gateway.process is not None
            gateway.process.send_signal(signal.SIGTERM)
            await gateway.until(lambda: any(line["event"] == "draining" for line in gateway.log_lines))
            await gateway.until(lambda: _is_refused(gateway))
            simulator.release("gate")
            text += "".join([piece async for piece in pieces])
        assert text.endswith("data: [DONE]\n\n")
        assert "error" not in text
        assert await gateway.exit_code() == 0


async def _is_refused(gateway: Gateway) -> bool:
    host, port = gateway.base_url.split("/")[2].split(":")
    try:
        _, writer = await asyncio.open_connection(host, int(port))
    except OSError:
        return True
    writer.close()
    return False


async def test_stream_ends_at_drain_timeout(tmp_path: Path) -> None:
    """A stream that outlasts drain_timeout ends with an in-stream error, a silent call with 503; exit code 0 (D31)."""
    async with running(tmp_path, Setup(server={"drain_timeout": "500ms"})) as (gateway, simulator):
        silent = asyncio.create_task(gateway.chat(script={"hang": "headers"}))
        streamed = asyncio.create_task(gateway.chat(stream=True, script={"hang_after": 2}))
        await simulator.wait_for(lambda log: sum(seen.tokens_sent for seen in log) == 2 and len(log) == 2)
        assert await gateway.end() == 0
        assert (await silent).status_code == 503
        events = (await streamed).text.strip().split("\n\n")
        assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "gateway_shutting_down"
        assert events[-1] == "data: [DONE]"


async def test_interrupt_ends_in_order(tmp_path: Path) -> None:
    """Ctrl-C: exit code 0, no traceback, no process left."""
    async with running(tmp_path, Setup(workers=2)) as (gateway, _):
        await gateway.chat()
        assert await gateway.end(signal.SIGINT) == 0
        assert gateway.all_pids() == []


async def test_second_signal_cuts_the_drain_short(tmp_path: Path) -> None:
    """Who asks twice does not wait for open answers."""
    async with running(tmp_path, Setup(server={"drain_timeout": "60s"})) as (gateway, simulator):
        call = asyncio.create_task(gateway.chat(script={"hang": "headers"}))
        await simulator.wait_for(lambda log: len(log) == 1)
        assert gateway.process is not None
        gateway.process.send_signal(signal.SIGINT)
        await gateway.until(lambda: any(line["event"] == "draining" for line in gateway.log_lines))
        assert await gateway.end(signal.SIGINT) == 0
        assert isinstance((await asyncio.gather(call, return_exceptions=True))[0], httpx2.TransportError)


async def _fails(gateway: Gateway, *options: str, **environment: str) -> str:
    """Start a second time; the one line on standard error that it must end with."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "proxy", "serve", "--config", str(gateway.config_path), *options),
        env=gateway.environment | environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()
    lines = [line for line in errors.decode().splitlines() if not line.startswith("{")]
    assert process.returncode == 2, errors
    assert output == b""
    assert len(lines) == 1, errors
    return lines[0]


async def test_second_gateway_on_the_same_data_directory(tmp_path: Path) -> None:
    """It is refused in one sentence, and the first one is not disturbed."""
    async with running(tmp_path) as (gateway, _):
        line = await _fails(gateway)
        assert line.startswith(f"sluicegate: Another gateway uses the data directory {gateway.data_dir}")
        assert (await gateway.chat()).status_code == 200


async def test_port_in_use(tmp_path: Path) -> None:
    """A data or control port in use is one sentence each; a gateway's own shared port counts as in use."""
    async with running(tmp_path, Setup(workers=2)) as (gateway, _):
        port = gateway.base_url.split(":")[2].split("/")[0]
        other = {"SLUICEGATE_DATA_DIR": str(tmp_path / "other")}
        line = await _fails(gateway, "--port", port, **other)
        assert line.startswith(f"sluicegate: Port {port} on 127.0.0.1 can't be opened (Address already in use)")
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            control_port = taken.getsockname()[1]
            line = await _fails(gateway, "--control-port", str(control_port), **other)
            assert f"Port {control_port} on 127.0.0.1 can't be opened" in line


async def test_data_directory_is_private(tmp_path: Path) -> None:
    """The data directory and the store's socket are for their owner only."""
    async with running(tmp_path) as (gateway, _):
        assert stat.S_IMODE(gateway.data_dir.stat().st_mode) == 0o700
        store_socket = Path((gateway.data_dir / "store.socket").read_text())
        assert stat.S_IMODE(store_socket.stat().st_mode) == 0o600
        assert stat.S_IMODE(store_socket.parent.stat().st_mode) == 0o700
        await gateway.end()
        assert not store_socket.parent.exists()


async def test_hangup_says_that_reload_is_not_built(tmp_path: Path) -> None:
    """SIGHUP and POST /admin/reload say that reloading is not built, and the gateway goes on."""
    async with running(tmp_path) as (gateway, _):
        assert gateway.process is not None
        gateway.process.send_signal(signal.SIGHUP)
        await gateway.until(lambda: any(line["event"] == "reload_not_built" for line in gateway.log_lines))
        answer = await gateway.http.post(
            gateway.control_url + "/admin/reload", headers={"authorization": f"Bearer {gateway.admin_token}"}
        )
        assert (answer.status_code, answer.json()["error"]["code"]) == (501, "not_built")
        assert (await gateway.chat()).status_code == 200
