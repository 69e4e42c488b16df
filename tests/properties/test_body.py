"""Reading and splicing of JSON bodies: any object, any change."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.errors import InvalidRequest
from proxy.forwarding.body import read_json_body

NONE = frozenset()
texts = st.text(max_size=8) | st.sampled_from(['"', "\\", '\\"', "{", "}", "[", "]", ",", ":", " ", "\x00", "é", "😀", "model"])
scalars = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | texts
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=12)
objects = st.dictionaries(texts, values, max_size=6)
spaces = st.text(" \t\r\n", max_size=3)


@st.composite
def written(draw: st.DrawFn, value: dict) -> bytes:
    """An object as text, with spaces in odd places and escapes or none."""
    escaped = draw(st.booleans())

    def text_of(part):
        return json.dumps(part, ensure_ascii=escaped, separators=draw(st.sampled_from([(",", ":"), (" , ", "\t:\n")])))

    members = (
        f"{draw(spaces)}{text_of(name)}{draw(spaces)}:{draw(spaces)}{text_of(part)}{draw(spaces)}" for name, part in value.items()
    )
    return f"{draw(spaces)}{{{draw(spaces)}{','.join(members)}}}{draw(spaces)}".encode()


@settings(max_examples=300)
@given(
    data=st.data(),
    value=objects,
    changes=st.dictionaries(st.sampled_from(["model", "stream_options", "", '"', "é"]), values, max_size=3),
)
def test_changes_and_nothing_else(data, value, changes):
    """After any change of members the text reads as the object with those changes, and every other byte is where it was."""
    names = data.draw(st.lists(st.sampled_from(sorted(value)), max_size=3, unique=True)) if value else []
    changes |= {name: data.draw(values) for name in names}
    text = data.draw(written(value))
    body = read_json_body(text, read_members=NONE)
    raw = {name: json.dumps(part).encode() for name, part in changes.items()}
    result = body.with_members(raw)
    assert json.loads(result) == value | changes
    kept, at = [], 0
    for start, end in sorted(span for name, span in body.spans.items() if name in raw):
        kept.append(text[at:start])
        at = end
    kept.append(text[at:])
    at = 0
    for piece in kept:  # all that was not replaced stands in the result, in order
        brace = piece.find(b"{") + 1 if piece is kept[0] else 0
        for untouched in (piece[:brace], piece[brace:]):
            found = result.find(untouched, at)
            assert found >= 0
            at = found + len(untouched)


@given(data=st.data(), value=objects)
def test_no_change_is_the_same_text(data, value):
    """Without changes the very bytes come back, and each span holds its member's text."""
    text = data.draw(written(value))
    body = read_json_body(text, read_members=frozenset(value))
    assert body.with_members({}) == text
    assert set(body.spans) == set(value)
    for name, (start, end) in body.spans.items():
        assert json.loads(text[start:end]) == value[name]
        assert bytes(body.members[name]) == text[start:end]


@given(value=objects, twice=texts, first=values, second=values, data=st.data())
def test_duplicates(value, twice, first, second, data):
    """A member that is read may not stand twice, however it is spelt; another may, and the last one is it (D28)."""
    value = {name: part for name, part in value.items() if name.casefold() != twice.casefold()}
    spelt = "".join(f"\\u{ord(letter):04x}" if letter.isascii() else letter for letter in twice)
    spelt = data.draw(st.sampled_from([json.dumps(twice), f'"{spelt}"']))
    members = [f"{json.dumps(name)}:{json.dumps(part)}" for name, part in value.items()]
    places = sorted(data.draw(st.tuples(st.integers(0, len(members)), st.integers(0, len(members)))))
    members.insert(places[1], f"{spelt} : {json.dumps(second)} ")
    members.insert(places[0], f" {json.dumps(twice)}:{json.dumps(first)}")
    text = ("{" + ",".join(members) + "}").encode()
    with pytest.raises(InvalidRequest, match="Duplicate member"):
        read_json_body(text, read_members=frozenset({twice}))
    body = read_json_body(text, read_members=frozenset(value))
    assert json.loads(body.with_members({"model": b'"m"'})) == value | {twice: second} | {"model": "m"}
    start, end = body.spans[twice]
    assert json.loads(text[start:end]) == second


@settings(max_examples=300)
@given(
    text=st.binary(max_size=40)
    | st.lists(st.sampled_from([b'"', b"{", b"}", b"\\", b":", b",", b"a", b"[", b"]", b"1", b" "]), max_size=14).map(b"".join)
)
def test_any_bytes_are_read_or_refused(text):
    """Whatever arrives is an object that msgspec reads too, or an InvalidRequest (D28)."""
    try:
        body = read_json_body(text, read_members=NONE)
    except InvalidRequest:
        return
    assert isinstance(msgspec.json.decode(body.text), dict)
    assert set(body.spans) == set(body.members)
