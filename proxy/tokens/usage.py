"""What an answer says it used, in a JSON body or in the events of a stream, and what is booked for each way of ending.

Reads payloads only: splitting a stream into records is ``forwarding/sse.py``'s affair, applying the booking the limiter's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from proxy.tokens.estimate import BYTES_PER_TOKEN, MOST_TOKENS

_TERMINAL_TYPES = frozenset(
    {
        "response.completed",
        "response.incomplete",
        "response.failed",
        "error",
        "transcript.text.done",
        "speech.audio.done",
        "image_generation.completed",
        "image_edit.completed",
    }
)


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens as the upstream counted them."""

    input_tokens: int
    output_tokens: int
    total_tokens: int


class _Usage(msgspec.Struct):
    prompt_tokens: float | None = None  # some servers write 12.0; msgspec takes 12 for a float as well
    completion_tokens: float | None = None
    input_tokens: float | None = None
    output_tokens: float | None = None
    total_tokens: float | None = None


class _Body(msgspec.Struct):
    usage: _Usage | None = None


class _Function(msgspec.Struct):
    arguments: str | None = None


class _ToolCall(msgspec.Struct):
    function: _Function | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None  # DeepSeek, SGLang
    reasoning: str | None = None  # vLLM, OpenRouter
    refusal: str | None = None
    tool_calls: list[_ToolCall] | None = None
    function_call: _Function | None = None  # before tools


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None


class _Event(msgspec.Struct):
    type: str | None = None
    usage: _Usage | None = None
    choices: list[_Choice] | None = None
    response: _Body | None = None
    delta: Any = None


_body_decoder = msgspec.json.Decoder(_Body)
_event_decoder = msgspec.json.Decoder(_Event)


def usage_of_body(body: bytes) -> Usage | None:
    """The usage that a JSON answer reports, in any of OpenAI's shapes; None where it has none that can be read."""
    try:
        return _usage(_body_decoder.decode(body).usage)
    except (msgspec.DecodeError, RecursionError):
        return None


def _usage(found: _Usage | None) -> Usage | None:
    if found is None:
        return None
    inputs = found.prompt_tokens if found.prompt_tokens is not None else found.input_tokens
    outputs = found.completion_tokens if found.completion_tokens is not None else found.output_tokens
    if inputs is None and outputs is None and found.total_tokens is None:
        return None
    total = found.total_tokens if found.total_tokens is not None else (inputs or 0) + (outputs or 0)
    counts = (inputs or 0, outputs if outputs is not None else max(0, total - (inputs or 0)), total)
    # A count that no limit could hold is a fault of the upstream's, not something to charge.
    return Usage(*map(math.ceil, counts)) if min(counts) >= 0 and max(counts) <= MOST_TOKENS else None


@dataclass(slots=True)
class StreamMeter:
    """Follows a stream's events: the usage it reports, and a count of our own for when it reports none."""

    usage: Usage | None = None
    is_finished: bool = False  # the terminal marker was seen
    _events_with_output: int = 0
    _output_bytes: int = 0

    @property
    def counted_tokens(self) -> int:
        """Output seen so far: its bytes / 4, but at least one token for each event that carried some."""
        return max(self._events_with_output, -(-self._output_bytes // BYTES_PER_TOKEN))

    def see(self, payload: bytes) -> bool:
        """Take in one event's data. True when it is the extra chunk that only reports usage (no choices)."""
        if payload == b"[DONE]":
            self.is_finished = True
            return False
        try:
            event = _event_decoder.decode(payload)
        except (msgspec.DecodeError, RecursionError):
            return False  # not an event that we know: it passes, and counts nothing
        reported = _usage(event.usage) or (_usage(event.response.usage) if event.response else None)
        if reported is not None and reported.total_tokens:  # Ollama writes zeros on every chunk before the last
            self.usage = reported
        self.is_finished = self.is_finished or event.type in _TERMINAL_TYPES
        size_bytes = _output_bytes(event)
        self._output_bytes += size_bytes
        self._events_with_output += size_bytes > 0
        return reported is not None and event.choices == []


def _output_bytes(event: _Event) -> int:
    texts: list[str | None] = [event.delta] if isinstance(event.delta, str) else []
    for choice in event.choices or ():
        texts.append(choice.text)
        if choice.delta is not None:
            delta = choice.delta
            texts += [delta.content, delta.reasoning_content, delta.reasoning, delta.refusal]
            functions = [delta.function_call, *(call.function for call in delta.tool_calls or ())]
            texts += [function.arguments for function in functions if function]
    return sum(len(text.encode("utf-8", "surrogatepass")) for text in texts if text)


class Ending(StrEnum):
    """How a request that was admitted came to its end."""

    COMPLETE = "complete"  # a 2xx answer arrived whole
    STREAM_ENDED = "stream_ended"  # a stream ended or was cut, or the client left after bytes
    LEFT_WAITING = "left_waiting"  # the client left after sending, before any byte
    NEVER_SENT = "never_sent"  # the client left, or we gave up, before anything was sent
    UPSTREAM_FAILED = "upstream_failed"  # never reached, or its 429 or 5xx
    UPSTREAM_REFUSED = "upstream_refused"  # its other 4xx


@dataclass(frozen=True, slots=True)
class Booking:
    """What a request costs in the end. ``tokens`` None: as reserved."""

    tokens: int | None
    is_request_kept: bool


def booking(ending: Ending, *, usage: Usage | None, prompt_tokens: int, counted_tokens: int) -> Booking:
    """The settlement table: usage where it is known, else by the way of ending."""
    if ending in (Ending.NEVER_SENT, Ending.UPSTREAM_FAILED):
        return Booking(0, is_request_kept=False)
    if ending is Ending.UPSTREAM_REFUSED:
        return Booking(0, is_request_kept=True)
    if usage is not None:
        return Booking(usage.total_tokens, is_request_kept=True)
    if ending is Ending.STREAM_ENDED:
        return Booking(prompt_tokens + counted_tokens, is_request_kept=True)
    return Booking(None, is_request_kept=True)
