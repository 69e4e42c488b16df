"""How scripts are followed on the wire, and that a client which leaves is noticed. Reading is left to others."""

from __future__ import annotations

import asyncio
import json

import httpx2
import pytest

from proxy.simulator import RunningSimulator, Script, Simulator

ASK = {"model": "gpt-4o", "messages": [{"role": "user", "content": "Hello?"}]}
STREAM = ASK | {"stream": True}
CHAT = "/v1/chat/completions"


def script(**fields):
    return {"x-sim-script": json.dumps(fields)}


class Wire:
    """A connection of bytes, for what HTTP clients hide."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    @classmethod
    async def to(cls, running):
        return cls(*await asyncio.open_connection(running.host, running.port))

    def ask(self, key, body, **fields):
        data = json.dumps(body).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: sim\r\nauthorization: Bearer {key}\r\ncontent-length: {len(data)}\r\n"
        self.writer.write(head.encode() + f"x-sim-script: {json.dumps(fields)}\r\n\r\n".encode() + data)

    async def close(self):
        self.writer.close()
        await self.writer.wait_closed()


@pytest.fixture
async def wire(running):
    wire = await Wire.to(running)
    yield wire
    wire.writer.transport.abort()


async def test_status_is_followed(client):
    """The scripted error is answered with its headers, over those of a healthy answer."""
    answer = await client.post(CHAT, json=ASK, headers=script(status=429, retry_after_s=2))
    assert answer.status_code == 429
    assert (answer.headers["retry-after"], answer.headers["x-ratelimit-remaining-tokens"]) == ("2", "0")
    assert answer.headers["x-request-id"].startswith("req_")


async def test_status_below_400_keeps_the_answer(client):
    """Any status of success comes with the usual answer."""
    answer = await client.post(CHAT, json=ASK, headers=script(status=202))
    assert (answer.status_code, answer.json()["object"]) == (202, "chat.completion")


async def test_no_content_has_no_body(client):
    """A status that allows no body has none."""
    answer = await client.post(CHAT, json=ASK, headers=script(status=204))
    assert (answer.status_code, answer.content) == (204, b"")


async def test_raw_answer_is_sent_as_it_is(client):
    """A raw body goes out with its own type and headers, and none of OpenAI's."""
    fields = script(status=502, raw_body="<html>Bad", raw_content_type="text/html", raw_headers={"X-Edge": "1"}, chunk_bytes=2)
    answer = await client.post(CHAT, json=ASK, headers=fields)
    assert (answer.status_code, answer.text) == (502, "<html>Bad")
    assert dict(answer.headers) == {"content-type": "text/html", "content-length": "9", "x-edge": "1"}


async def test_raw_headers_replace_those_of_an_answer(client):
    """Scripted headers win over OpenAI's, and may come several times."""
    pairs = [["x-ratelimit-remaining-requests", "3"], ["set-cookie", "a=1"], ["set-cookie", "b=2"]]
    answer = await client.post(CHAT, json=ASK, headers=script(raw_headers=pairs))
    assert answer.headers.get_list("x-ratelimit-remaining-requests") == ["3"]
    assert answer.headers.get_list("set-cookie") == ["a=1", "b=2"]
    assert answer.json()["object"] == "chat.completion"


@pytest.mark.parametrize("size", [1, 7, 65536])
async def test_pieces_join_to_the_same_stream(client, size):
    """Whatever the size of the pieces, the bytes are the same, and no piece but the last is smaller."""
    plain = (await client.post(CHAT, json=STREAM)).content.replace(b"00000001", b"00000002")
    pieces = []
    async with client.stream("POST", CHAT, json=STREAM, headers=script(chunk_bytes=size)) as answer:
        pieces = [piece async for piece in answer.aiter_raw(size)]
    assert b"".join(pieces) == plain
    assert {len(piece) for piece in pieces[:-1]} <= {size}


async def test_pace_and_latency_delay_but_do_not_change(client):
    """A slow answer is the same answer."""
    plain = (await client.post(CHAT, json=STREAM)).content.replace(b"00000001", b"00000002")
    slow = await client.post(CHAT, json=STREAM, headers=script(latency_s=0.001, token_pace_s=0.0001))
    assert slow.content == plain


@pytest.mark.parametrize("cut", ["fin", "reset"])
@pytest.mark.parametrize("body", [ASK, STREAM])
async def test_connection_is_cut_in_the_middle(client, simulator, body, cut):
    """A cut ends the connection without an end of the answer, in a stream and in a whole body."""
    with pytest.raises((httpx2.RemoteProtocolError, httpx2.ReadError)):
        await client.post(CHAT, json=body, headers=script(cut_after=3, cut=cut))
    (seen,) = await simulator.wait_for(lambda log: log[0].cut)
    assert (seen.answered_status, seen.finished, seen.disconnected) == (200, False, False)
    assert seen.tokens_sent == (3 if body is STREAM else 0)


async def test_fin_delivers_what_was_sent_before(wire, key):
    """A cut by FIN comes after the tokens, without the last chunk of the body."""
    wire.ask(key, STREAM, cut_after=3)
    received = await wire.reader.read()
    assert received.count(b'"delta":{"content":') == 3
    assert not received.endswith(b"0\r\n\r\n")


async def test_reset_is_a_reset(wire, key):
    """A cut by reset is seen as one by the client."""
    wire.ask(key, ASK, drop=True, cut="reset")
    with pytest.raises(ConnectionResetError):
        await wire.reader.read()


async def test_half_of_a_whole_answer_precedes_its_cut(wire, key):
    """A whole body is cut in its middle, short of the length it promised."""
    wire.ask(key, ASK, cut_after=0)
    head, _, body = (await wire.reader.read()).partition(b"\r\n\r\n")
    length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
    assert len(body) == length // 2


async def test_connection_is_dropped_without_an_answer(wire, key, simulator):
    """A drop answers no byte."""
    wire.ask(key, ASK, drop=True)
    assert await wire.reader.read() == b""
    assert simulator.log[0].answered_status is None


async def test_cuts_leave_no_trace_in_the_log_of_the_server(client, caplog):
    """Neither a cut nor a client that left makes the server report an error."""
    for fields in ({"cut_after": 1}, {"drop": True}):
        with pytest.raises(httpx2.TransportError):
            await client.post(CHAT, json=STREAM, headers=script(**fields))
    assert caplog.records == []


@pytest.mark.parametrize(
    ("body", "fields", "sent"),
    [
        (ASK, {"latency_s": 3600}, 0),
        (ASK, {"hang": "headers"}, 0),
        (ASK, {"hang": "body"}, 0),
        (ASK, {"hang_after": 0}, 0),
        (ASK, {"hold": "never"}, 0),
        (STREAM, {"hang": "body"}, 0),
        (STREAM, {"hang_after": 2}, 2),
        (STREAM, {"hang_after": 0}, 0),
        (STREAM, {"hold": "never", "hold_after": 5}, 5),
        (STREAM, {"token_pace_s": 3600}, 1),
        (STREAM, {"chunk_bytes": 100, "hang_after": 4}, 4),
    ],
)
async def test_client_that_leaves_is_noticed(wire, key, simulator, clock, caplog, *, body, fields, sent):
    """In every phase the end of the connection ends the work, and the log says when."""
    wire.ask(key, body, **fields)
    await simulator.wait_for(lambda log: bool(log) and log[0].tokens_sent == sent)
    clock.now += 5
    await wire.close()
    (seen,) = await simulator.wait_for(lambda log: log[0].disconnected)
    assert (seen.finished, seen.tokens_sent) == (False, sent)
    assert seen.disconnected_at == seen.started_at + 5
    assert caplog.records == []


async def test_client_that_leaves_a_fast_stream_is_noticed(wire, key, simulator):
    """A stream without pauses ends as well when nobody reads it any more."""
    wire.ask(key, STREAM, tokens=100_000)
    await wire.reader.readuntil(b'"delta":{"content":')
    wire.writer.transport.abort()
    (seen,) = await simulator.wait_for(lambda log: log[0].disconnected)
    assert 0 < seen.tokens_sent < 100_000


async def test_client_that_leaves_while_it_sends_is_noticed(wire, simulator):
    """A request that never becomes whole is logged as left."""
    wire.writer.write(b"POST /v1/files HTTP/1.1\r\nhost: sim\r\ncontent-length: 9\r\n\r\nabc")
    await wire.close()
    (seen,) = await simulator.wait_for(lambda log: bool(log) and log[0].disconnected)
    assert (seen.path, seen.answered_status) == ("/v1/files", None)


async def test_answers_wait_at_a_gate(client, simulator):
    """All that wait are let through by one release, and so is everyone after."""
    waiting = [asyncio.create_task(client.post(CHAT, json=ASK, headers=script(hold="door"))) for _ in range(3)]
    await simulator.wait_for(lambda log: len(log) == 3)
    assert [seen.answered_status for seen in simulator.log] == [None] * 3
    simulator.release("door")
    assert [(await task).status_code for task in waiting] == [200] * 3
    assert (await client.post(CHAT, json=ASK, headers=script(hold="door"))).status_code == 200


async def test_stream_waits_at_a_gate_in_its_middle(client, simulator):
    """A gate after some tokens holds the rest back, and is released remotely too."""
    task = asyncio.create_task(client.post(CHAT, json=STREAM, headers=script(hold="door", hold_after=2)))
    await simulator.wait_for(lambda log: bool(log) and log[0].tokens_sent == 2)
    await client.post("/_sim/release", json={"gate": "door"})
    assert (await task).text.endswith("data: [DONE]\n\n")


async def test_connection_is_kept_after_an_answer(wire, key):
    """Two requests in turn are answered on one connection."""
    for _ in range(2):
        wire.ask(key, STREAM)
        assert (await wire.reader.readuntil(b"\r\n0\r\n\r\n")).startswith(b"HTTP/1.1 200 OK\r\n")


async def test_stop_does_not_wait_for_answers(clock, key, caplog):
    """Hanging requests and idle connections end with the simulator, as left by their clients."""
    simulator = Simulator(clock, default_script=Script(hang="headers"))
    running = RunningSimulator(simulator)
    await running.start()
    idle, hanging = await Wire.to(running), await Wire.to(running)
    hanging.ask(key, ASK)
    await simulator.wait_for(lambda log: len(log) == 1)
    await running.stop()
    await running.stop()
    assert simulator.log[0].disconnected
    for wire in (idle, hanging):
        assert await wire.reader.read() == b""
        await wire.close()
    assert caplog.records == []


async def test_port_in_use_is_an_error_to_the_caller(running, simulator):
    """A port that is taken raises OSError rather than ending the process."""
    with pytest.raises(OSError, match="in use"):
        await RunningSimulator(simulator, port=running.port).start()


async def test_port_can_be_used_again(simulator):
    """A stopped simulator leaves its port free at once."""
    first = RunningSimulator(simulator)
    await first.start()
    await first.stop()
    async with RunningSimulator(simulator, port=first.port) as again:
        assert again.base_url == first.base_url == f"http://127.0.0.1:{first.port}/v1"
