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


# Each member stays raw until it is read on its own: one of an unexpected type must not hide another.
_ABSENT = msgspec.Raw(b"null")
_BOM = b"\xef\xbb\xbf"


class _Usage(msgspec.Struct):
    prompt_tokens: msgspec.Raw = _ABSENT
    completion_tokens: msgspec.Raw = _ABSENT
    input_tokens: msgspec.Raw = _ABSENT
    output_tokens: msgspec.Raw = _ABSENT
    total_tokens: msgspec.Raw = _ABSENT


class _Body(msgspec.Struct):
    usage: msgspec.Raw = _ABSENT


class _Event(msgspec.Struct):
    type: msgspec.Raw = _ABSENT
    usage: msgspec.Raw = _ABSENT
    choices: msgspec.Raw = _ABSENT
    response: msgspec.Raw = _ABSENT
    message: msgspec.Raw = _ABSENT  # Anthropic's first event
    delta: msgspec.Raw = _ABSENT


_OUTPUT_MEMBERS = frozenset(
    {
        "delta",
        "content",
        "reasoning_content",  # DeepSeek, SGLang
        "reasoning",  # vLLM, OpenRouter
        "refusal",
        "tool_calls",
        "function_call",  # before tools
        "function",
        "arguments",
        "text",
        "thinking",  # Mistral, Anthropic
        "partial_json",  # Anthropic
    }
)
_body_decoder = msgspec.json.Decoder(_Body)
_event_decoder = msgspec.json.Decoder(_Event)
_usage_decoder = msgspec.json.Decoder(_Usage | None)
_number_decoder = msgspec.json.Decoder(float)  # some servers write 12.0; msgspec takes 12 for a float as well


def usage_of_body(body: bytes) -> Usage | None:
    """The usage that a JSON answer reports, in any of OpenAI's shapes; None where it has none that can be read."""
    try:
        return _usage(_body_decoder.decode(body.removeprefix(_BOM)).usage)
    except (msgspec.DecodeError, RecursionError):
        return None


def _usage(raw: msgspec.Raw) -> Usage | None:
    if raw is _ABSENT:
        return None
    try:
        found = _usage_decoder.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return None
    if found is None:
        return None
    inputs = _larger(found.prompt_tokens, found.input_tokens)
    outputs = _larger(found.completion_tokens, found.output_tokens)
    total = _number(found.total_tokens)
    if inputs is None and outputs is None and total is None:
        return None
    if outputs is None:
        outputs = max(0, (total or 0) - (inputs or 0))
    counts = (inputs or 0, outputs, max(total or 0, (inputs or 0) + outputs))
    # A count that no limit could hold is a fault of the upstream's, not something to charge.
    return Usage(*map(math.ceil, counts)) if min(*counts, total or 0) >= 0 and max(counts) <= MOST_TOKENS else None


def _number(raw: msgspec.Raw) -> float | None:
    if raw is _ABSENT:
        return None
    try:
        return _number_decoder.decode(raw)
    except msgspec.DecodeError:
        return None


def _larger(first: msgspec.Raw, second: msgspec.Raw) -> float | None:
    return max((count for raw in (first, second) if (count := _number(raw)) is not None), default=None)


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
        reported = _usage(event.usage)
        if reported is None and (event.response is not _ABSENT or event.message is not _ABSENT):
            reported = _inner_usage(event.response) or _inner_usage(event.message)
        if reported is not None and reported.total_tokens:  # Ollama writes zeros on every chunk before the last
            self.usage = _joined(self.usage, reported)
        if event.type is not _ABSENT:
            kind = _value(event.type)
            self.is_finished = self.is_finished or (isinstance(kind, str) and kind in _TERMINAL_TYPES)
        choices, delta = _value(event.choices), _value(event.delta)
        size_bytes = _output_bytes([choices, delta])
        self._output_bytes += size_bytes
        self._events_with_output += size_bytes > 0
        return reported is not None and choices == []


def _value(raw: msgspec.Raw) -> Any:
    if raw is _ABSENT:
        return None
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return None


def _inner_usage(raw: msgspec.Raw) -> Usage | None:
    try:
        return _usage(_body_decoder.decode(raw).usage)
    except (msgspec.DecodeError, RecursionError):
        return None


def _joined(known: Usage | None, reported: Usage) -> Usage:
    """The larger of each count: usage grows, and some servers report the input first and the output last."""
    if known is None:
        return reported
    inputs = max(known.input_tokens, reported.input_tokens)
    outputs = max(known.output_tokens, reported.output_tokens)
    return Usage(inputs, outputs, max(known.total_tokens, reported.total_tokens, inputs + outputs))


def _output_bytes(value: Any) -> int:
    """Bytes of text in the members that carry output, in any nesting of them and of lists."""
    size_bytes, pending = 0, [value]
    while pending:
        current = pending.pop()
        kind = type(current)
        if kind is str:
            size_bytes += len(current) if current.isascii() else len(current.encode("utf-8", "surrogatepass"))
        elif kind is list:
            pending += current
        elif kind is dict:
            pending += [member for name, member in current.items() if member and name in _OUTPUT_MEMBERS]
    return size_bytes


class Ending(StrEnum):
    """How a request that was admitted came to its end."""

    COMPLETE = "complete"  # a 2xx answer arrived whole
    STREAM_ENDED = "stream_ended"  # a stream ended or was cut, or the client left after bytes
    LEFT_WAITING = "left_waiting"  # the client left after sending, before any byte
    NEVER_SENT = "never_sent"  # the client left, or we gave up, before anything was sent
    UPSTREAM_FAILED = "upstream_failed"  # never reached, or its 429 or 5xx
    UPSTREAM_REFUSED = "upstream_refused"  # its other 4xx


NO_USAGE = Usage(0, 0, 0)


@dataclass(frozen=True, slots=True)
class Booking:
    """What a request costs in the end. ``usage`` None: as reserved."""

    usage: Usage | None
    is_request_kept: bool


def booking(ending: Ending, *, usage: Usage | None, prompt_tokens: int, counted_tokens: int) -> Booking:
    """The settlement table: usage where it is known, else by the way of ending."""
    if ending in (Ending.NEVER_SENT, Ending.UPSTREAM_FAILED):
        return Booking(NO_USAGE, is_request_kept=False)
    if ending is Ending.UPSTREAM_REFUSED:
        return Booking(NO_USAGE, is_request_kept=True)
    if usage is not None:
        return Booking(usage, is_request_kept=True)
    if ending is Ending.STREAM_ENDED:
        return Booking(Usage(prompt_tokens, counted_tokens, prompt_tokens + counted_tokens), is_request_kept=True)
    return Booking(None, is_request_kept=True)
