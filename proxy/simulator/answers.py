"""What each endpoint answers, whole or as a stream: chat, legacy completions, embeddings, moderations and models.

The Responses API is left to ``responses.py``, the words to ``wording.py``, and what goes wrong on purpose to others.
"""

from __future__ import annotations

import base64
import hashlib
import math
import struct
from typing import TYPE_CHECKING, Any

import msgspec

from proxy.simulator.reply import EVENT_STREAM, Record, Refusal, Reply, stream_error
from proxy.simulator.responses import respond
from proxy.simulator.wording import (
    Facts,
    Wording,
    choices_of,
    emitted,
    fingerprint,
    identifier,
    model_of,
    obfuscation,
    prompts_of,
    size_of,
    text_of,
    token_count,
    with_usage,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from proxy.simulator.script import Script

encode = msgspec.json.encode

DONE = b"data: [DONE]\n\n"
MODELS = (
    "gpt-4.1",
    "gpt-4.1-mini",
    "gpt-4o",
    "gpt-4o-mini",
    "gpt-3.5-turbo-instruct",
    "text-embedding-3-small",
    "text-embedding-3-large",
    "omni-moderation-latest",
)
_MODELS_CREATED = 1721172741
_MOST_DIMENSIONS = 3072
_CATEGORY_LIST = (
    "harassment harassment/threatening hate hate/threatening illicit illicit/violent self-harm self-harm/intent "
    "self-harm/instructions sexual sexual/minors violence violence/graphic"
)
_CATEGORIES = _CATEGORY_LIST.split()


def usage(prompt: int, completion: int) -> dict[str, Any]:
    """Usage as chat and completions report it."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def _sse(document: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % encode(document)


def _options(payload: dict[str, Any]) -> dict[str, Any]:
    options = payload.get("stream_options")
    return options if isinstance(options, dict) else {}


def _tokens(saying: list[list[str]], script: Script, chunk: Callable[[int, str], dict[str, Any]]) -> Iterator[Record]:
    """One record per token, the choices in turn; ends early with an error where the script wants one."""
    limit, sent = script.error_in_stream, 0
    for at in range(len(saying[0])):
        for index, tokens in enumerate(saying):
            if sent == limit:
                return
            yield _sse(chunk(index, tokens[at])), True
            sent += 1


def _ending(script: Script, last: list[dict[str, Any]], count: int) -> Iterator[Record]:
    """What follows the tokens: the last documents, or the scripted error, and then the terminal marker."""
    if script.error_in_stream is not None and script.error_in_stream <= count:
        yield _sse({"error": stream_error(script)}), False
    else:
        for document in last:
            yield _sse(document), False
    if not script.no_done:
        yield DONE, False


# Chat -----------------------------------------------------------------------------------------------------------------


def chat(payload: dict[str, Any], facts: Facts) -> Reply:
    """POST /v1/chat/completions."""
    model = model_of(payload)
    messages = payload.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise Refusal(400, "Invalid 'messages': expected an array of objects with at least one item.", param="messages")
    texts = [text_of(message.get("content")) for message in messages]
    asked = [text for text, message in zip(texts, messages, strict=True) if message.get("role") == "user"]
    wording = Wording.of(model, (asked or texts)[-1])
    count, is_limited = emitted(payload, facts.script, "max_tokens", "max_completion_tokens")
    saying = [wording.tokens(count, choice) for choice in range(choices_of(payload))]
    spent = usage(token_count(sum(map(size_of, texts))), count * len(saying))
    head = {
        "id": identifier("chatcmpl-", facts, wording),
        "object": "chat.completion",
        "created": facts.created,
        "model": model,
    }
    reason = "length" if is_limited else "stop"
    if payload.get("stream") is True:
        head["object"] = "chat.completion.chunk"
        records = _chat_records(head, saying, reason, spent, script=facts.script, options=_options(payload))
        return Reply(content_type=EVENT_STREAM, records=records)
    choices: list[dict[str, Any]] = [
        {
            "index": index,
            "message": {"role": "assistant", "content": "".join(tokens), "refusal": None, "annotations": []},
            "logprobs": None,
            "finish_reason": reason,
        }
        for index, tokens in enumerate(saying)
    ]
    document = with_usage(head | {"choices": choices}, spent, facts.script)
    document |= {"service_tier": "default", "system_fingerprint": fingerprint(model)}
    return Reply(encode(document), tokens=count * len(saying))


def _chat_records(
    head: dict[str, Any],
    saying: list[list[str]],
    reason: str,
    spent: dict[str, Any],
    *,
    script: Script,
    options: dict[str, Any],
) -> Iterator[Record]:
    head = head | {"service_tier": "default", "system_fingerprint": fingerprint(head["model"])}
    wants_usage = options.get("include_usage") is True and script.usage != "none"
    tail: dict[str, Any] = {"usage": None} if wants_usage else {}
    is_padded = options.get("include_obfuscation") is not False

    def chunk(index: int, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
        padding = {"obfuscation": obfuscation(delta.get("content", ""))} if is_padded else {}
        return {**head, "choices": [choice], **tail, **padding}

    for index in range(len(saying)):
        yield _sse(chunk(index, {"role": "assistant", "content": "", "refusal": None})), False
    yield from _tokens(saying, script, lambda index, token: chunk(index, {"content": token}))
    last = [chunk(index, {}, reason) for index in range(len(saying))]
    if wants_usage:
        last.append(with_usage({**head, "choices": []}, spent, script))
    yield from _ending(script, last, sum(map(len, saying)))


# Legacy completions ---------------------------------------------------------------------------------------------------


def complete(payload: dict[str, Any], facts: Facts) -> Reply:
    """POST /v1/completions."""
    model = model_of(payload)
    prompts = prompts_of(payload.get("prompt", "<|endoftext|>"), "prompt")
    wordings = [Wording.of(model, text) for text, _ in prompts]
    count, is_limited = emitted(payload, facts.script, "max_tokens")
    saying = [wording.tokens(count, choice) for wording in wordings for choice in range(choices_of(payload))]
    spent = usage(sum(size for _, size in prompts), count * len(saying))
    head = {
        "id": identifier("cmpl-", facts, wordings[0]),
        "object": "text_completion",
        "created": facts.created,
        "model": model,
    }
    reason = "length" if is_limited else "stop"
    if payload.get("stream") is True:
        wants_usage = _options(payload).get("include_usage") is True and facts.script.usage != "none"
        records = _completion_records(head, saying, reason, spent if wants_usage else None, facts.script)
        return Reply(content_type=EVENT_STREAM, records=records)
    choices = [_completion_choice(index, "".join(tokens), reason) for index, tokens in enumerate(saying)]
    document = with_usage(head | {"choices": choices}, spent, facts.script)
    return Reply(encode(document), tokens=count * len(saying))


def _completion_choice(index: int, text: str, reason: str | None) -> dict[str, Any]:
    return {"text": text, "index": index, "logprobs": None, "finish_reason": reason}


def _completion_records(
    head: dict[str, Any], saying: list[list[str]], reason: str, spent: dict[str, Any] | None, script: Script
) -> Iterator[Record]:
    tail: dict[str, Any] = {} if spent is None else {"usage": None}

    def chunk(index: int, text: str, finish: str | None = None) -> dict[str, Any]:
        return {**head, "choices": [_completion_choice(index, text, finish)], **tail}

    yield from _tokens(saying, script, chunk)
    last = [chunk(index, "", reason) for index in range(len(saying))]
    if spent is not None:
        last.append(with_usage({**head, "choices": []}, spent, script))
    yield from _ending(script, last, sum(map(len, saying)))


# Embeddings -----------------------------------------------------------------------------------------------------------


def embed(payload: dict[str, Any], facts: Facts) -> Reply:
    """POST /v1/embeddings."""
    model = model_of(payload)
    inputs = prompts_of(payload.get("input"), "input")
    size = payload.get("dimensions")
    if size is None:
        size = _MOST_DIMENSIONS if model == "text-embedding-3-large" else 1536
    if not isinstance(size, int) or not 1 <= size <= _MOST_DIMENSIONS:
        raise Refusal(400, f"Invalid 'dimensions': expected an integer of 1 to {_MOST_DIMENSIONS}.", param="dimensions")
    form = payload.get("encoding_format", "float")
    if form not in {"float", "base64"}:
        raise Refusal(400, "Invalid 'encoding_format': expected 'float' or 'base64'.", param="encoding_format")
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": _vector(Wording.of(model, text), size, is_packed=form == "base64"),
        }
        for index, (text, _) in enumerate(inputs)
    ]
    total = sum(count for _, count in inputs)
    document = {"object": "list", "data": data, "model": model}
    return Reply(encode(with_usage(document, {"prompt_tokens": total, "total_tokens": total}, facts.script)))


def _vector(wording: Wording, size: int, *, is_packed: bool) -> str | tuple[float, ...]:
    """A vector of length one, as 32-bit floats or as the base64 of their little-endian bytes."""
    raw = struct.unpack(f"<{size}i", hashlib.shake_128(wording.seed).digest(4 * size))
    scale = math.sqrt(sum(value * value for value in raw)) or 1.0
    packed = struct.pack(f"<{size}f", *(value / scale for value in raw))
    return base64.b64encode(packed).decode("ascii") if is_packed else struct.unpack(f"<{size}f", packed)


# The rest -------------------------------------------------------------------------------------------------------------


def moderate(payload: dict[str, Any], facts: Facts) -> Reply:
    """POST /v1/moderations: nothing is ever flagged."""
    model = model_of(payload, "omni-moderation-latest")
    given = payload.get("input")
    if not isinstance(given, (str, list)):
        raise Refusal(400, "Missing required parameter: 'input'.", param="input", code="missing_required_parameter")
    count = len(given) if isinstance(given, list) and all(isinstance(item, str) for item in given) else 1
    result = {
        "flagged": False,
        "categories": dict.fromkeys(_CATEGORIES, False),
        "category_scores": dict.fromkeys(_CATEGORIES, 0.0001),
        "category_applied_input_types": {category: ["text"] for category in _CATEGORIES},
    }
    document = {
        "id": identifier("modr-", facts, Wording.of(model, repr(given))),
        "model": model,
        "results": [result] * count,
    }
    return Reply(encode(document))


def list_models() -> Reply:
    """GET /v1/models."""
    return Reply(encode({"object": "list", "data": [_model(name) for name in MODELS]}))


def retrieve_model(name: str) -> Reply:
    """GET /v1/models/{id}: every model exists."""
    return Reply(encode(_model(name)))


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": _MODELS_CREATED, "owned_by": "system"}


def echo(method: str, path: str, query: str) -> Reply:
    """Every other path: what was asked, so that pass-through can be checked."""
    return Reply(encode({"object": "simulated", "method": method, "path": path, "query": query}))


POSTS: dict[str, Callable[[dict[str, Any], Facts], Reply]] = {
    "/v1/chat/completions": chat,
    "/v1/completions": complete,
    "/v1/embeddings": embed,
    "/v1/responses": respond,
    "/v1/moderations": moderate,
}
