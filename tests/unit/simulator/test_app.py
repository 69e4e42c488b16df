"""Who may ask, which script applies and what is logged. What an answer holds is left to ``test_answers.py``."""

from __future__ import annotations

import asyncio
import json
import re

import httpx2
import pytest

from proxy.simulator import RunningSimulator, Script, Simulator, key_id_of
from proxy.simulator.journal import Journal, Seen

ASK = {"model": "gpt-4o", "messages": [{"role": "user", "content": "Hello?"}]}
CHAT = "/v1/chat/completions"


async def status_of(client, path=CHAT, **options):
    return (await client.post(path, json=ASK, **options)).status_code


async def test_answer_has_the_headers_of_openai(client):
    """Request id, timing, version, limits and a cookie come with every answer."""
    answer = await client.post(CHAT, json=ASK)
    assert re.fullmatch(r"req_[0-9a-f]{32}", answer.headers["x-request-id"])
    assert answer.headers["openai-processing-ms"] == "1"
    assert answer.headers["openai-version"] == "2020-10-01"
    assert answer.headers["x-ratelimit-limit-tokens"] == "2000000"
    assert answer.headers["set-cookie"].startswith("__cf_bm=")
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["date"] == "Tue, 14 Nov 2023 22:13:20 GMT"
    assert answer.json()["created"] == 1_700_000_000


async def test_stream_is_an_event_stream(client):
    """A stream is chunked, says so, and ends with its marker."""
    answer = await client.post(CHAT, json=ASK | {"stream": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["transfer-encoding"] == "chunked"
    assert answer.text.endswith("\n\ndata: [DONE]\n\n")


@pytest.mark.parametrize("authorization", [None, "", "Bearer", "Basic abc"])
async def test_request_without_a_bearer_key_is_refused(running, authorization):
    """No key is a 401 in OpenAI's shape."""
    headers = {} if authorization is None else {"authorization": authorization}
    async with httpx2.AsyncClient(base_url=running.base_url, headers=headers) as stranger:
        answer = await stranger.get("/models")
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"


async def test_only_listed_keys_are_accepted(clock):
    """With a list of keys, any other is a 401 that shows no whole key."""
    async with (
        RunningSimulator(Simulator(clock, keys=frozenset({"sk-good"}))) as running,
        httpx2.AsyncClient(base_url=running.base_url) as client,
    ):
        good = await client.get("/models", headers={"authorization": "Bearer sk-good"})
        wrong = await client.get("/models", headers={"authorization": "bearer sk-wrong-0123456789"})
    assert (good.status_code, wrong.status_code) == (200, 401)
    assert "sk-wrong-0123456789" not in wrong.text


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
async def test_unreadable_json_is_refused(client, body):
    """A body that is no JSON object is a 400 in OpenAI's shape."""
    answer = await client.post(CHAT, content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_models_are_listed_and_found(client):
    """The list has models, any of them is found, and HEAD has no body."""
    listed = (await client.get("/v1/models")).json()
    found = (await client.get("/v1/models/ft:gpt-4o:org")).json()
    head = await client.head("/v1/models")
    assert {model["object"] for model in listed["data"]} == {"model"}
    assert found["id"] == "ft:gpt-4o:org"
    assert (head.status_code, head.content) == (200, b"")


async def test_other_paths_tell_what_was_asked(client):
    """Any other path of the API echoes method, path and query as they came."""
    answer = await client.put("/v1/files/a%2Fb?x=1&y=%20", content=b"\x00")
    assert answer.json() == {"object": "simulated", "method": "PUT", "path": "/v1/files/a%2Fb", "query": "x=1&y=%20"}


async def test_path_outside_the_api_is_not_found(client):
    """A path that is not below /v1 is a 404 in OpenAI's shape."""
    answer = await client.get("/v2/models")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "unknown_url"


async def test_log_tells_the_request_without_its_key(client, simulator, key):
    """An entry holds what was asked and how it ended, and the key nowhere."""
    await client.post(f"{CHAT}?a=b", json=ASK)
    (seen,) = simulator.log
    assert (seen.number, seen.method, seen.path, seen.query) == (1, "POST", CHAT, "a=b")
    assert (seen.model, seen.answered_status, seen.tokens_sent) == ("gpt-4o", 200, 16)
    assert (seen.finished, seen.disconnected) == (True, False)
    assert seen.key_id == key_id_of(key)
    assert json.loads(seen.body) == ASK
    assert (b"authorization", b"[redacted]") in seen.headers
    assert key not in repr(seen) + json.dumps(seen.document())
    assert repr(seen) == (f"<Seen 1: POST {CHAT} by {key_id_of(key)}, model gpt-4o, status 200, 16 tokens, finished>")


async def test_bodies_need_not_be_kept(clock, key):
    """Without keep_bodies the log stays small, and knows the model all the same."""
    simulator = Simulator(clock, keep_bodies=False)
    async with RunningSimulator(simulator) as running, httpx2.AsyncClient() as client:
        await client.post(f"{running.base_url}/chat/completions", json=ASK, headers={"authorization": f"Bearer {key}"})
    assert (simulator.log[0].body, simulator.log[0].model) == (b"", "gpt-4o")


def test_log_forgets_the_oldest():
    """The log is bounded."""
    journal = Journal(most_entries=2)
    for number in range(3):
        journal.add(Seen(number, "GET", "/", "", None, [], 0.0))
    assert [seen.number for seen in journal.entries] == [1, 2]


async def test_waiting_ends_in_time():
    """A predicate that never holds ends in a TimeoutError that tells the last requests."""
    journal = Journal()
    journal.add(Seen(7, "GET", "/v1/models", "", None, [], 0.0))
    with pytest.raises(TimeoutError, match="Seen 7: GET /v1/models"):
        await journal.wait_for(lambda log: len(log) == 2, 0.0)


async def test_waiter_gets_the_error_of_its_predicate(client, simulator):
    """What a predicate raises is raised where it is waited for, not where the log changes."""
    waiting = asyncio.create_task(simulator.wait_for(lambda log: bool(log) and log[1].finished))
    assert await status_of(client) == 200
    with pytest.raises(IndexError):
        await waiting


async def test_header_wins_over_key_and_key_over_default(clock, key):
    """The more specific script decides each field; what it does not say is left to the others."""
    simulator = Simulator(clock, default_script=Script(status=500, tokens=2, error_code="from_default"))
    simulator.script_key(key, Script(status=503, error_message="from key"))
    async with RunningSimulator(simulator) as running:
        headers = {"authorization": f"Bearer {key}", "x-sim-script": '{"status": 502}'}
        async with httpx2.AsyncClient(base_url=running.base_url, headers=headers) as client:
            answer = await client.post("/chat/completions", json=ASK)
            healthy = await client.post("/chat/completions", json=ASK, headers={"x-sim-script": '{"status": 200}'})
            other = await client.get("/models", headers={"authorization": "Bearer other", "x-sim-script": "{}"})
    assert answer.status_code == 502
    assert (answer.json()["error"]["code"], answer.json()["error"]["message"]) == ("from_default", "from key")
    assert healthy.json()["usage"]["completion_tokens"] == 2
    assert other.status_code == 500


async def test_script_for_the_next_requests_runs_out(client, simulator, key):
    """Scripts with a number of times queue up, then what stood before applies again."""
    simulator.script_key(key, Script(status=500))
    simulator.script_key(key, Script(status=429), times=2)
    simulator.script_key(key, Script(status=503), times=1)
    assert [await status_of(client) for _ in range(5)] == [429, 429, 503, 500, 500]


async def test_script_without_times_replaces_all_before(client, simulator, key):
    """An empty script makes a key healthy again."""
    simulator.script_key(key, Script(status=429), times=5)
    simulator.script_key(key, Script())
    assert await status_of(client) == 200


async def test_script_of_another_key_does_not_apply(client, simulator):
    """A key's script concerns that key only."""
    simulator.script_key("sk-other", Script(status=500))
    assert await status_of(client) == 200


async def test_misspelt_script_header_is_refused(client):
    """An unknown field in the header is a 400 that names it and the known ones."""
    answer = await client.post(CHAT, json=ASK, headers={"x-sim-script": '{"delay": 1}'})
    assert answer.status_code == 400
    assert "'delay'. Known fields: latency_s" in answer.json()["error"]["message"]


async def test_scripts_are_set_remotely(client, key):
    """The control path scripts one key, or all keys when the key is null."""
    once = {"key": key, "script": {"status": 429}, "times": 1}
    assert (await client.post("/_sim/script", json=once)).json() == {"ok": True}
    await client.post("/_sim/script", json={"key": None, "script": {"status": 500}})
    assert [await status_of(client) for _ in range(2)] == [429, 500]


async def test_log_is_read_and_cleared_remotely(client, key):
    """The control path gives the log as JSON, without itself and without keys, and clears it."""
    await client.post(CHAT, json=ASK)
    answer = await client.get("/_sim/log")
    (entry,) = answer.json()["log"]
    assert (entry["path"], entry["finished"], json.loads(entry["body"])) == (CHAT, True, ASK)
    assert key not in answer.text
    await client.delete("/_sim/log")
    assert (await client.get("/_sim/log")).json() == {"log": []}


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/_sim/script", b"{", "parse the JSON"),
        ("/_sim/script", b'{"script": {"sleep": 1}}', "'sleep'. Known fields"),
        ("/_sim/script", b'{"scripts": {}}', "Unknown member 'scripts'"),
        ("/_sim/script", b'{"key": ""}', "'key' must be"),
        ("/_sim/script", b'{"times": 0}', "'times' must be"),
        ("/_sim/release", b"{}", "'gate' must be"),
    ],
)
async def test_unusable_control_request_is_refused(client, path, body, expected):
    """A control request that can't be followed is a 400 that says why."""
    answer = await client.post(path, content=body)
    assert answer.status_code == 400
    assert expected in answer.json()["error"]["message"]


async def test_unknown_control_path_is_not_found(client):
    """A control path that does not exist is a 404."""
    assert (await client.get("/_sim/gates")).status_code == 404


async def test_other_asgi_servers_can_run_it(simulator, key):
    """The application answers under a server that offers no more than ASGI."""
    transport = httpx2.ASGITransport(app=simulator)
    async with httpx2.AsyncClient(transport=transport, base_url="http://sim", headers={"authorization": f"Bearer {key}"}) as client:
        answer = await client.post(CHAT, json=ASK | {"stream": True}, headers={"x-sim-script": '{"latency_s": 0.001}'})
    assert answer.text.endswith("data: [DONE]\n\n")
