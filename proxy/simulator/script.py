"""What the simulator shall do for one request, where that is written in JSON, and which of several scripts wins.

Doing it is left to ``exchange.py``, and finding the scripts that apply to a request to ``app.py``.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Hang: TypeAlias = Literal["none", "headers", "body"]
Cut: TypeAlias = Literal["fin", "reset"]


class ScriptError(ValueError):
    """A script that can't be followed. The message names the field and what was expected."""


@dataclass(frozen=True, slots=True)
class Script:
    """What to do for one request. None means that this script does not say, so a less specific one decides.

    Positions in an answer (``cut_after``, ``hang_after``, ``hold_after``, ``error_in_stream``) count streamed tokens
    over all choices; 0 is straight after the headers, and a position beyond the end is never reached. An answer that is
    not a stream knows one position only, whatever the number: half of its body.
    """

    latency_s: float | None = None
    """Wait before the headers."""
    status: int | None = None
    """Of 400 and above: answer with OpenAI's error of that status. Below: answer as usual, under that status."""
    error_code: str | None = None
    error_type: str | None = None
    error_message: str | None = None
    retry_after_s: float | None = None
    """For ``retry-after`` (and ``retry-after-ms``, where it is no whole number). A 429 says 1 by default."""
    tokens: int | None = None
    """Completion tokens per choice, 16 by default. A smaller limit in the request wins."""
    token_pace_s: float | None = None
    """Wait between two streamed tokens."""
    hang: Hang | None = None
    """``headers``: never answer. ``body``: send the headers, then nothing. ``none`` undoes a less specific script."""
    hang_after: int | None = None
    """Fall silent after so many tokens, keeping the connection open."""
    cut_after: int | None = None
    """Close the connection after so many tokens, without an end of the body."""
    cut: Cut | None = None
    """How to close: ``fin`` (default) delivers what was sent before; ``reset`` sends a TCP RST, which may lose it."""
    drop: bool | None = None
    """Close the connection, in the manner of ``cut``, without answering a byte."""
    hold: str | None = None
    """Wait until the gate of this name is released. A released gate stays open."""
    hold_after: int | None = None
    """Wait at the gate after so many tokens rather than before the headers."""
    usage: Mapping[str, Any] | Literal["none"] | None = None
    """Report this usage instead of the true one; ``none`` reports no usage at all."""
    no_done: bool | None = None
    """End a stream cleanly, but without its terminal marker (``[DONE]``, ``response.completed``)."""
    error_in_stream: int | None = None
    """After so many tokens report an error inside the stream (see ``error_*``), and end it."""
    chunk_bytes: int | None = None
    """Write the body in pieces of so many bytes, whatever the borders of its records."""
    raw_body: bytes | None = None
    """Answer with exactly these bytes (in JSON a string, sent as UTF-8) and none of OpenAI's headers."""
    raw_content_type: str | None = None
    raw_headers: tuple[tuple[str, str], ...] | None = None
    """Added to the answer's headers, replacing any of the same name. Also without ``raw_body``."""

    def over(self, base: Script) -> Script:
        """This script where it says something, ``base`` where it does not."""
        said = {name: value for name in KNOWN if (value := getattr(self, name)) is not None}
        return replace(base, **said) if said else base

    @classmethod
    def from_json(cls, text: str | bytes) -> Script:
        """Read a JSON object of the fields above. Raises ScriptError."""
        try:
            document = msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ScriptError(f"A script must be a JSON object: {error}.") from error
        return cls.from_document(document)

    @classmethod
    def from_document(cls, document: object) -> Script:
        """Read what was a JSON object. Null means not said. Raises ScriptError."""
        if not isinstance(document, dict):
            raise ScriptError("A script must be a JSON object.")
        return cls(**{name: _read(name, value) for name, value in document.items() if value is not None or name not in KNOWN})


KNOWN = tuple(field.name for field in fields(Script))
NOTHING = Script()

_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z")
_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*\Z")


@dataclass(frozen=True, slots=True)
class _Kind:
    """How one kind of field is read: what to tell people, what passes, and what it becomes."""

    expected: str
    accepts: Callable[[Any], bool]
    convert: Callable[[Any], Any]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _are_headers(value: object) -> bool:
    if not isinstance(value, (dict, list)):
        return False
    pairs = list(value.items()) if isinstance(value, dict) else value
    return all(isinstance(pair, (list, tuple)) and len(pair) == 2 and _is_header(*pair) for pair in pairs)


def _is_header(name: object, value: object) -> bool:
    return isinstance(name, str) and isinstance(value, str) and bool(_NAME.match(name) and _VALUE.match(value))


def _headers(value: Any) -> tuple[tuple[str, str], ...]:
    return tuple((name, text) for name, text in (value.items() if isinstance(value, dict) else value))


def _one_of(*names: str) -> _Kind:
    return _Kind("one of " + ", ".join(names), lambda value: value in names, str)


_SECONDS = _Kind("a number of seconds, 0 or more", _is_number, float)
_COUNT = _Kind("a whole number, 0 or more", _is_count, int)
_TEXT = _Kind("a string", lambda value: isinstance(value, str), str)
_FLAG = _Kind("true or false", lambda value: isinstance(value, bool), bool)

_KINDS: dict[str, _Kind] = {
    "latency_s": _SECONDS,
    "status": _Kind("a status of 200 to 599", lambda value: _is_count(value) and 200 <= value <= 599, int),
    "error_code": _TEXT,
    "error_type": _TEXT,
    "error_message": _TEXT,
    "retry_after_s": _SECONDS,
    "tokens": _COUNT,
    "token_pace_s": _SECONDS,
    "hang": _one_of("none", "headers", "body"),
    "hang_after": _COUNT,
    "cut_after": _COUNT,
    "cut": _one_of("fin", "reset"),
    "drop": _FLAG,
    "hold": _TEXT,
    "hold_after": _COUNT,
    "usage": _Kind('an object, or "none"', lambda value: value == "none" or isinstance(value, dict), lambda value: value),
    "no_done": _FLAG,
    "error_in_stream": _COUNT,
    "chunk_bytes": _Kind("a number of bytes, 1 or more", lambda value: _is_count(value) and value >= 1, int),
    "raw_body": _Kind("a string", lambda value: isinstance(value, str), lambda value: value.encode("utf-8", "surrogatepass")),
    "raw_content_type": _Kind("a header value", lambda value: _is_header("content-type", value), str),
    "raw_headers": _Kind("an object of header names and values, or a list of pairs", _are_headers, _headers),
}


def _read(name: str, value: object) -> Any:
    kind = _KINDS.get(name)
    if kind is None:
        raise ScriptError(f"Unknown script field {name!r}. Known fields: {', '.join(KNOWN)}.")
    if not kind.accepts(value):
        raise ScriptError(f"Script field {name!r} must be {kind.expected}, not {value!r}.")
    return kind.convert(value)
