"""A JSON request body: its top-level members, where each stands, and members spliced without touching another byte.

Decides what is readable; which members matter is the caller's affair. Members are decoded by msgspec, which keeps the last of
two same names in silence: the walk over the text finds out, since limiter and upstream must see the same value. A shape that
costs more than its bytes (lists, strings, members by the hundred thousand) is refused by counting, before anything is built.
"""

from __future__ import annotations

import codecs
import json
import re
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import TypeVar

import msgspec

from proxy.errors import InvalidRequest
from proxy.tokens.estimate import MOST_STRINGS, outside_strings

_BOM = b"\xef\xbb\xbf"
_DEEPEST = 256  # nesting; beyond it other parsers give up, and so would ours
_MOST_MEMBERS = 10_000  # at the top level: each costs a step of the walk
_MOST_NAME_CHARACTERS = 100_000  # of all top-level names together, since a name is decoded twice
_MOST_CONTAINERS = 200_000  # lists and objects
_LARGEST_WITH_DUPLICATES_BYTES = 2**20  # of a body with duplicate members, where all has to be built to be passed over
_MOST_CONTAINERS_WITH_DUPLICATES = 50_000
_MOST_SURROGATES = 100_000  # escaped ones, in a body with half a character
_DECODED_AT_ONCE_BYTES = 2**20
# Possessive throughout (++, *+): a hostile body must not buy time by making a match give back what it took.
_NAME = re.compile(rb'[ \t\r\n]*+,?+[ \t\r\n]*+("(?:[^"\\]++|\\.)*+")[ \t\r\n]*+:[ \t\r\n]*+', re.DOTALL)
_END = re.compile(rb"[ \t\r\n]*+\}[ \t\r\n]*+")
# An escaped surrogate without its other half, where escaped backslashes are out of the way.
_HALF_CHARACTER = re.compile(
    rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD])[c-fC-F][0-9a-fA-F]{2})"
)
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")

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
        text, at = memoryview(self.text), 0
        pieces: list[bytes | memoryview] = []
        added = [msgspec.json.encode(name) + b":" + value for name, value in changes.items() if name not in self.spans]
        if added:
            at = self.text.index(b"{") + 1
            pieces += [text[:at], b",".join(added), b"," if self.members else b""]
        for name in sorted(changes.keys() & self.spans.keys(), key=lambda known: self.spans[known]):
            start, end = self.spans[name]
            pieces += [text[at:start], changes[name]]
            at = end
        return b"".join([*pieces, text[at:]])


def read_json_body(text: bytes, *, read_members: frozenset[str]) -> JsonBody:
    """Read a body that must be a JSON object. ``read_members`` may not stand twice, nor in other case: which one would count?

    A byte order mark is dropped. Raises InvalidRequest, which names what is wrong.
    """
    text = text.removeprefix(_BOM)
    if not text.strip():
        raise InvalidRequest("The request body is empty: expected a JSON object.")
    _refuse_bad_utf8(text)  # msgspec does not look inside strings
    _refuse_costly_shape(text)
    readable, members = _members_of(text)
    if len(members) > _MOST_MEMBERS:
        raise InvalidRequest(f"The request body has more than {_MOST_MEMBERS} members.")
    if sum(map(len, members)) > _MOST_NAME_CHARACTERS:
        raise InvalidRequest(f"The names of the request body's members have more than {_MOST_NAME_CHARACTERS} characters.")
    spans = _spans_of(readable, members)
    if spans is None:
        spans = _scan(readable, members, read_members)
    _refuse_other_case(members, read_members)
    return JsonBody(text, members, spans)


def _refuse_bad_utf8(text: bytes) -> None:
    if text.isascii():
        return
    decoder, view = codecs.getincrementaldecoder("utf-8")(), memoryview(text)
    for start in range(0, len(text), _DECODED_AT_ONCE_BYTES):  # as one string it could take four times the memory
        end = start + _DECODED_AT_ONCE_BYTES
        begun_bytes = len(decoder.getstate()[0])  # of a character that was cut
        try:
            decoder.decode(view[start:end], final=end >= len(text))
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"The request body is not valid UTF-8 at byte {start - begun_bytes + error.start}.") from None


def _refuse_costly_shape(text: bytes) -> None:
    """Refuse more strings, lists and objects, or deeper ones, than any real request has."""
    if text.count(b"[") + text.count(b"{") <= _DEEPEST and text.count(b'"') <= 2 * MOST_STRINGS:
        return
    outside = outside_strings(text)
    if outside is None:
        raise InvalidRequest(f"The request body has more than {MOST_STRINGS} strings.")
    if outside.count(b"[") + outside.count(b"{") > _MOST_CONTAINERS:
        raise InvalidRequest(f"The request body has more than {_MOST_CONTAINERS} lists and objects.")
    steps = memoryview(outside.translate(_STEPS, b",")).cast("b")
    if max(accumulate(steps), default=0) > _DEEPEST:
        raise InvalidRequest(f"The request body is nested more than {_DEEPEST} levels deep.")


@lru_cache(maxsize=8)
def _spellings(read_members: frozenset[str]) -> dict[str, str]:
    return {name.casefold(): name for name in read_members}


def _refuse_other_case(members: dict[str, msgspec.Raw], read_members: frozenset[str]) -> None:
    """Servers in Go match names in any case: there "Model" would overrule the "model" that was held to its limits."""
    spellings = _spellings(read_members)
    for name in members:
        expected = spellings.get(name.casefold())
        if expected is not None and name not in read_members:
            raise InvalidRequest(f"Unknown member '{name}' in the request body: expected it spelt '{expected}'.", param=name)


def _members_of(text: bytes) -> tuple[bytes, dict[str, msgspec.Raw]]:
    """The members, and the text they were read from: where msgspec refuses half a character, U+FFFD stands in its place there.

    That is as long, so offsets are the same; the upstream gets the body as it came.
    """
    try:
        return text, _members_decoder.decode(text)
    except msgspec.ValidationError:
        raise InvalidRequest("The request body is not a JSON object.") from None
    except (msgspec.DecodeError, RecursionError) as error:
        if 0 < text.count(b"\\ud") + text.count(b"\\uD") <= _MOST_SURROGATES:
            readable = bytearray(text)
            for half in _HALF_CHARACTER.finditer(text.replace(b"\\\\", b"__")):
                readable[half.start() : half.end()] = b"\\ufffd"
            if readable != text:
                return _members_of(bytes(readable))
        reason = "too deeply nested" if isinstance(error, RecursionError) else str(error)
        raise InvalidRequest(f"We could not parse the JSON body of your request: {reason}.") from None


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
    containers = text.count(b"[") + text.count(b"{")
    if len(text) > _LARGEST_WITH_DUPLICATES_BYTES or containers > _MOST_CONTAINERS_WITH_DUPLICATES:
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
