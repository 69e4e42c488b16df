"""Estimates of what a request will use: a number for every body, never an exception."""

from __future__ import annotations

import contextlib
import json
import time

import msgspec
import pytest

from proxy.errors import InvalidRequest
from proxy.forwarding.body import read_json_body
from proxy.tokens.estimate import (
    AUDIO_TOKENS,
    DEFAULT_COMPLETION_TOKENS,
    FILE_TOKENS,
    IMAGE_TOKENS,
    LEGACY_COMPLETION_TOKENS,
    LOW_DETAIL_IMAGE_TOKENS,
    MOST_TOKENS,
    estimate,
)

CHAT = "/chat/completions"


def of(endpoint=CHAT, **members):
    return of_text(json.dumps(members).encode(), endpoint)


def of_text(text, endpoint=CHAT):
    return estimate(endpoint, msgspec.json.decode(text, type=dict[str, msgspec.Raw]))


def user(content):
    return [{"role": "user", "content": content}]  # "user" is one token


@pytest.mark.parametrize(
    ("messages", "tokens"),
    [
        (user("x" * 400), 101),
        (user("x" * 401), 102),
        (user("é" * 200), 101),
        (user("😀" * 100), 101),
        (user("a") * 3, 4),
        (user([{"type": "text", "text": "x" * 40}]), 11),
        (user([{"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 9000}}]), IMAGE_TOKENS + 1),
        (user([{"type": "image_url", "image_url": {"url": "https://x", "detail": "low"}}]), LOW_DETAIL_IMAGE_TOKENS + 1),
        (user([{"type": "image_url", "image_url": {"url": "https://x", "detail": "high"}}]), IMAGE_TOKENS + 1),
        (user([{"type": "input_audio", "input_audio": {"data": "A" * 9000, "format": "wav"}}]), AUDIO_TOKENS + 1),
        (user([{"type": "file", "file": {"file_data": "A" * 9000}}]), FILE_TOKENS + 1),
        (user([{"type": "text", "text": "x" * 40}, {"type": "image_url", "image_url": {"url": "u"}}]), IMAGE_TOKENS + 11),
        ([{"role": "user", "type": "file", "content": "x" * 4000}], 1001),
        ([{"type": "file", "content": "x" * 4000}], FILE_TOKENS + 1000),
        (user([{"type": "image_url", "image_url": {"url": "A" * 9000}, "text": "x" * 4000}]), IMAGE_TOKENS + 1001),
        (user([{"type": "text", "text": "x" * 40, "file": "y" * 40}]), 21),
        ([{"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "x" * 87}}]}], 25),
        ([], 1),
        ({}, 1),
        (None, 1),
        ("x" * 40, 10),
        (42, 1),
        (True, 1),
        ([None, [], {}, 1.5, [[]]], 1),
        ([{"type": 7, "text": "x" * 8}, {"type": ["image_url"]}, {"type": {}}], 2),
        ([{"type": "image_url", "image_url": None}, {"type": "image_url", "image_url": "u"}], 2 * IMAGE_TOKENS),
    ],
)
def test_prompt_of_messages(messages, tokens):
    """Text counts as bytes / 4 rounded up, images, audio and files by a flat figure, and anything else as little (A11)."""
    found = of(messages=messages)
    assert found.prompt_tokens == tokens
    assert not found.is_guess_of_size


@pytest.mark.parametrize(
    ("members", "tokens"),
    [
        ({"input": "x" * 40}, 10),
        ({"input": ["x" * 40, "y" * 4]}, 11),
        ({"input": [1, 2, 3]}, 3),
        ({"input": [[1, 2, 3], [4, 5]]}, 5),
        ({"input": [0, 0]}, 2),
        ({"prompt": [[1, 2], "abcd", 7]}, 4),
        ({"input": "x" * 4, "instructions": "x" * 4, "tools": [{"type": "function", "name": "abcd"}]}, 3),
        ({"input": [{"type": "input_image", "image_url": "data:" + "A" * 9000, "detail": "low"}]}, LOW_DETAIL_IMAGE_TOKENS),
        ({"input": [{"type": "input_image", "image_url": "data:" + "A" * 9000}]}, IMAGE_TOKENS),
        ({"input": [{"type": "input_file", "file_data": "A" * 9000}]}, FILE_TOKENS),
        ({"metadata": {"x": "y" * 4000}, "user": "z" * 4000}, 1),
    ],
)
def test_prompt_of_other_members(members, tokens):
    """Prompts, inputs, instructions and tools count; token arrays by their length; what is no prompt does not."""
    assert of("/responses", **members).prompt_tokens == tokens


@pytest.mark.parametrize(
    ("content", "tokens"),
    [
        (b"[" + b"12345," * 300_000 + b"7]", 300_001),
        (b"[" + b"[1, 2,3]," * 40_000 + b"[ ],[[]],[4]]", 120_001),
        (b'"' + "é😀".encode() * 1_000_000 + b'"', 1_500_000),
        (b'["' + b"x{},[]" * 100_000 + b'","' + b'\\"' * 4000 + b'"]', 151_000),
    ],
    ids=["tokens", "lists of tokens", "wide text", "code"],
)
def test_large_honest_prompt_is_exact(content, tokens):
    """Token arrays of any length, megabytes of text in any script and brackets inside strings are no guess."""
    found = estimate("/embeddings", {"input": msgspec.Raw(content)})
    assert (found.prompt_tokens, found.is_guess_of_size) == (tokens, False)


@pytest.mark.parametrize("content", [b'["a",' + b"1," * 100_001 + b"1]", b"[" + b'"",' * 200_001 + b'""]'])
def test_prompt_of_too_many_values_is_guessed_by_its_size(content):
    """Values by the hundred thousand are not built to be measured."""
    found = estimate("/embeddings", {"input": msgspec.Raw(content)})
    assert (found.prompt_tokens, found.is_guess_of_size) == (-(-len(content) // 4), True)


def test_many_values_in_several_members_are_too_many():
    """What may be built to be measured is shared by all members."""
    values = msgspec.Raw(b'["a",' + b"1," * 60_000 + b"1]")
    assert not estimate(CHAT, {"messages": values}).is_guess_of_size
    assert estimate(CHAT, {"messages": values, "prompt": values}).is_guess_of_size


@pytest.mark.parametrize(
    ("endpoint", "members", "tokens", "is_stated"),
    [
        (CHAT, {}, DEFAULT_COMPLETION_TOKENS, False),
        (CHAT, {"max_tokens": 10}, 10, True),
        (CHAT, {"max_completion_tokens": 20, "max_tokens": 10}, 20, True),
        ("/responses", {"max_output_tokens": 30}, 30, True),
        (CHAT, {"n": 3}, 3 * DEFAULT_COMPLETION_TOKENS, False),
        (CHAT, {"n": 3, "max_tokens": 10}, 30, True),
        ("/completions", {}, LEGACY_COMPLETION_TOKENS, False),
        ("/completions", {"n": 2, "best_of": 5, "max_tokens": 10}, 50, True),
        ("/completions", {"best_of": 1, "n": 4}, 4 * LEGACY_COMPLETION_TOKENS, False),
        ("/embeddings", {"max_tokens": 10}, 0, True),
        ("/moderations", {}, 0, True),
        ("/responses/input_tokens", {}, 0, True),
        (CHAT, {"max_tokens": 10.0}, 10, True),
        (CHAT, {"max_tokens": 10**30, "n": 10**30}, MOST_TOKENS, True),
        *(
            (CHAT, {"max_tokens": odd, "n": odd}, DEFAULT_COMPLETION_TOKENS, False)
            for odd in (0, -5, None, "9", True, [], {}, 0.5, -1e300)
        ),
    ],
)
def test_completion(endpoint, members, tokens, is_stated):
    """The client's own bound times the choices, else a default; what is no bound is left to the upstream to refuse."""
    found = of(endpoint, **members)
    assert (found.completion_tokens, found.is_completion_stated) == (tokens, is_stated)
    assert found.total_tokens == found.prompt_tokens + tokens


@pytest.mark.parametrize("number", [b"1e400", b"-1e400", b"1" * 5000, b"NaN", b'"\\ud83d"', b"[" * 200 + b"]" * 200])
def test_odd_numbers_are_no_bound(number):
    """Numbers that no integer holds do not raise (A11)."""
    found = estimate(CHAT, {"max_tokens": msgspec.Raw(number), "n": msgspec.Raw(number)})
    assert found.completion_tokens == DEFAULT_COMPLETION_TOKENS


@pytest.mark.parametrize("content", [b'"\\ud83d' + b"x" * 92 + b'"', b"[1e400" + b" " * 93 + b"]", b"[" + b"[]," * 60_000 + b"[]]"])
def test_unreadable_text_is_guessed_by_its_size(content):
    """Text that can't be decoded counts as its bytes / 4 and is marked so: bounded, and visible in a metric (A11)."""
    found = estimate(CHAT, {"messages": msgspec.Raw(content), "max_tokens": msgspec.Raw(b"5")})
    assert found.is_guess_of_size
    assert found.prompt_tokens == -(-len(content) // 4)
    assert found.completion_tokens == 5


@pytest.mark.parametrize(
    "content",
    [
        b'"' + b"\\\\" * 2_500_000 + b'"',
        b"[" + b"[]," * 1_666_666 + b"[]]",
        b"[" + b",".join([b"[" * 200 + b"]" * 200] * 12_500) + b"]",
        b"[" + b"{}," * 1_666_666 + b"{}]",
        b"[" + b"1," * 2_500_000 + b"1]",
        b'"' + b"x" * 5_000_000 + b'"',
    ],
    ids=["backslashes", "lists", "nested", "objects", "numbers", "text"],
)
def test_hostile_prompt_takes_no_time(content):
    """Five megabytes of brackets, backslashes or numbers are read and measured in a fraction of a second."""
    text = b'{"messages":' + content + b"}"
    began = time.process_time()
    with contextlib.suppress(InvalidRequest):
        assert estimate(CHAT, read_json_body(text, read_members=frozenset({"messages"})).members).prompt_tokens >= 1
    assert estimate(CHAT, {"messages": msgspec.Raw(content)}).prompt_tokens >= 1
    assert time.process_time() - began < 0.9
