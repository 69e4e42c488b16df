"""What POST /v1/responses answers, whole or as its typed events.

The words and counts are left to ``wording.py``; nothing is stored, so a later request finds no trace of a response.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from proxy.simulator.reply import EVENT_STREAM, Record, Refusal, Reply, stream_error
from proxy.simulator.wording import (
    Facts,
    Wording,
    emitted,
    identifier,
    model_of,
    obfuscation,
    size_of,
    text_of,
    token_count,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from proxy.simulator.script import Script

DEFAULT_MODEL = "gpt-4.1"


@dataclass(frozen=True, slots=True)
class _Answer:
    """All that the events and the whole document have in common."""

    head: dict[str, Any]
    item_id: str
    tokens: list[str]
    usage: dict[str, Any]
    is_limited: bool
    script: Script
    is_padded: bool

    def part(self, text: str) -> dict[str, Any]:
        """The only content part of the only item."""
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def item(self, text: str, status: str) -> dict[str, Any]:
        """The only item: a message."""
        content = [self.part(text)] if text else []
        return {"id": self.item_id, "type": "message", "status": status, "role": "assistant", "content": content}

    def begun(self) -> dict[str, Any]:
        """The response before its first token."""
        return self.head | {"status": "in_progress", "output": [], "usage": None}

    def ended(self) -> dict[str, Any]:
        """The response when complete."""
        status = "incomplete" if self.is_limited else "completed"
        details = {"reason": "max_output_tokens"} if self.is_limited else None
        output = [self.item("".join(self.tokens), status)]
        usage = None if self.script.usage == "none" else self.script.usage or self.usage
        return self.head | {"status": status, "incomplete_details": details, "output": output, "usage": usage}


def respond(payload: dict[str, Any], facts: Facts) -> Reply:
    """POST /v1/responses."""
    model = model_of(payload, DEFAULT_MODEL)
    texts, last = _input(payload.get("input"))
    instructions = payload.get("instructions")
    if isinstance(instructions, str):
        texts.append(instructions)
    wording = Wording.of(model, last)
    count, is_limited = emitted(payload, facts.script, "max_output_tokens")
    answer = _Answer(
        head=_head(payload, model, identifier("resp_", facts, wording), facts.created),
        item_id=identifier("msg_", facts, wording),
        tokens=wording.tokens(count),
        usage=_usage(token_count(sum(map(size_of, texts))), count),
        is_limited=is_limited,
        script=facts.script,
        is_padded=_is_padded(payload.get("stream_options")),
    )
    if payload.get("stream") is True:
        return Reply(content_type=EVENT_STREAM, records=_events(answer))
    return Reply(msgspec.json.encode(answer.ended()), tokens=count)


def _input(value: object) -> tuple[list[str], str]:
    """The texts of the input, and the user's last one."""
    if isinstance(value, str):
        return [value], value
    if value is None:
        return [], ""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise Refusal(400, "Invalid 'input': expected a string or an array of objects.", param="input")
    texts = [text_of(item.get("content")) for item in value]
    asked = [text for text, item in zip(texts, value, strict=True) if item.get("role") == "user"]
    return texts, (asked or texts or [""])[-1]


def _is_padded(options: object) -> bool:
    return not (isinstance(options, dict) and options.get("include_obfuscation") is False)


def _usage(prompt: int, completion: int) -> dict[str, Any]:
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + completion,
    }


def _head(payload: dict[str, Any], model: str, response_id: str, created: int) -> dict[str, Any]:
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": payload.get("instructions"),
        "max_output_tokens": payload.get("max_output_tokens"),
        "model": model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": payload.get("previous_response_id"),
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "store": payload.get("store", True),
        "temperature": payload.get("temperature", 1.0),
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": payload.get("top_p", 1.0),
        "truncation": "disabled",
        "usage": None,
        "user": payload.get("user"),
        "metadata": payload.get("metadata") or {},
    }


def _event(number: int, kind: str, members: dict[str, Any]) -> bytes:
    document = {"type": kind, "sequence_number": number, **members}
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode(document))


def _events(answer: _Answer) -> Iterator[Record]:
    for number, (kind, members) in enumerate(_story(answer)):
        yield _event(number, kind, members), kind == "response.output_text.delta"


def _story(answer: _Answer) -> Iterator[tuple[str, dict[str, Any]]]:
    """Kind and members of each event, in order."""
    script, limit = answer.script, answer.script.error_in_stream
    place = {"item_id": answer.item_id, "output_index": 0, "content_index": 0}
    text, ended = "".join(answer.tokens), answer.ended()
    yield "response.created", {"response": answer.begun()}
    yield "response.in_progress", {"response": answer.begun()}
    yield "response.output_item.added", {"output_index": 0, "item": answer.item("", "in_progress")}
    yield "response.content_part.added", {**place, "part": answer.part("")}
    for token in answer.tokens[:limit]:
        padding = {"obfuscation": obfuscation(token)} if answer.is_padded else {}
        yield "response.output_text.delta", {**place, "delta": token, "logprobs": [], **padding}
    if limit is not None and limit <= len(answer.tokens):
        error = stream_error(script)
        yield "error", {"code": error["code"], "message": error["message"], "param": None}
        return
    yield "response.output_text.done", {**place, "text": text, "logprobs": []}
    yield "response.content_part.done", {**place, "part": answer.part(text)}
    yield "response.output_item.done", {"output_index": 0, "item": ended["output"][0]}
    if not script.no_done:
        yield f"response.{ended['status']}", {"response": ended}
