"""What the endpoints answer, from the request alone. Sending is left to the tests that go through a socket."""

from __future__ import annotations

import base64
import json
import struct

import pytest

from proxy.simulator import answers
from proxy.simulator.reply import Refusal, scripted_error
from proxy.simulator.script import NOTHING, Script
from proxy.simulator.wording import Facts

ASK = {
    "model": "gpt-4o",
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"}],
}


def whole(make, payload, script=NOTHING, number=1):
    return json.loads(make(payload, Facts(number, 1_700_000_000, script)).body)


def streamed(make, payload, script=NOTHING):
    """The records as (data, is_token), data parsed unless it is the end marker."""
    reply = make(payload | {"stream": True}, Facts(1, 1_700_000_000, script))
    assert reply.content_type == b"text/event-stream; charset=utf-8"
    found = []
    for record, is_token in reply.records:
        assert record.endswith(b"\n\n")
        assert record.count(b"\n\n") == 1
        data = record.decode().rstrip("\n").split("\n")[-1].removeprefix("data: ")
        found.append((data if data == "[DONE]" else json.loads(data), is_token))
    return found


def test_same_question_gives_the_same_text_under_another_id():
    """The text depends on the body only; ids tell repeated requests apart."""
    first, second = whole(answers.chat, ASK, number=1), whole(answers.chat, ASK, number=2)
    assert first["choices"] == second["choices"]
    assert first["id"] != second["id"]
    assert first["id"].startswith("chatcmpl-")


def test_another_model_or_user_message_gives_another_text():
    """The words are chosen by model and last user message."""
    texts = {
        whole(answers.chat, ASK | change)["choices"][0]["message"]["content"]
        for change in ({}, {"model": "gpt-4.1"}, {"messages": [{"role": "user", "content": "Goodbye?"}]})
    }
    assert len(texts) == 3


def test_chat_counts_a_token_per_four_bytes_of_text():
    """All text parts count for the prompt, in UTF-8; sixteen tokens are the answer."""
    parts = [
        {"type": "text", "text": "äö"},
        {"type": "image_url", "image_url": {"url": "x" * 99}},
        {"type": "text", "text": "a"},
    ]
    usage = whole(answers.chat, ASK | {"messages": [{"role": "user", "content": parts}]})["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (2, 16, 18)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 0


def test_prompt_has_at_least_one_token():
    """A request without any text still counts one."""
    assert whole(answers.chat, ASK | {"messages": [{"role": "user"}]})["usage"]["prompt_tokens"] == 1


@pytest.mark.parametrize(
    ("change", "script", "count", "reason"),
    [
        ({}, NOTHING, 16, "stop"),
        ({"max_tokens": 5}, NOTHING, 5, "length"),
        ({"max_completion_tokens": 4, "max_tokens": 9}, NOTHING, 4, "length"),
        ({"max_tokens": 100}, NOTHING, 16, "stop"),
        ({}, Script(tokens=40), 40, "stop"),
        ({"max_tokens": 30}, Script(tokens=40), 30, "length"),
        ({}, Script(tokens=0), 0, "stop"),
    ],
)
def test_smaller_of_script_and_request_decides_the_length(change, script, count, reason):
    """The answer has the script's tokens, unless the request allows fewer."""
    document = whole(answers.chat, ASK | change, script)
    (choice,) = document["choices"]
    assert document["usage"]["completion_tokens"] == len(choice["message"]["content"].split()) == count
    assert choice["finish_reason"] == reason


def test_choices_differ_and_all_are_counted():
    """With n there are n answers, and usage counts the tokens of all of them."""
    document = whole(answers.chat, ASK | {"n": 3, "max_tokens": 5})
    assert len({choice["message"]["content"] for choice in document["choices"]}) == 3
    assert document["usage"]["completion_tokens"] == 15


def test_chat_stream_carries_one_token_per_chunk():
    """A stream gives the role, a token at a time, the reason and the marker; its tokens are the whole answer."""
    records = streamed(answers.chat, ASK)
    tokens = [data["choices"][0]["delta"]["content"] for data, is_token in records if is_token]
    assert records[0][0]["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert len(tokens) == 16
    assert "".join(tokens) == whole(answers.chat, ASK)["choices"][0]["message"]["content"]
    assert records[-2][0]["choices"][0]["finish_reason"] == "stop"
    assert records[-1] == ("[DONE]", False)
    assert not any("usage" in data for data, _ in records[:-1])


@pytest.mark.parametrize("make", [answers.chat, answers.complete])
def test_stream_reports_usage_only_when_asked(make):
    """With include_usage one chunk without choices carries usage, and all others say null."""
    ask = ASK | {"prompt": "Hello", "stream_options": {"include_usage": True}, "n": 2, "max_tokens": 3}
    *chunks, last, done = [data for data, _ in streamed(make, ask)]
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 6
    assert {chunk["usage"] for chunk in chunks} == {None}


def test_chunks_are_padded_unless_unwanted():
    """Each chunk carries padding as OpenAI's do, and none when the request says so."""
    assert all(data["obfuscation"] for data, _ in streamed(answers.chat, ASK)[:-1])
    plain = streamed(answers.chat, ASK | {"stream_options": {"include_obfuscation": False}})
    assert not any("obfuscation" in data for data, _ in plain[:-1])


def test_scripted_usage_replaces_the_true_one():
    """The script decides what usage says, in a whole answer and in a stream."""
    script = Script(usage={"total_tokens": 7})
    ask = ASK | {"stream_options": {"include_usage": True}}
    assert whole(answers.chat, ASK, script)["usage"] == {"total_tokens": 7}
    assert streamed(answers.chat, ask, script)[-2][0]["usage"] == {"total_tokens": 7}


def test_scripted_usage_can_be_left_out():
    """Usage of none is left out everywhere, even when the request asks for it."""
    script = Script(usage="none")
    ask = ASK | {"stream_options": {"include_usage": True}}
    assert "usage" not in whole(answers.chat, ASK, script)
    assert "usage" not in whole(answers.embed, {"model": "m", "input": "x"}, script)
    assert whole(answers.respond, {"input": "x"}, script)["usage"] is None
    assert not any("usage" in data for data, _ in streamed(answers.chat, ask, script)[:-1])


@pytest.mark.parametrize("make", [answers.chat, answers.complete])
def test_stream_may_end_without_its_marker(make):
    """With no_done the stream ends after its last chunk."""
    records = streamed(make, ASK | {"prompt": "x"}, Script(no_done=True))
    assert records[-1][0]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("make", [answers.chat, answers.complete])
def test_error_breaks_into_a_stream(make):
    """After the scripted tokens comes the error, and then the marker."""
    records = streamed(make, ASK | {"prompt": "x", "n": 2}, Script(error_in_stream=3, error_code="slow_down"))
    assert sum(is_token for _, is_token in records) == 3
    assert records[-2][0]["error"]["code"] == "slow_down"
    assert records[-1][0] == "[DONE]"


@pytest.mark.parametrize(
    ("prompt", "choices", "tokens"),
    [("Hello", 1, 2), (["Hello", "You"], 2, 3), ([1, 2, 3], 1, 3), ([[1, 2], [3]], 2, 3)],
)
def test_legacy_completion_takes_text_and_token_ids(prompt, choices, tokens):
    """Every form of prompt is counted, and each prompt is answered."""
    document = whole(answers.complete, {"model": "m", "prompt": prompt})
    assert document["object"] == "text_completion"
    assert [choice["index"] for choice in document["choices"]] == list(range(choices))
    assert document["usage"]["prompt_tokens"] == tokens


def test_legacy_stream_joins_to_the_whole_text():
    """The tokens of the stream are the text of the whole answer."""
    ask = {"model": "m", "prompt": "Hello"}
    text = "".join(data["choices"][0]["text"] for data, _ in streamed(answers.complete, ask)[:-1])
    assert text == whole(answers.complete, ask)["choices"][0]["text"]


@pytest.mark.parametrize(
    ("given", "vectors", "tokens"), [("Hello", 1, 2), (["a", "b"], 2, 2), ([1, 2], 1, 2), ([[1], [2, 3]], 2, 3)]
)
def test_embeddings_take_text_and_token_ids(given, vectors, tokens):
    """Every form of input is counted, and each input has a vector of length one."""
    document = whole(answers.embed, {"model": "m", "input": given, "dimensions": 8})
    assert [item["index"] for item in document["data"]] == list(range(vectors))
    assert all(sum(value * value for value in item["embedding"]) == pytest.approx(1, abs=1e-5) for item in document["data"])
    assert document["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


def test_embedding_is_the_same_in_both_encodings():
    """Base64 holds the little-endian 32-bit floats that the list shows."""
    ask = {"model": "text-embedding-3-small", "input": "Hello"}
    listed = whole(answers.embed, ask)["data"][0]["embedding"]
    packed = base64.b64decode(whole(answers.embed, ask | {"encoding_format": "base64"})["data"][0]["embedding"])
    assert list(struct.unpack("<1536f", packed)) == listed


def test_response_counts_and_speaks():
    """A response has one message, and usage under its own names."""
    document = whole(answers.respond, {"model": "m", "input": "Hello", "instructions": "Brief"})
    assert document["status"] == "completed"
    assert len(document["output"][0]["content"][0]["text"].split()) == 16
    assert document["usage"]["input_tokens"] == 3
    assert document["usage"]["output_tokens_details"] == {"reasoning_tokens": 0}


def test_response_stream_tells_its_events_in_order():
    """The typed events come in OpenAI's order, numbered, and the last holds the whole response."""
    ask = {"model": "m", "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}]}
    events = [data for data, _ in streamed(answers.respond, ask, Script(tokens=2))]
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(10))
    assert events[0]["response"]["usage"] is None
    assert events[-1]["response"] == whole(answers.respond, ask, Script(tokens=2))


def test_response_cut_short_by_its_limit_is_incomplete():
    """A limit below the answer's length ends it with the event for that."""
    last, _ = streamed(answers.respond, {"input": "Hello", "max_output_tokens": 3})[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


def test_error_breaks_into_a_response_stream():
    """The error is the last event, in the flat form that the Responses API has."""
    last, _ = streamed(answers.respond, {"input": "Hello"}, Script(error_in_stream=1, error_message="Broken."))[-1]
    assert (last["type"], last["message"]) == ("error", "Broken.")


def test_response_stream_may_end_without_its_last_event():
    """With no_done the terminal event is missing."""
    last, _ = streamed(answers.respond, {"input": "Hello"}, Script(no_done=True))[-1]
    assert last["type"] == "response.output_item.done"


@pytest.mark.parametrize(
    ("make", "payload", "param"),
    [
        (answers.chat, {"messages": ASK["messages"]}, None),
        (answers.chat, {"model": "m"}, "messages"),
        (answers.chat, {"model": "m", "messages": []}, "messages"),
        (answers.chat, ASK | {"max_tokens": 0}, "max_tokens"),
        (answers.chat, ASK | {"max_tokens": "5"}, "max_tokens"),
        (answers.chat, ASK | {"n": 129}, "n"),
        (answers.complete, {"model": "m", "prompt": []}, "prompt"),
        (answers.complete, {"model": "m", "prompt": [[]]}, "prompt"),
        (answers.embed, {"model": "m"}, "input"),
        (answers.embed, {"model": "m", "input": "x", "dimensions": 0}, "dimensions"),
        (answers.embed, {"model": "m", "input": "x", "encoding_format": "int8"}, "encoding_format"),
        (answers.respond, {"input": 3}, "input"),
        (answers.moderate, {}, "input"),
    ],
)
def test_unusable_request_is_refused_by_parameter(make, payload, param):
    """A request that OpenAI would refuse is refused with 400, naming the parameter."""
    with pytest.raises(Refusal) as refused:
        make(payload, Facts(1, 0, NOTHING))
    assert refused.value.status == 400
    assert json.loads(refused.value.body)["error"]["param"] == param


@pytest.mark.parametrize(
    ("script", "headers", "kind", "code"),
    [
        (Script(status=429), {"retry-after": "1"}, "tokens", "rate_limit_exceeded"),
        (
            Script(status=429, retry_after_s=1.146),
            {"retry-after": "2", "retry-after-ms": "1146"},
            "tokens",
            "rate_limit_exceeded",
        ),
        (Script(status=429, error_code="insufficient_quota"), {}, "insufficient_quota", "insufficient_quota"),
        (Script(status=429, error_type="requests"), {"retry-after": "1"}, "requests", "rate_limit_exceeded"),
        (Script(status=401), {}, "invalid_request_error", "invalid_api_key"),
        (Script(status=500), {}, "server_error", None),
        (Script(status=503, retry_after_s=7), {"retry-after": "7"}, "server_error", "server_is_overloaded"),
        (Script(status=418), {}, "invalid_request_error", None),
        (Script(status=599, error_type="t", error_code="c"), {}, "t", "c"),
    ],
)
def test_scripted_error_has_the_shape_of_openai(script, headers, kind, code):
    """Type, code and retry headers follow the status where the script does not say otherwise."""
    reply = scripted_error(script, script.status, model="gpt-4o", key="sk-simulated-0123456789-wxyz")
    error = json.loads(reply.body)["error"]
    sent = {name.decode(): value.decode() for name, value in reply.headers if name.startswith(b"retry")}
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"], sent) == (kind, code, headers)


@pytest.mark.parametrize(("seconds", "text"), [(0.084, "84ms"), (1.146, "1.146s"), (60, "1m0s"), (90, "1m30s")])
def test_rate_limit_text_says_when_to_try_again(seconds, text):
    """The sentence names the model and the wait in OpenAI's notation."""
    reply = scripted_error(Script(status=429, retry_after_s=seconds), 429, model="gpt-4o", key="k")
    assert f"try again in {text}. Visit" in json.loads(reply.body)["error"]["message"]


@pytest.mark.parametrize(
    ("key", "shown"), [("sk-simulated-0123456789-wxyz", "sk-simul****************wxyz"), ("sk-a", "sk-********")]
)
def test_wrong_key_is_echoed_in_part(key, shown):
    """A 401 shows the ends of the key, as OpenAI's does."""
    reply = scripted_error(Script(status=401), 401, model=None, key=key)
    assert f"provided: {shown}." in json.loads(reply.body)["error"]["message"]
