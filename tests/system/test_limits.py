"""Limits as clients meet them: exact over workers, reserved before dispatch, settled by what was used."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from proxy.simulator import Simulator
from tests.system.harness import Gateway, Setup, running

RPM_100 = {"name": "rpm", "unit": "requests", "rate": "100/min"}
TPM_1000 = {"name": "tpm", "unit": "tokens", "rate": "1000/min"}
TPD = {"name": "tpd", "unit": "tokens", "rate": "100000/day", "algorithm": "sliding_window"}  # does not refill in a test
RPD = {"name": "rpd", "unit": "requests", "rate": "1000/day"}


async def test_exactly_the_limit_over_four_workers(tmp_path: Path) -> None:
    """Of 400 requests at once over 4 workers a limit of 100 admits exactly 100, and the upstream sees exactly those (A30)."""
    async with running(tmp_path, Setup(limits=[RPM_100], workers=4)) as (gateway, simulator):
        answers = await asyncio.gather(*(gateway.chat() for _ in range(400)))
        statuses = [answer.status_code for answer in answers]
        assert statuses.count(200) == 100
        assert statuses.count(429) == 300
        assert len(simulator.log) == 100
        used_slots = {line["worker"] for line in gateway.requests_logged()}
        assert len(used_slots) > 1, "the requests were not spread over workers"


async def test_parallel_calls_reserve_before_dispatch(tmp_path: Path) -> None:
    """Of five simultaneous calls of 600 tokens against 1,000 exactly one reaches the upstream (A01)."""
    async with running(tmp_path, Setup(limits=[TPM_1000], workers=2)) as (gateway, simulator):
        calls = [asyncio.create_task(gateway.chat(script={"hold": "gate"}, max_tokens=600)) for _ in range(5)]
        await gateway.until(lambda: sum(call.done() for call in calls) == 4)
        simulator.release("gate")
        statuses = sorted([(await call).status_code for call in calls])
        assert statuses == [200, 429, 429, 429, 429]
        assert len(simulator.log) == 1


async def test_streams_are_charged_like_plain_calls(tmp_path: Path) -> None:
    """A stream's usage is charged when it ends, so the next request meets it (A02)."""
    limits = [{"name": "tpm", "unit": "tokens", "rate": "100/min"}]
    usage = {"prompt_tokens": 100, "completion_tokens": 400, "total_tokens": 500}
    async with running(tmp_path, Setup(limits=limits)) as (gateway, simulator):
        first = await gateway.chat(stream=True, max_tokens=5, script={"usage": usage})
        second = await gateway.chat(stream=True, max_tokens=5)
        assert (first.status_code, second.status_code) == (200, 429)
        assert len(simulator.log) == 1
        assert await gateway.remaining("tpm") < -390


@pytest.mark.parametrize(
    "script",
    [
        {"status": 500},
        {"status": 429},
        {"drop": True},
        {"usage": {"prompt_tokens": 5, "completion_tokens": 15, "total_tokens": 20}},
    ],
    ids=["500", "429", "disconnected", "small"],
)
async def test_reservation_is_given_back(tmp_path: Path, script: dict[str, Any]) -> None:
    """What a failed or small call did not use is free for the very next request (A08)."""
    async with running(tmp_path, Setup(limits=[TPM_1000])) as (gateway, _):
        await gateway.chat(max_tokens=900, script=script)
        assert (await gateway.chat(max_tokens=500)).status_code == 200


PROMPT = 4  # our estimate of the harness's message; the simulator counts 3
COUNTED = -1  # what the stream itself carried, counted by the test

SETTLE_TABLE = [
    # how it ended: script, stream, tokens that stay charged, requests that stay charged
    pytest.param({"tokens": 7}, False, 3 + 7, 1, id="usage known"),
    pytest.param({"tokens": 7}, True, 3 + 7, 1, id="usage known, streamed"),
    pytest.param({"usage": "none"}, False, PROMPT + 50, 1, id="2xx without usage: as reserved"),
    pytest.param({"usage": "none", "tokens": 7}, True, COUNTED, 1, id="stream without usage: counted"),
    pytest.param({"cut_after": 4}, True, COUNTED, 1, id="stream cut by the upstream: counted"),
    pytest.param({"status": 500}, False, 0, 0, id="upstream 5xx"),
    pytest.param({"status": 429}, True, 0, 0, id="upstream 429"),
    pytest.param({"status": 400}, False, 0, 1, id="other upstream 4xx"),
    pytest.param({"status": 401}, False, 0, 1, id="upstream refuses our key"),
    pytest.param({"drop": True}, False, 0, 0, id="disconnected before an answer"),
]


@pytest.mark.parametrize(("script", "stream", "tokens", "requests"), SETTLE_TABLE)
async def test_settle_table(tmp_path: Path, script: dict[str, Any], stream: bool, tokens: int, requests: int) -> None:
    """Each way of ending settles to its row of the table."""
    async with running(tmp_path, Setup(limits=[TPD, RPD])) as (gateway, _):
        answer = await gateway.chat(max_tokens=50, stream=stream, script=script)
        expected = PROMPT + _output_tokens(answer.text) if tokens == COUNTED else tokens
        assert (await gateway.used("tpd"), await gateway.used("rpd")) == (expected, requests)


def _output_tokens(events: str) -> int:
    """Bytes of the content / 4, and at least one token an event with some."""
    records = [json.loads(line[6:]) for line in events.splitlines() if line.startswith('data: {"id"')]
    contents = [record["choices"][0]["delta"].get("content") or "" for record in records]
    return max(sum(bool(content) for content in contents), -(-len("".join(contents).encode()) // 4))


async def _leave(gateway: Gateway, simulator: Simulator, script: dict[str, Any], *, after_bytes: bool, stream: bool) -> float:
    """Call, leave (before or after the first bytes), and return how long the upstream took to see it."""
    request = gateway.http.build_request(
        "POST", gateway.base_url + "/chat/completions", headers=gateway.headers(script=script),
        json=gateway.body(max_tokens=50, stream=stream),
    )  # fmt: skip
    if after_bytes:
        response = await gateway.http.send(request, stream=True)
        text = ""
        pieces = response.aiter_text()
        while text.count('"delta":{"content"') < script["hang_after"]:
            text += await anext(pieces)
        await response.aclose()
    else:
        call = asyncio.create_task(gateway.http.send(request))
        await simulator.wait_for(lambda log: len(log) == 1)
        call.cancel()
    return await gateway.until(lambda: simulator.log[0].disconnected, within=5.0)


async def test_client_leaves_while_the_upstream_is_silent(tmp_path: Path) -> None:
    """The upstream sees it within a second; tokens stay as reserved, since they may have been spent (D03)."""
    async with running(tmp_path, Setup(limits=[TPD, RPD])) as (gateway, simulator):
        took = await _leave(gateway, simulator, {"hang": "headers"}, after_bytes=False, stream=False)
        assert took < 1.0
        await gateway.until(gateway.requests_logged)
        assert (await gateway.used("tpd"), await gateway.used("rpd")) == (PROMPT + 50, 1)
        assert gateway.requests_logged()[0]["outcome"] == "client_abort"
        assert gateway.requests_logged()[0]["status"] == 499


async def test_client_leaves_in_the_middle_of_a_stream(tmp_path: Path) -> None:
    """The upstream sees it within a second; the prompt and what was streamed stay charged, the rest is free (D01)."""
    async with running(tmp_path, Setup(limits=[TPD, RPD])) as (gateway, simulator):
        took = await _leave(gateway, simulator, {"tokens": 50, "hang_after": 4}, after_bytes=True, stream=True)
        assert took < 1.0
        await gateway.until(gateway.requests_logged)
        streamed = simulator.log[0].tokens_sent
        assert streamed == 4
        await gateway.until(lambda: _is_between(gateway, PROMPT + streamed, PROMPT + 3 * streamed))
        assert await gateway.used("rpd") == 1
        samples = await gateway.samples()
        assert samples["sluicegate_in_flight_requests"] == 0
        assert samples["sluicegate_open_streams"] == 0


async def _is_between(gateway: Gateway, low: int, high: int) -> bool:
    """Whether the tokens in use are at least one a chunk, and no more than words can have."""
    return low <= await gateway.used("tpd") <= high


async def test_client_leaves_before_anything_was_sent(tmp_path: Path) -> None:
    """A client that leaves while its body is on the way costs nothing."""
    async with running(tmp_path, Setup(limits=[TPD, RPD])) as (gateway, simulator):
        host, port = gateway.base_url.split("/")[2].split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {gateway.key}\r\ncontent-length: 500\r\n\r\n"
        )
        writer.write(head.encode() + b'{"model": "gp')
        await writer.drain()
        writer.close()
        await gateway.until(gateway.requests_logged)
        assert (await gateway.used("tpd"), await gateway.used("rpd")) == (0, 0)
        assert simulator.log == []


async def test_unreachable_upstream(tmp_path: Path) -> None:
    """An upstream that is not there is a 502 in OpenAI's shape, and costs nothing."""
    async with running(tmp_path, Setup(limits=[TPD, RPD])) as (gateway, _):
        await gateway.end()
        config = gateway.config_path.read_text()
        gateway.config_path.write_text(config.replace(config.split('"base_url": "')[1].split('"')[0], "http://127.0.0.1:9/v1"))
        await gateway.start()
        answer = await gateway.chat(max_tokens=50)
        assert answer.status_code == 502
        assert answer.json()["error"]["code"] == "upstream_unreachable"
        assert (await gateway.used("tpd"), await gateway.used("rpd")) == (0, 0)


async def test_too_large_says_so_once_and_for_all(tmp_path: Path) -> None:
    """A request beyond a limit's whole capacity is refused with x-should-retry: false and no time to wait."""
    async with running(tmp_path, Setup(limits=[TPM_1000])) as (gateway, simulator):
        answer = await gateway.chat(max_tokens=5000)
        assert answer.status_code == 429
        assert answer.headers["x-should-retry"] == "false"
        assert "retry-after" not in answer.headers
        assert answer.json()["error"]["message"].startswith("Request too large for gpt-4o in tenant team on limit tpm")
        assert simulator.log == []
        assert (await gateway.chat()).status_code == 200, "a guessed completion is never too large"


async def test_limit_of_zero_blocks(tmp_path: Path) -> None:
    """A limit of 0 means blocked, not unlimited; a tenant without limits passes (A29)."""
    async with running(tmp_path, Setup(limits=[{"name": "off", "unit": "requests", "rate": "0/min"}])) as (gateway, _):
        blocked, free = await gateway.chat(), await gateway.chat(key=gateway.other_key)
        assert blocked.status_code == 429
        assert blocked.headers["x-should-retry"] == "false"
        assert free.status_code == 200
        assert not [name for name in free.headers if name.startswith("x-ratelimit")]


async def test_headers_show_the_tightest_limit_once(tmp_path: Path) -> None:
    """With several limits on a call each x-ratelimit header stands once, for the tightest; a 429 names its limit (A33, A14)."""
    limits = [
        {"name": "wide", "unit": "requests", "rate": "1000/min"},
        {"name": "narrow", "unit": "requests", "rate": "2/min", "models": ["gpt-4o"]},
        TPM_1000,
    ]
    async with running(tmp_path, Setup(limits=limits)) as (gateway, _):
        first = await gateway.chat(max_tokens=10)
        assert first.headers.get_list("x-ratelimit-limit-requests") == ["2"]
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert first.headers["x-ratelimit-reset-requests"].startswith("1m")
        assert first.headers["x-ratelimit-limit-tokens"] == "1000"
        await gateway.chat(max_tokens=10)
        refused = await gateway.chat(max_tokens=10)
        assert refused.status_code == 429
        assert refused.headers.get_list("x-ratelimit-remaining-requests") == ["0"]
        assert "limit narrow" in refused.json()["error"]["message"]


async def test_service_limit_is_shared_and_defaults_are_not(tmp_path: Path) -> None:
    """All tenants together use a service limit; a default is each tenant's own, and yields to limits of its own."""
    more = {
        "defaults": {"tenant": {"limits": [{"name": "each", "unit": "requests", "rate": "2/day"}]}},
        "service_limits": [{"name": "all", "unit": "requests", "rate": "5/day"}],
    }
    limits = [{"name": "own", "unit": "requests", "rate": "100/day"}]
    async with running(tmp_path, Setup(limits=limits, more=more)) as (gateway, _):
        other = [await gateway.chat(key=gateway.other_key) for _ in range(3)]
        assert [answer.status_code for answer in other] == [200, 200, 429]
        assert "on limit each, requests per day" in other[2].json()["error"]["message"]
        team = [await gateway.chat() for _ in range(4)]
        assert [answer.status_code for answer in team] == [200, 200, 200, 429]
        assert "on limit all, requests per day" in team[3].json()["error"]["message"]
        samples = await gateway.samples()
        shared = 'key="service",limit="all",model="",service="test",tenant="",unit="requests"'
        assert samples[f"rate_limit_remaining{{{shared}}}"] == 0
        assert await gateway.used("own") == 3


async def test_shadow_limit_reports_and_does_not_refuse(tmp_path: Path) -> None:
    """A limit in shadow mode lets everything pass, counts it, and shows in the metrics what it would have refused."""
    limits = [{"name": "trial", "unit": "requests", "rate": "2/day", "mode": "shadow"}]
    async with running(tmp_path, Setup(limits=limits)) as (gateway, _):
        answers = [await gateway.chat() for _ in range(5)]
        assert {answer.status_code for answer in answers} == {200}
        assert not [name for name in answers[-1].headers if name.startswith("x-ratelimit")]
        samples = await gateway.samples()
        assert samples['sluicegate_shadow_refusals_total{limit="trial",model="gpt-4o",tenant="team"}'] == 3
        assert await gateway.remaining("trial") == -3


async def test_per_model_counts_models_apart(tmp_path: Path) -> None:
    """A limit per model holds for each model by itself; one over several models counts them together."""
    limits = [
        {"name": "apart", "unit": "requests", "rate": "2/day", "per_model": True},
        {"name": "family", "unit": "requests", "rate": "3/day", "models": ["gpt-4*"]},
    ]
    async with running(tmp_path, Setup(limits=limits)) as (gateway, _):
        statuses = [(await gateway.chat(model=model)).status_code for model in ("gpt-4o", "gpt-4o", "gpt-4o", "gpt-4-turbo")]
        assert statuses == [200, 200, 429, 200]
        last = await gateway.chat(model="gpt-4-turbo")
        assert "on limit family" in last.json()["error"]["message"]
        assert (await gateway.chat(model="fast")).status_code == 200


async def test_input_and_output_tokens_are_limited_apart(tmp_path: Path) -> None:
    """A long prompt meets the limit on input tokens, a long answer the one on output tokens; each is settled by its part."""
    limits = [
        {"name": "in", "unit": "input_tokens", "rate": "100/day"},
        {"name": "out", "unit": "output_tokens", "rate": "50/day"},
    ]
    async with running(tmp_path, Setup(limits=limits)) as (gateway, _):
        assert (await gateway.chat(max_tokens=20)).status_code == 200
        await gateway.until(lambda: _is_used(gateway, "out", 16))
        assert await gateway.used("in") == 3
        refused = await gateway.chat(max_tokens=40)
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "tokens")
        assert "on limit out, output tokens per day (OTPD)" in refused.json()["error"]["message"]
        long = await gateway.chat(max_tokens=1, messages=[{"role": "user", "content": "x" * 500}])
        assert "Request too large for gpt-4o in tenant team on limit in, input tokens" in long.json()["error"]["message"]


async def _is_used(gateway: Gateway, limit: str, amount: int) -> bool:
    return await gateway.used(limit) == amount


async def test_concurrency_limit(tmp_path: Path) -> None:
    """Of requests that run at once no more than the limit pass; one that ends, fails or is left frees its slot at once (A22)."""
    limits = [{"name": "parallel", "unit": "concurrency", "max": 2}]
    async with running(tmp_path, Setup(limits=limits, workers=2)) as (gateway, simulator):
        calls = [asyncio.create_task(gateway.chat(script={"hold": "gate"})) for _ in range(2)]
        await simulator.wait_for(lambda log: len(log) == 2)
        refused = await gateway.chat()
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "requests")
        assert "on limit parallel, concurrent requests: Limit 2, Used 2, Requested 1." in refused.json()["error"]["message"]
        assert refused.headers["retry-after"] == "1"
        calls[0].cancel()
        await gateway.until(lambda: _is_used_parallel(gateway, 1))
        assert (await gateway.chat(script={"status": 500})).status_code == 500
        assert (await gateway.chat(stream=True)).status_code == 200
        simulator.release("gate")
        assert (await calls[1]).status_code == 200
        await gateway.until(lambda: _is_used_parallel(gateway, 0))


async def _is_used_parallel(gateway: Gateway, amount: int) -> bool:
    return 2 - await gateway.remaining("parallel") == amount
