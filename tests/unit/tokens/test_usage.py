"""What answers say they used, and what is booked in the end."""

from __future__ import annotations

import json

import pytest

from proxy.tokens.estimate import MOST_TOKENS
from proxy.tokens.usage import Booking, Ending, StreamMeter, Usage, booking, usage_of_body

CHAT_USAGE = {
    "prompt_tokens": 9,
    "completion_tokens": 12,
    "total_tokens": 21,
    "prompt_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0, "audio_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 4, "audio_tokens": 0},
}
RESPONSES_USAGE = {
    "input_tokens": 36,
    "input_tokens_details": {"cached_tokens": 0},
    "output_tokens": 87,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 123,
}


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (CHAT_USAGE, Usage(9, 12, 21)),
        ({"prompt_tokens": 80, "total_tokens": 80}, Usage(80, 0, 80)),
        (RESPONSES_USAGE, Usage(36, 87, 123)),
        (
            {"type": "tokens", "input_tokens": 14, "input_token_details": {"text": 0}, "output_tokens": 45, "total_tokens": 59},
            Usage(14, 45, 59),
        ),
        ({"input_tokens": 50, "output_tokens": 50, "total_tokens": 100, "input_tokens_details": {"image": 40}}, Usage(50, 50, 100)),
        ({"prompt_tokens": 5, "completion_tokens": 7}, Usage(5, 7, 12)),
        ({"total_tokens": 30}, Usage(0, 30, 30)),
        ({"prompt_tokens": 5, "total_tokens": 30}, Usage(5, 25, 30)),
        ({"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 20}, Usage(5, 7, 20)),
        ({"prompt_tokens": 5, "completion_tokens": None, "total_tokens": 5}, Usage(5, 0, 5)),
        ({"prompt_tokens": 12.0, "completion_tokens": 3.0, "total_tokens": 15.0}, Usage(12, 3, 15)),
        ({"prompt_tokens": 12.2, "completion_tokens": 3}, Usage(13, 3, 16)),
        ({"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}, Usage(0, 0, 0)),
        ({"prompt_tokens": 1000, "completion_tokens": 500, "total_tokens": 0}, Usage(1000, 500, 1500)),
        ({"prompt_tokens": [9], "completion_tokens": 7, "total_tokens": "16"}, Usage(0, 7, 7)),
        ({"prompt_tokens": 0, "input_tokens": 9, "output_tokens": 7}, Usage(9, 7, 16)),
        ({"type": "duration", "seconds": 12.5}, None),
        ({}, None),
        (None, None),
        ({"total_tokens": -1}, None),
        ({"prompt_tokens": -5, "completion_tokens": 10, "total_tokens": 5}, None),
        ({"total_tokens": MOST_TOKENS}, Usage(0, MOST_TOKENS, MOST_TOKENS)),
        ({"total_tokens": MOST_TOKENS + 1}, None),
        ({"total_tokens": 10**30}, None),
        ({"prompt_tokens": "9"}, None),
        ({"prompt_tokens": True}, None),
        ({"prompt_tokens": [9]}, None),
        ([], None),
        ("9 tokens", None),
        (9, None),
    ],
)
def test_usage_of_a_body(usage, expected):
    """Chat, completions, embeddings, responses, transcriptions and images each report in their own shape (A24)."""
    found = usage_of_body(json.dumps({"id": "x", "usage": usage}).encode())
    assert found == expected
    assert found is None or all(type(count) is int for count in (found.input_tokens, found.output_tokens, found.total_tokens))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'"x"',
        b"{",
        b'{"id":1}',
        b"\xff\xfe",
        b'{"usage":{"total_tokens":1e400}}',
        b'{"usage":{"total_tokens":' + b"1" * 5000 + b"}}",
        b'{"usage":' + b"[" * 100_000,
    ],
    ids=lambda body: str(body[:30]),
)
def test_body_without_usage(body):
    """A body that has no usage or is no JSON at all reports none and raises nothing."""
    assert usage_of_body(body) is None


def see(*events):
    meter = StreamMeter()
    hidden = [meter.see(event if isinstance(event, bytes) else json.dumps(event).encode()) for event in events]
    return meter, hidden


def chunk(content=None, usage=None, **delta):
    return {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": content, **delta}}], "usage": usage}


def test_chat_stream_with_usage():
    """The extra chunk without choices gives the usage and is the only one to hide; [DONE] ends the stream (A02)."""
    extra = {"object": "chat.completion.chunk", "choices": [], "usage": CHAT_USAGE}
    meter, hidden = see(chunk("Hello"), chunk(" there"), extra, b"[DONE]")
    assert meter.usage == Usage(9, 12, 21)
    assert hidden == [False, False, True, False]
    assert meter.is_finished


@pytest.mark.parametrize("usage", [None, {}])
def test_chunk_without_choices_and_without_usage_is_not_hidden(usage):
    """No choices alone does not mean usage: filters and moderation send such chunks first."""
    _, hidden = see({"choices": [], "usage": usage, "prompt_filter_results": []})
    assert hidden == [False]


def test_usage_on_every_chunk():
    """With usage on every chunk the last one counts, and none that carries choices is hidden."""
    meter, hidden = see(
        chunk("a", {"prompt_tokens": 5, "completion_tokens": 1}), chunk("b", {"prompt_tokens": 5, "completion_tokens": 2})
    )
    assert meter.usage == Usage(5, 2, 7)
    assert hidden == [False, False]


def test_usage_in_two_events():
    """The larger of each count is kept: input comes in the first event, output in the last (Anthropic's way)."""
    first = {"type": "message_start", "message": {"usage": {"input_tokens": 100, "output_tokens": 1}}}
    text = {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "x" * 40}}
    last = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 50}}
    meter, _ = see(first, text, last)
    assert meter.usage == Usage(100, 50, 150)
    assert meter.counted_tokens == 10


@pytest.mark.parametrize(
    "odd",
    [
        {"choices": 7},
        {"choices": [7, None, {"delta": 7}, {"delta": {"content": 7, "tool_calls": {}}}]},
        {"choices": [{"delta": {"content": [{"type": "text", "text": "abcd"}]}}]},
        {"type": 7, "delta": [7], "response": 7, "message": "x"},
        {"type": ["error"], "choices": "x", "response": {"usage": 7}},
    ],
)
def test_odd_member_hides_no_usage(odd):
    """A member of an unexpected type leaves the usage beside it as it is."""
    meter, hidden = see({**odd, "usage": CHAT_USAGE})
    assert (meter.usage, meter.is_finished, hidden) == (Usage(9, 12, 21), False, [False])


def test_odd_number_hides_no_usage():
    """Not even a number that no double holds, or nesting without end, hides the usage beside it."""
    nested = b"[" * 800 + b"]" * 800
    meter, _ = see(b'{"delta":' + nested + b',"choices":[{"logprobs":-1e400}],"usage":{"prompt_tokens":1e400,"total_tokens":5}}')
    assert meter.usage == Usage(0, 5, 5)


def test_zero_usage_on_chunks_is_none():
    """Zeros on every chunk before the last are no usage: a stream that is cut there is booked by our own count."""
    meter, _ = see({"choices": [{"text": "abcdefgh"}], "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}})
    assert meter.usage is None
    assert meter.counted_tokens == 2


@pytest.mark.parametrize("kind", ["response.completed", "response.incomplete", "response.failed"])
def test_responses_stream(kind):
    """A responses stream reports in its terminal event."""
    created = {"type": "response.created", "response": {"id": "r", "usage": None}, "sequence_number": 0}
    meter, hidden = see(created, {"type": kind, "response": {"id": "r", "usage": RESPONSES_USAGE}})
    assert meter.usage == Usage(36, 87, 123)
    assert meter.is_finished
    assert hidden == [False, False]


@pytest.mark.parametrize(
    "kind", ["transcript.text.done", "speech.audio.done", "image_generation.completed", "image_edit.completed"]
)
def test_streams_that_report_in_their_done_event(kind):
    """Transcription, speech and image streams end with an event that carries the usage."""
    meter, _ = see({"type": kind, "usage": {"input_tokens": 3, "output_tokens": 4, "total_tokens": 7}})
    assert (meter.usage, meter.is_finished) == (Usage(3, 4, 7), True)


def test_error_event_ends_the_stream():
    """An error event is the last word and reports nothing."""
    meter, _ = see({"type": "error", "message": "no", "code": None})
    assert meter.is_finished
    assert meter.usage is None


@pytest.mark.parametrize(
    ("events", "tokens"),
    [
        ([chunk("x" * 40)], 10),
        ([chunk("a"), chunk("b"), chunk("c")], 3),
        ([chunk("é" * 8)], 4),
        ([chunk(None, reasoning_content="x" * 40)], 10),
        ([chunk(None, reasoning="x" * 40)], 10),
        ([chunk(None, function_call={"name": "f", "arguments": "x" * 40})], 10),
        ([chunk(None, refusal="x" * 40)], 10),
        ([chunk(None, tool_calls=[{"index": 0, "function": {"arguments": "x" * 40}}, {"index": 1}])], 10),
        ([{"choices": [{"text": "x" * 40}]}], 10),
        ([chunk([{"type": "thinking", "thinking": [{"type": "text", "text": "x" * 40}]}, {"type": "text", "text": "y" * 40}])], 20),
        (
            [
                chunk("x" * 40, tool_calls="y" * 8),
                chunk(7),
                {"choices": [{"delta": {"content": "x" * 4}, "logprobs": {"content": "y"}}]},
            ],
            13,
        ),
        ([{"choices": [{"delta": {"content": "x" * 8}}, {"delta": {"content": "x" * 8}}]}], 4),
        ([{"type": "response.output_text.delta", "delta": "x" * 40, "obfuscation": "y" * 90}], 10),
        ([{"type": "transcript.text.delta", "delta": "x" * 40}], 10),
        ([chunk(""), chunk(None), {"choices": None}, {"delta": {"x": "y"}}, {"delta": 7}], 0),
    ],
)
def test_own_count(events, tokens):
    """Output is counted as bytes / 4, at least one token for each event that carries some; padding is not output."""
    meter, _ = see(*events)
    assert meter.counted_tokens == tokens
    assert meter.usage is None


@pytest.mark.parametrize(
    "payload", [b"", b"[]", b"null", b"{", b"ping", b"\xff", b"[" * 100_000, b'{"choices":7}', b'{"usage":"x"}']
)
def test_unknown_events_pass(payload):
    """An event that is not understood counts nothing, hides nothing and raises nothing."""
    meter, hidden = see(payload)
    assert (meter.usage, meter.counted_tokens, meter.is_finished, hidden) == (None, 0, False, [False])


USED = Usage(40, 20, 60)
RESERVED = None
NOTHING = Usage(0, 0, 0)


@pytest.mark.parametrize(
    ("ending", "usage", "booked", "is_request_kept"),
    [
        (Ending.COMPLETE, USED, USED, True),
        (Ending.COMPLETE, None, RESERVED, True),
        (Ending.STREAM_ENDED, USED, USED, True),
        (Ending.STREAM_ENDED, None, Usage(100, 7, 107), True),
        (Ending.LEFT_WAITING, None, RESERVED, True),
        (Ending.LEFT_WAITING, USED, USED, True),
        (Ending.NEVER_SENT, None, NOTHING, False),
        (Ending.NEVER_SENT, USED, NOTHING, False),
        (Ending.UPSTREAM_FAILED, None, NOTHING, False),
        (Ending.UPSTREAM_FAILED, USED, NOTHING, False),
        (Ending.UPSTREAM_REFUSED, None, NOTHING, True),
        (Ending.UPSTREAM_REFUSED, USED, NOTHING, True),
    ],
)
def test_booking_table(ending, usage, booked, is_request_kept):
    """Each way of ending books what the table says: the usage where it is known and the request succeeded (A08)."""
    assert booking(ending, usage=usage, prompt_tokens=100, counted_tokens=7) == Booking(booked, is_request_kept=is_request_kept)
