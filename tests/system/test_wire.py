"""What crosses the wire: bytes, headers, paths and bodies, good and bad, through the served gateway."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from proxy.simulator import Simulator
from tests.system.harness import Gateway, Setup, running

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Gateway, Simulator]]:
    folder: Path = tmp_path_factory.mktemp("wire")
    async with running(folder, Setup(server={"max_body": "100KiB"}, keys=3)) as pair:
        yield pair


async def _raw(gateway: Gateway, sent: bytes, *, half_close: bool = False) -> bytes:
    """Send bytes as they are and return all that comes back until the server closes."""
    host, port = gateway.base_url.split("/")[2].split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    if half_close:
        writer.write_eof()
    async with asyncio.timeout(10):
        answer = await reader.read()
    writer.close()
    gateway.seen_texts.append(answer.decode("latin-1"))
    return answer


def _post(gateway: Gateway, body: bytes, *, key: str | None = None, extra: str = "", path: str = "/v1/chat/completions") -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nhost: gw.example\r\nauthorization: Bearer {key or gateway.key}\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n{extra}\r\n"
    )
    return head.encode() + body


async def test_body_is_byte_exact(served: tuple[Gateway, Simulator]) -> None:
    """A body reaches the upstream byte for byte: spaces, order, escapes, members that nobody knows, a lone surrogate (D26)."""
    gateway, simulator = served
    simulator.clear_log()
    body = b'{ "x":1.0,\n"messages":[{"role":"user","content":"\\ud83d \\u00e9 \xc3\xa9"}] , "model" : "gpt-4o","y":[1e5,null]}'
    assert b"200 OK" in await _raw(gateway, _post(gateway, body))
    assert simulator.log[0].body == body


async def test_alias_is_spliced(served: tuple[Gateway, Simulator]) -> None:
    """A model with another name upstream is replaced in its place, nothing else is touched."""
    gateway, simulator = served
    simulator.clear_log()
    body = b'{"messages" : [{"role":"user","content":"\\"model\\":\\"fast\\""}], "model" :"fast" ,"z":0 }'
    assert b"200 OK" in await _raw(gateway, _post(gateway, body))
    assert simulator.log[0].body == body.replace(b'"model" :"fast"', b'"model" :"gpt-4o-mini"')


async def test_usage_is_asked_for_without_touching_the_rest(served: tuple[Gateway, Simulator]) -> None:
    """Streams get include_usage upstream; other stream options stay (D11)."""
    gateway, simulator = served
    simulator.clear_log()
    await gateway.chat(stream=True, stream_options={"include_obfuscation": False})
    sent = json.loads(simulator.log[0].body)
    assert sent["stream_options"] == {"include_obfuscation": False, "include_usage": True}


async def test_credentials_and_hop_headers_stay_on_their_side(served: tuple[Gateway, Simulator]) -> None:
    """Neither side sees the other's credentials, cookies or hop-by-hop headers; Host is the upstream's (D21, D23)."""
    gateway, simulator = served
    simulator.clear_log()
    body = json.dumps(gateway.body()).encode()
    extra = (
        "x-hop: 1\r\ncookie: a=b\r\nte: trailers\r\nproxy-authorization: Basic eA==\r\nx-kept: yes\r\n"
        "openai-organization: org-client\r\nx-forwarded-for: 10.0.0.1\r\nx-sluicegate-max-wait: 1s\r\n"
    )
    sent = _post(gateway, body, extra=extra).replace(b"connection: close", b"connection: close, x-hop")
    answer = await _raw(gateway, sent)
    names = [name.lower() for name, _ in simulator.log[0].headers]
    for dropped in (b"x-hop", b"cookie", b"te", b"proxy-authorization", b"openai-organization", b"x-forwarded-for", b"connection"):
        assert dropped not in names or (dropped == b"connection" and dict(simulator.log[0].headers)[dropped] != b"close, x-hop")
    assert b"x-kept" in names
    assert b"x-sluicegate-max-wait" not in names
    hosts = [value for name, value in simulator.log[0].headers if name.lower() == b"host"]
    assert len(hosts) == 1
    assert hosts[0].startswith(b"127.0.0.1:")
    assert names.count(b"content-length") == 1
    head = answer.split(b"\r\n\r\n")[0].lower()
    assert b"set-cookie" not in head
    assert head.count(b"x-request-id:") == 1
    assert head.count(b"date:") == 1
    assert b"content-length" in head
    assert b"transfer-encoding" not in head


async def test_keys_rotate_evenly(served: tuple[Gateway, Simulator]) -> None:
    """Over any full cycle each key serves its share."""
    gateway, simulator = served
    simulator.clear_log()
    for _ in range(9):
        await gateway.chat()
    seen = [entry.key_id for entry in simulator.log]
    assert {key: seen.count(key) for key in seen} == dict.fromkeys(set(seen), 3)
    assert len(set(seen)) == 3


async def test_query_passes_byte_for_byte(served: tuple[Gateway, Simulator]) -> None:
    """The query string reaches the upstream as it is (D19)."""
    gateway, simulator = served
    simulator.clear_log()
    query = "limit=2&after=a%2Fb&tag=x&tag=y&empty=&flag"
    answer = await gateway.http.get(f"{gateway.base_url}/files?{query}", headers=gateway.headers())
    assert answer.status_code == 200
    assert simulator.log[0].query in (query, query.encode())


@pytest.mark.parametrize("method", ["GET", "DELETE", "POST"])
async def test_unknown_paths_pass(served: tuple[Gateway, Simulator], method: str) -> None:
    """What the gateway does not know below /v1 passes, with its method."""
    gateway, simulator = served
    simulator.clear_log()
    answer = await gateway.http.request(method, f"{gateway.base_url}/vector_stores/vs_1", headers=gateway.headers())
    assert answer.json()["object"] == "simulated"
    assert (simulator.log[0].method, simulator.log[0].path) == (method, "/v1/vector_stores/vs_1")


BAD_PATHS = [
    ("/v1/../admin", 400),
    ("/v1/%2e%2e/admin", 400),
    ("/v1/%252e%252e/admin", 400),
    ("/v1//chat/completions", 400),
    ("/v1/files/..%2f..%2fadmin", 400),
    ("/v1/files/..%5cx", 400),
    ("/v1/organization/users", 403),
    ("/v1/projects", 403),
    ("/v1/%70rojects/p1", 403),
    ("/v1/realtime/client_secrets", 403),
    ("/v1/Realtime%2Fsessions", 403),
    ("/v1/chatkit/sessions", 403),
    ("/v1", 404),
    ("/v1/", 404),
    ("/metrics", 404),
    ("/", 404),
]


@pytest.mark.parametrize(("path", "status"), BAD_PATHS)
async def test_paths_that_do_not_pass(served: tuple[Gateway, Simulator], path: str, status: int) -> None:
    """Paths that could mean something else upstream, or manage an account, end here, in OpenAI's shape."""
    gateway, simulator = served
    simulator.clear_log()
    answer = await _raw(gateway, _post(gateway, b"{}", path=path))
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert set(json.loads(answer.split(b"\r\n\r\n")[1])["error"]) == {"message", "type", "param", "code"}
    assert simulator.log == []


async def test_trailing_slash_is_served(served: tuple[Gateway, Simulator]) -> None:
    """A trailing slash is no redirect: the call is served (D35)."""
    gateway, simulator = served
    simulator.clear_log()
    assert (await gateway.chat(path="/chat/completions/")).status_code == 200
    assert simulator.log[0].path == "/v1/chat/completions"


@pytest.mark.parametrize("method", ["GET", "DELETE", "PUT"])
async def test_body_counts_whatever_the_method(served: tuple[Gateway, Simulator], method: str) -> None:
    """A body that names a model is held to it under every method, and no header makes another method of it."""
    gateway, simulator = served
    simulator.clear_log()
    unknown = _post(gateway, b'{"model": "gpt-9"}').replace(b"POST", method.encode(), 1)
    assert (await _raw(gateway, unknown)).startswith(b"HTTP/1.1 404 ")
    known = _post(gateway, b'{"model": "gpt-4o"}', extra="x-http-method-override: POST\r\n").replace(b"POST", method.encode(), 1)
    await _raw(gateway, known)
    assert [name for name, _ in simulator.log[0].headers if b"method" in name.lower()] == []


async def test_two_content_types(served: tuple[Gateway, Simulator]) -> None:
    """A body of two types is a 400: which one would the upstream take?"""
    gateway, _ = served
    extra = "content-type: application/json\r\ncontent-type: multipart/form-data\r\n"
    assert (await _raw(gateway, _post(gateway, b"{}", extra=extra))).startswith(b"HTTP/1.1 400 ")


BAD_BODIES = [
    pytest.param(b"", "empty", id="empty"),
    pytest.param(b"   ", "empty", id="blank"),
    pytest.param(b"\xff\xfe", "UTF-8", id="not UTF-8"),
    pytest.param('{"model": "gpt-4o"}'.encode("utf-16"), "UTF-8", id="UTF-16"),
    pytest.param(b'{"model": "gpt-4o', "JSON", id="cut"),
    pytest.param(b"[1]", "not a JSON object", id="array"),
    pytest.param(b'"x"', "not a JSON object", id="string"),
    pytest.param(b"null", "not a JSON object", id="null"),
    pytest.param(b"NaN", "JSON", id="NaN"),
    pytest.param(b'{"model": NaN}', "JSON", id="NaN inside"),
    pytest.param(b'{"model": 1, "messages": []}', "'model': expected a string", id="model is a number"),
    pytest.param(b'{"model": ["gpt-4o"]}', "'model': expected a string", id="model is a list"),
    pytest.param(b'{"messages": []}', "must provide a model", id="no model"),
    pytest.param(b'{"model": "gpt-4o", "model": "gpt-4-turbo"}', "Duplicate member 'model'", id="two models"),
    pytest.param(b'{"model": "gpt-4o", "mod\\u0065l": "gpt-4-turbo"}', "Duplicate member 'model'", id="two models, one escaped"),
    pytest.param(b'{"model": "gpt-4o", "Model": "gpt-4-turbo"}', "'Model'", id="two models, one in another case"),
    pytest.param(b'{"model": "gpt-4o", "stream": "yes"}', "'stream': expected a boolean", id="stream is a string"),
    pytest.param(b'{"model": "gpt-4o", "stream_options": 5}', "'stream_options': expected an object", id="options is a number"),
    pytest.param(b'{"a":' * 5000 + b"1" + b"}" * 5000, "nested", id="nested objects"),
    pytest.param(b"[" * 50000, "nested", id="nested arrays"),
]


@pytest.mark.parametrize(("body", "words"), BAD_BODIES)
async def test_unusable_bodies(served: tuple[Gateway, Simulator], body: bytes, words: str) -> None:
    """What can't be read is a 400 in OpenAI's shape that names what is wrong, and nothing reaches the upstream (D28)."""
    gateway, simulator = served
    simulator.clear_log()
    answer = await _raw(gateway, _post(gateway, body))
    assert answer.startswith(b"HTTP/1.1 400 "), answer[:200]
    assert words in json.loads(answer.split(b"\r\n\r\n")[1])["error"]["message"]
    assert simulator.log == []


GOOD_BODIES = [
    pytest.param(b'\xef\xbb\xbf{"model": "gpt-4o", "messages": []}', id="byte order mark"),
    pytest.param(b'{"model": "gpt-4o", "messages": [], "user": "a", "user": "b"}', id="duplicates of others"),
    pytest.param(b'{"model": "gpt-4o", "messages": [], "seed": 123456789012345678901234567890}', id="huge integer"),
    pytest.param(b'{"model": "gpt-4o", "messages": [], "max_tokens": 1e400}', id="infinite bound"),
    pytest.param(b'{"model": "gpt-4o", "messages": "x", "n": -5, "max_tokens": "many"}', id="odd types of what is only estimated"),
    pytest.param(b'{"model": "gpt-4o", "messages": [{"content": "\\ud83d"}], "\\ude00": "\\ud83d"}', id="lone surrogates"),
]


@pytest.mark.parametrize("body", GOOD_BODIES)
async def test_odd_bodies_are_not_our_error(served: tuple[Gateway, Simulator], body: bytes) -> None:
    """Odd but readable bodies are the upstream's to judge: never a 5xx of ours."""
    gateway, _ = served
    answer = await _raw(gateway, _post(gateway, body))
    assert int(answer.split(b" ")[1]) in (200, 400), answer[:300]
    assert b"internal_error" not in answer


async def test_unreadable_encodings_are_refused(served: tuple[Gateway, Simulator]) -> None:
    """A compressed or multipart body can't be held to limits here: 415, and nothing reaches the upstream."""
    gateway, simulator = served
    simulator.clear_log()
    for extra in ("content-encoding: zstd\r\n", "content-type: multipart/form-data; boundary=x\r\n"):
        assert (await _raw(gateway, _post(gateway, b"{}", extra=extra))).startswith(b"HTTP/1.1 415 ")
    assert simulator.log == []


async def test_body_beyond_the_bound(served: tuple[Gateway, Simulator]) -> None:
    """A body over max_body is 413, declared or chunked."""
    gateway, simulator = served
    simulator.clear_log()
    declared = _post(gateway, b"x" * 10).replace(b"content-length: 10", b"content-length: 200000")
    assert (await _raw(gateway, declared)).startswith(b"HTTP/1.1 413 ")
    chunked = _post(gateway, b"").replace(b"content-length: 0", b"transfer-encoding: chunked")
    assert (await _raw(gateway, chunked + b"19000\r\n" + b"x" * 0x19000 + b"\r\n1\r\nx\r\n")).startswith(b"HTTP/1.1 413 ")
    assert simulator.log == []


MALFORMED = [
    pytest.param(b"garbage\r\n\r\n", 400, id="garbage"),
    pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, id="TLS"),
    pytest.param(b"GET /v1/models HTTP/1.1\r\nhost: x\r\nbad header\r\n\r\n", 400, id="header without colon"),
    pytest.param(b"POST /v1/x HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello", 400, id="two lengths"),
    pytest.param(
        b"POST /v1/x HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400, id="CL and TE"
    ),
    pytest.param(b"GET /v1/models HTTP/1.1\r\nhost: x\r\nhost: x\r\n\r\n", 400, id="two hosts"),
    pytest.param(b"GET /v1/models HTTP/1.1\r\na: b\r\n\r\n", 400, id="no host"),
    pytest.param(b"GET /v1/models HTTP/1.1\r\nhost : x\r\n\r\n", 400, id="space behind a name"),
    pytest.param(b"GET /v1/models HTTP/1.1\r\nhost: x\r\na b: c\r\n\r\n", 400, id="space in a name"),
    pytest.param(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n a: b\r\n\r\n", 400, id="folded line"),
    pytest.param(b"GET /v1/models HTTP/1.1\r\nhost: x\r\na: b\rc: d\r\n\r\n", 400, id="bare CR"),
    pytest.param(b"GET /v1/\xff HTTP/1.1\r\nhost: x\r\n\r\n", 400, id="raw byte in path"),
    pytest.param(b"GET /v1/models HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n", 431, id="many headers"),
    pytest.param(b"GET /v1/models HTTP/1.1\r\na: " + b"b" * 70000 + b"\r\n\r\n", 431, id="long header"),
    pytest.param(b"GET /v1/models HTTP/1.1\r\na: " + b"b" * 200000, 431, id="endless header"),
]


@pytest.mark.parametrize(("sent", "status"), MALFORMED)
async def test_malformed_http(served: tuple[Gateway, Simulator], sent: bytes, status: int) -> None:
    """What is not HTTP, or too much of it, gets an answer in OpenAI's shape and a closed connection."""
    gateway, _ = served
    answer = await _raw(gateway, sent)
    assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer[:200]
    assert "message" in json.loads(answer.split(b"\r\n\r\n")[1])["error"]
    assert (await gateway.chat()).status_code == 200


async def test_requests_split_and_pipelined(served: tuple[Gateway, Simulator]) -> None:
    """A head that arrives in pieces and requests sent ahead of answers are served in order, each to its own tenant."""
    gateway, simulator = served
    simulator.clear_log()
    host, port = gateway.base_url.split("/")[2].split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    first = _post(gateway, json.dumps(gateway.body(max_tokens=1)).encode()).replace(b"connection: close\r\n", b"")
    second = _post(gateway, json.dumps(gateway.body(max_tokens=2)).encode(), key=gateway.other_key)
    sent = first + second
    for i in range(0, len(sent), 7):
        writer.write(sent[i : i + 7])
        await writer.drain()
        await asyncio.sleep(0)
    async with asyncio.timeout(10):
        answer = await reader.read()
    writer.close()
    assert answer.count(b"HTTP/1.1 200 OK") == 2
    assert answer.index(b'"completion_tokens":1,') < answer.index(b'"completion_tokens":2,')
    await gateway.until(lambda: len(gateway.requests_logged()) >= 2)
    assert [line["tenant"] for line in gateway.requests_logged()[-2:]] == ["team", "other"]


@pytest.mark.parametrize("padding", [0, 90_000], ids=["small", "large"])
@pytest.mark.parametrize("followers", [0, 1, 5])
async def test_leaving_is_seen_behind_what_was_sent(served: tuple[Gateway, Simulator], followers: int, padding: int) -> None:
    """A client that leaves ends its call within a second, whatever it sent ahead and however large its body was (D03)."""
    gateway, simulator = served
    simulator.clear_log()
    host, port = gateway.base_url.split("/")[2].split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    large = json.dumps(gateway.body(user="x" * padding)).encode()
    hangs = 'x-sim-script: {"hang": "headers"}\r\n'
    writer.write(_post(gateway, large, extra=hangs).replace(b"connection: close\r\n", b""))
    writer.write(_post(gateway, json.dumps(gateway.body()).encode()) * followers)
    await simulator.wait_for(lambda log: len(log) == 1)
    writer.close()
    assert await gateway.until(lambda: simulator.log[0].disconnected) < 1.0
    assert len(simulator.log) == 1


async def test_flood_behind_a_silent_call_ends_it(served: tuple[Gateway, Simulator]) -> None:
    """More than may wait behind a call closes the connection, and the upstream's with it."""
    gateway, simulator = served
    simulator.clear_log()
    first = _post(gateway, json.dumps(gateway.body()).encode(), extra='x-sim-script: {"hang": "headers"}\r\n')
    host, port = gateway.base_url.split("/")[2].split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(first.replace(b"connection: close\r\n", b""))
    await simulator.wait_for(lambda log: len(log) == 1)
    writer.write(_post(gateway, b"x" * 300_000))
    with contextlib.suppress(ConnectionResetError):
        async with asyncio.timeout(10):
            assert await reader.read() == b""
    writer.close()
    await gateway.until(lambda: simulator.log[0].disconnected)
    assert (await gateway.chat()).status_code == 200


async def test_large_headers_of_an_upstream_pass(served: tuple[Gateway, Simulator]) -> None:
    """An upstream's headers are not bounded: 200 of them, and one of 20 KB, arrive."""
    gateway, _ = served
    answer = await gateway.chat(script={"raw_headers": {"x-long": "a" * 20000, **{f"x-many-{i}": "b" for i in range(200)}}})
    assert answer.status_code == 200
    assert len(answer.headers["x-long"]) == 20000
    assert answer.headers["x-many-199"] == "b"


async def test_stream_bytes_pass_unchanged(served: tuple[Gateway, Simulator]) -> None:
    """An event stream in which nothing was asked for by us arrives byte for byte, one byte a write included (D07)."""
    gateway, simulator = served
    raw = 'data: {"choices":[{"delta":{"content":"é€😀"}}]}\r\n\r\n: comment\n\nevent: x\rdata: 1\r\rdata: [DONE]\n\n'
    script = {"raw_body": raw, "raw_content_type": "text/event-stream", "chunk_bytes": 1}
    answer = await gateway.chat(stream=True, stream_options={"include_usage": True}, script=script)
    assert answer.content == raw.encode()
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.headers["cache-control"] == "no-cache"
    assert simulator.log


@pytest.mark.parametrize(
    "script",
    [
        {"status": 400},
        {"status": 429, "retry_after_s": 7},
        {"status": 503, "raw_body": "<html>down</html>", "raw_content_type": "text/html"},
    ],
    ids=["400", "429", "503"],
)
async def test_status_of_a_stream_waits_for_the_upstream(served: tuple[Gateway, Simulator], script: dict[str, Any]) -> None:
    """A stream that the upstream refuses has the upstream's status, body and retry-after, not a 200 (D06)."""
    gateway, _ = served
    answer = await gateway.chat(stream=True, script=script)
    assert answer.status_code == script["status"]
    if "retry_after_s" in script:
        assert answer.headers["retry-after"] == "7"
    if "raw_body" in script:
        assert answer.text == script["raw_body"]


async def test_plain_body_cut_by_the_upstream_is_not_completed(served: tuple[Gateway, Simulator]) -> None:
    """Half a JSON body ends with a broken connection, never as if it were whole (D10)."""
    gateway, _ = served
    with pytest.raises(httpx2.RemoteProtocolError):
        await gateway.chat(script={"cut_after": 1})


async def test_upstream_401_is_not_the_clients(served: tuple[Gateway, Simulator]) -> None:
    """An upstream that refuses our key is a 502 that shows nothing of the key; its echo elsewhere is masked (D24)."""
    gateway, _ = served
    answer = await gateway.chat(script={"status": 401})
    assert answer.status_code == 502
    assert answer.json()["error"]["code"] == "upstream_key_refused"
    echoed = await gateway.chat(
        script={"status": 403, "raw_body": f"no: {gateway.upstream_keys[0]} sk-abc***xyz", "raw_content_type": "text/plain"}
    )
    assert (echoed.status_code, echoed.text) == (403, "no: [redacted] [redacted]")


async def test_websocket_upgrade_is_refused_so_that_clients_fall_back(served: tuple[Gateway, Simulator]) -> None:
    """An upgrade gets 426, which makes clients use HTTP at once."""
    gateway, _ = served
    sent = (
        f"GET /v1/responses HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {gateway.key}\r\nconnection: upgrade\r\n"
        "upgrade: websocket\r\nsec-websocket-key: x\r\nsec-websocket-version: 13\r\n\r\n"
    )
    assert (await _raw(gateway, sent.encode(), half_close=True)).startswith(b"HTTP/1.1 426 ")


async def test_offer_of_http2_is_ignored(served: tuple[Gateway, Simulator]) -> None:
    """A client that would rather speak HTTP/2 (curl --http2, Java) is served over HTTP/1.1, and its offer goes no further."""
    gateway, simulator = served
    simulator.clear_log()
    body = json.dumps(gateway.body()).encode()
    offer = "upgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
    sent = _post(gateway, body, extra=offer).replace(b"connection: close", b"connection: close, Upgrade, HTTP2-Settings")
    assert (await _raw(gateway, sent)).startswith(b"HTTP/1.1 200 ")
    assert simulator.log[0].body == body
    assert not {b"upgrade", b"http2-settings"} & {name.lower() for name, _ in simulator.log[0].headers}


async def test_trailers_are_no_headers(served: tuple[Gateway, Simulator]) -> None:
    """A trailer does not authenticate, and does not reach the upstream."""
    gateway, simulator = served
    simulator.clear_log()
    body = json.dumps(gateway.body()).encode()
    chunks = b"%x\r\n%b\r\n0\r\n" % (len(body), body)
    head = _post(gateway, b"").replace(b"content-length: 0", b"transfer-encoding: chunked")
    assert (await _raw(gateway, head + chunks + b"x-late: 1\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
    assert b"x-late" not in {name.lower() for name, _ in simulator.log[0].headers}
    key = f"authorization: Bearer {gateway.key}\r\n".encode()
    assert (await _raw(gateway, head.replace(key, b"") + chunks + key + b"\r\n")).startswith(b"HTTP/1.1 401 ")
    assert len(simulator.log) == 1


async def test_expect_continue(served: tuple[Gateway, Simulator]) -> None:
    """A client that waits for 100 Continue gets it, then its answer."""
    gateway, _ = served
    answer = await _raw(gateway, _post(gateway, json.dumps(gateway.body()).encode(), extra="expect: 100-continue\r\n"))
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK")


@pytest.mark.parametrize("scheme", ["Bearer ", "bearer ", "BEARER   "])
async def test_scheme_in_any_case(served: tuple[Gateway, Simulator], scheme: str) -> None:
    """The bearer scheme is matched in any case, the key is not (A27)."""
    gateway, _ = served
    headers = gateway.headers() | {"authorization": scheme + gateway.key}
    url = gateway.base_url + "/models"
    assert (await gateway.http.get(url, headers=headers)).status_code == 200
    headers["authorization"] = scheme + gateway.key.upper()
    assert (await gateway.http.get(url, headers=headers)).status_code == 401
