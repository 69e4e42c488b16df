"""A JSON request body: its top-level members, where each stands, and members spliced without touching another byte.

Decides what is readable; which members matter is the caller's affair. Members are decoded by msgspec, which keeps the last of
two same names in silence: the walk over the text finds out, since limiter and upstream must see the same value.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

import msgspec

from proxy.errors import InvalidRequest

_BOM = b"\xef\xbb\xbf"
_DEEPEST = 256  # nesting; beyond it other parsers give up, and so would ours
_MOST_MEMBERS = 10_000  # at the top level: each costs a step of the walk
_MOST_CONTAINERS = 50_000  # lists and objects in a body with duplicate members, where each has to be built to be passed over
# Possessive throughout (++, *+): a hostile body must not buy time by making a match give back what it took.
_NAME = re.compile(rb'[ \t\r\n]*+,?+[ \t\r\n]*+("(?:[^"\\]++|\\.)*+")[ \t\r\n]*+:[ \t\r\n]*+', re.DOTALL)
_END = re.compile(rb"[ \t\r\n]*+\}[ \t\r\n]*+")
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?+', re.DOTALL)
# An escaped surrogate without its other half, after any number of escaped backslashes.
_HALF_CHARACTER = re.compile(
    rb"(?<!\\)((?:\\\\)*+)"
    rb"(?:\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2})"
)
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[{]}"))

T = TypeVar("T")

_members_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_skipper = json.JSONDecoder(strict=False, parse_int=str, parse_float=str)  # tells where a value ends; numbers stay text


@dataclass(frozen=True, slots=True)
class JsonBody:
    """``members`` as raw JSON text by name; ``spans`` are their (start, end) offsets in ``text``."""

    text: bytes
    members: dict[str, msgspec.Raw]
    spans: dict[str, tuple[int, int]]

    def string(self, name: str) -> str | None:
        """The member as a string; None where absent or null. Raises InvalidRequest for another type."""
        return self._decoded(name, str, "a string")

    def boolean(self, name: str) -> bool:
        """The member as a boolean; False where absent or null. Raises InvalidRequest for another type."""
        return self._decoded(name, bool, "a boolean") or False

    def mapping(self, name: str) -> dict[str, msgspec.Raw] | None:
        """The member's own members; None where absent or null. Raises InvalidRequest for another type."""
        return self._decoded(name, dict[str, msgspec.Raw], "an object")

    def _decoded(self, name: str, kind: type[T], expected: str) -> T | None:
        raw = self.members.get(name)
        if raw is None:
            return None
        try:
            return msgspec.json.decode(raw, type=kind | None)
        except (msgspec.DecodeError, RecursionError):
            raise InvalidRequest(f"Invalid type for '{name}': expected {expected}.", param=name) from None

    def with_members(self, changes: dict[str, bytes]) -> bytes:
        """The text with members replaced in their place, or put first where they are absent. No other byte changes."""
        text = self.text
        for name in sorted(changes.keys() & self.spans.keys(), key=lambda known: self.spans[known], reverse=True):
            start, end = self.spans[name]
            text = text[:start] + changes[name] + text[end:]
        added = [msgspec.json.encode(name) + b":" + value for name, value in changes.items() if name not in self.spans]
        if added:
            brace = text.index(b"{") + 1
            text = text[:brace] + b",".join(added) + (b"," if self.members else b"") + text[brace:]
        return text


def read_json_body(text: bytes, *, read_members: frozenset[str]) -> JsonBody:
    """Read a body that must be a JSON object. ``read_members`` may not stand twice: which one would count?

    A byte order mark is dropped. Raises InvalidRequest, which names what is wrong.
    """
    text = text.removeprefix(_BOM)
    if not text.strip():
        raise InvalidRequest("The request body is empty: expected a JSON object.")
    try:
        text.decode("utf-8")  # msgspec does not look inside strings
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"The request body is not valid UTF-8 at byte {error.start}.") from None
    _refuse_depth(text)
    readable, members = _members_of(text)
    if len(members) > _MOST_MEMBERS:
        raise InvalidRequest(f"The request body has more than {_MOST_MEMBERS} members.")
    spans = _spans_of(readable, members)
    if spans is None:
        spans = _scan(readable, members, read_members)
    return JsonBody(text, members, spans)


def _members_of(text: bytes) -> tuple[bytes, dict[str, msgspec.Raw]]:
    """The members, and the text they were read from: where msgspec refuses half a character, U+FFFD stands in its place there.

    That is as long, so offsets are the same; the upstream gets the body as it came.
    """
    try:
        return text, _members_decoder.decode(text)
    except msgspec.ValidationError:
        raise InvalidRequest("The request body is not a JSON object.") from None
    except (msgspec.DecodeError, RecursionError) as error:
        readable = _HALF_CHARACTER.sub(rb"\1\\ufffd", text)
        if readable != text:
            return _members_of(readable)
        reason = "too deeply nested" if isinstance(error, RecursionError) else str(error)
        raise InvalidRequest(f"We could not parse the JSON body of your request: {reason}.") from None


def _refuse_depth(text: bytes) -> None:
    if text.count(b"[") + text.count(b"{") <= _DEEPEST:
        return
    steps = memoryview(_STRING.sub(b"", text).translate(_STEPS, _NO_BRACKETS)).cast("b")
    if any(map(_DEEPEST.__lt__, accumulate(steps))):
        raise InvalidRequest(f"The request body is nested more than {_DEEPEST} levels deep.")


def _spans_of(text: bytes, members: dict[str, msgspec.Raw]) -> dict[str, tuple[int, int]] | None:
    """Walk the members in the order of the text, by the lengths that are known; None when a name must stand twice."""
    at = text.index(b"{") + 1
    spans = {}
    for name, raw in members.items():
        match = _NAME.match(text, at)
        value = bytes(raw)
        if match is None or not text.startswith(value, match.end()) or msgspec.json.decode(match[1]) != name:
            return None
        at = match.end() + len(value)
        spans[name] = (match.end(), at)
    return spans if _END.fullmatch(text, at) else None


def _scan(text: bytes, members: dict[str, msgspec.Raw], read_members: frozenset[str]) -> dict[str, tuple[int, int]]:
    """Find the spans without knowing lengths: slower, and only for a body in which some name stands twice."""
    if text.count(b"[") + text.count(b"{") > _MOST_CONTAINERS:
        raise InvalidRequest("The request body has duplicate members and is too large to tell which of them count.")
    characters = text.decode("latin-1")  # one for each byte, so that offsets are the same
    at = text.index(b"{") + 1
    spans: dict[str, tuple[int, int]] = {}
    for _ in range(_MOST_MEMBERS):
        match = _NAME.match(text, at)
        if match is None:
            break
        name = msgspec.json.decode(match[1])
        _, at = _skipper.raw_decode(characters, match.end())
        if name in spans and name in read_members:
            raise InvalidRequest(f"Duplicate member '{name}' in the request body: expected it once.", param=name)
        spans[name] = (match.end(), at)
    if set(spans) != set(members) or _END.fullmatch(text, at) is None:
        raise InvalidRequest("We could not parse the JSON body of your request: its members are ambiguous or too many.")
    return spans
