"""What a JSON body may be, and what its members read as."""

from __future__ import annotations

import contextlib
import time
import tracemalloc

import pytest

from proxy.errors import InvalidRequest
from proxy.forwarding.body import read_json_body

READ = frozenset({"model", "n", "messages"})


def read(text):
    return read_json_body(text, read_members=READ)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "empty"),
        (b" \r\n\t", "empty"),
        (b"\xef\xbb\xbf", "empty"),
        (b"\xff\xfe", "UTF-8 at byte 0"),
        (b'{"a":"\xff"}', "UTF-8 at byte 6"),
        (b'{"a":"\xed\xa0\xbd"}', "UTF-8"),
        ('{"model":"é"}'.encode("latin-1"), "UTF-8"),
        ('{"model":"m"}'.encode("utf-16-le"), "parse"),
        ('{"model":"m"}'.encode("utf-16"), "UTF-8"),
        (b"[1]", "not a JSON object"),
        (b'"x"', "not a JSON object"),
        (b"null", "not a JSON object"),
        (b"1", "not a JSON object"),
        (b"NaN", "parse"),
        (b'{"a":NaN}', "parse"),
        (b"{", "parse"),
        (b'{"a":1,}', "parse"),
        (b"{'a':1}", "parse"),
        (b'{"a":1}{"b":2}', "parse"),
        (b'{"a":1}\x00', "parse"),
        (b'{"a":01}', "parse"),
        (b'{"a":"\n"}', "parse"),
        (b'{"a":"\\x"}', "parse"),
        (b'{"x":"\\ud83"}', "parse"),
        (b'{"x":"\\ud83d\\u"}', "parse"),
        (b'{"x":1,"x":[' + b"[]," * 60_000 + b"[]]}", "duplicate members"),
        (b'{"a":' + b"[" * 300 + b"]" * 300 + b"}", "nested more than 256"),
        (b"[" * 100_000, "nested more than 256"),
        (b"{" + b",".join(b'"%d":1' % number for number in range(10_001)) + b"}", "more than 10000 members"),
        (b'{"' + b"a" * 100_001 + b'":1}', "more than 100000 characters"),
        (b'{"x":[' + b'"",' * 200_000 + b'""]}', "more than 200000 strings"),
        (b'{"x":[' + b"{}," * 200_000 + b"1]}", "more than 200000 lists and objects"),
        (b'{"x":1,"x":"' + b"a" * 2**20 + b'"}', "duplicate members"),
        (b'{"x":"' + b"a" * (2**20 - 7) + b'\xc3"}', f"UTF-8 at byte {2**20 - 1}"),
        (b'{"x":"' + "é".encode() * 2**20 + b"\xc3", f"UTF-8 at byte {6 + 2**21}"),
    ],
    ids=lambda value: repr(value[:20]),
)
def test_unusable_bodies_are_refused(text, says):
    """Everything that is no readable JSON object is an InvalidRequest that says why (D28)."""
    with pytest.raises(InvalidRequest, match=says):
        read(text)


@pytest.mark.parametrize(
    "text",
    [
        b"{}",
        b" { } ",
        b'\xef\xbb\xbf{"model":"m"}',
        b'{"a":"' + b"[" * 1000 + b'"}',
        b'{"a":"' + b'\\\\\\"[' * 300_000 + b'\\\\"}',
        b'{"a":"' + b'\\"' * 500_000 + b'"}',
        b'{"a":"x' + "é".encode() * 2**20 + b'"}',
        b'{"a":"' + b'\\"[' * 1000 + b'"}',
        b'{"a":' + b"[" * 255 + b"]" * 255 + b"}",
        b'{"a":[' + b"[]," * 1000 + b"{}]}",
        '{"model":"é😀"}'.encode(),
        b'{"model":"\\ud83d\\ude00"}',
        b'{"model":"m\\ud83d"}',
        b'{"\\ud83d":1,"\\uDE00":"\\ude00\\ud83d"}',
        b'{"metadata":{"x":"\\\\\\ud83d"},"y":"\\\\ud83d","content":"a\\ud83d\\ud83d\\ude00\\ude00b"}',
        b'{"a":"\\\\ud83d\\ude00"}',
        b'{"a":"\\ud83d","a":"\\ude00"}',
        b'{"a":1,"a":2}',
        b'{"":1,"":{"}":"]"}}',
        b'{"a":' + b"1" * 5000 + b',"a":2}',
        b"{" + b",".join(b'"%d":1' % number for number in range(10_000)) + b"}",
    ],
    ids=lambda value: repr(value[:20]),
)
def test_usable_bodies_pass_unchanged(text):
    """Byte order marks, deep but bounded nesting, half characters: all pass as they came (D26, D28)."""
    assert read(text).with_members({}) == text.removeprefix(b"\xef\xbb\xbf")


@pytest.mark.parametrize(
    "text",
    [
        b'{"model":"a","model":"b"}',
        b'{"model":"a","model":"a"}',
        b'{"model":"\\ud83d","model":"\\ud83d"}',
        b'{"model":"a","x":1,"mod\\u0065l":"a"}',
        b'{"n":12,"m":3,"n":1}',
        b'{"n":1,"n":12}',
        b'{"n":1,"n":1}',
        b'{"n":null,"n":null }',
        b'{"x":1,"x":2,"messages":[],"messages":[]}',
        b'{"x":{"model":1},"model":{"x":[]},"model":[{"x":"}"}]}',
    ],
)
def test_duplicate_of_a_read_member_is_refused(text):
    """A member that decides something may not stand twice, not even alike or spelt with escapes (D28)."""
    with pytest.raises(InvalidRequest, match="Duplicate member") as caught:
        read(text)
    assert caught.value.param in READ


def test_duplicate_of_another_member_passes():
    """A member nobody reads may stand twice; a change of others touches neither, a change of it the last one (D28)."""
    text = b'{"x": [1, "]"], "model":"m", "x" :{"}":"{"} , "n":1}'
    body = read(text)
    assert body.with_members({"model": b'"k"'}) == text.replace(b'"m"', b'"k"')
    assert body.with_members({"x": b"0"}) == b'{"x": [1, "]"], "model":"m", "x" :0 , "n":1}'


@pytest.mark.parametrize(
    ("text", "changes", "expected"),
    [
        (b"{}", {"a": b"1"}, b'{"a":1}'),
        (b" { } ", {"a": b"1", "b": b"2"}, b' {"a":1,"b":2 } '),
        (b'{"b":2}', {"a": b"1"}, b'{"a":1,"b":2}'),
        (b'{ "a" : [1] ,"b":2}', {"a": b'"x"'}, b'{ "a" : "x" ,"b":2}'),
        (b'{"a":1,"b":2,"c":3}', {"c": b"33", "a": b"11"}, b'{"a":11,"b":2,"c":33}'),
        (b'{"a":1}', {"a": b"2", "b": b"3"}, b'{"b":3,"a":2}'),
        ('{"é":1}'.encode(), {"é": b"2"}, '{"é":2}'.encode()),
        (b'{"\\u0061":1}', {"a": b"2"}, b'{"\\u0061":2}'),
        (b'{"x":"\\ud83d","a":1,"y":"\\ude00"}', {"a": b"22"}, b'{"x":"\\ud83d","a":22,"y":"\\ude00"}'),
    ],
)
def test_splicing(text, changes, expected):
    """A member is replaced in its place, a new one put first."""
    assert read(text).with_members(changes) == expected


@pytest.mark.parametrize(
    ("member", "value", "expected"),
    [
        ("string", b'"x"', "x"),
        ("string", b"null", None),
        ("boolean", b"true", True),
        ("boolean", b"false", False),
        ("boolean", b"null", False),
        ("mapping", b"null", None),
        ("mapping", b"{}", {}),
    ],
)
def test_members_of_the_right_type(member, value, expected):
    """A member reads as its type; null and absent are alike."""
    assert getattr(read(b'{"x":' + value + b"}"), member)("x") == expected
    assert getattr(read(b"{}"), member)("x") == (False if member == "boolean" else None)


@pytest.mark.parametrize(
    ("member", "values"),
    [
        ("string", [b"1", b"[]", b"{}", b"true"]),
        ("boolean", [b"1", b'"true"', b"0", b"[]"]),
        ("mapping", [b"[]", b"1", b'"{}"', b"true"]),
    ],
)
def test_members_of_a_wrong_type(member, values):
    """A member of another type is an InvalidRequest that names it (D28)."""
    for value in values:
        with pytest.raises(InvalidRequest, match="Invalid type for 'x'") as caught:
            getattr(read(b'{"x":' + value + b"}"), member)("x")
        assert caught.value.param == "x"


@pytest.mark.parametrize(
    ("name", "expected"), [("Model", "model"), ("MODEL", "model"), ("N", "n"), ("me\u017f\u017fages", "messages")]
)
def test_read_member_in_other_case_is_refused(name, expected):
    """Servers that match names in any case would read another value than the one held to its limits."""
    for text in ('{"%s":1}', '{"model":"m","%s":1}', '{"x":1,"x":2,"%s":1}'):
        with pytest.raises(InvalidRequest, match=f"'{name}'.*'{expected}'") as caught:
            read((text % name).encode())
        assert caught.value.param == name
    assert read(b'{"x":{"Model":1},"Temperature":1}').members.keys() == {"x", "Temperature"}


BIG = 5_000_000
MANY_BRACKETS = b'{"y":[' + b"[]," * 300 + b"[]]"


@pytest.mark.parametrize(
    "text",
    [
        b'{"x":1,"x":2' + b" " * BIG + b"}",
        b"{" + b" " * BIG + b'"x":1,"x":2}',
        b'{"x":1' + b" " * BIG + b"y",
        b'{"x":"' + b"\\\\" * (BIG // 2) + b'"}',
        b'{"x":"' + b"\\" * BIG,
        MANY_BRACKETS + b'\\"' * (BIG // 2),
        MANY_BRACKETS + b',"' + b"\\" * (BIG + 1),
        MANY_BRACKETS + b',"x":"' + b"a" * BIG + b'"}',
        b'{"x":"' + b"\\\\" * (BIG // 2) + b'\\ud83d"}',
        b'{"x":"' + b"\\ud83d" * (BIG // 6) + b'"}',
        b'{"x":"' + b"\\ud83d\\ude00" * (BIG // 12) + b'\\ude00"}',
        b'{"x":1,"x":"' + b'\\"' * (BIG // 2) + b'"}',
        b'{"' + b'\\"' * (BIG // 2) + b'":1}',
        b'{"' + b"a" * BIG + b'":1,"x":1,"x":2}',
        b"[" * BIG,
        b"[]" * (BIG // 2),
        b'{"x":[' + b"[]," * (BIG // 3) + b"[]]}",
        b'{"x":1,"x":[' + b"[]," * (BIG // 3) + b"[]]}",
        b"{" + b",".join([b'"x":1'] * (BIG // 6)) + b"}",
        b"{" + b",".join([b'"%d":1' % number for number in range(BIG // 12)]) + b"}",
        b'{"x":[' + b'"",' * (BIG // 3) + b'""]}',
        b'{"x":[' + b'"ab",' * (BIG // 5) + b'""]}',
        b'{"x":1,"x":[' + b"12," * (BIG // 3) + b"1]}",
        b'{"' + b"\\\\" * (BIG // 2) + b'":1}',
        b'{"x":"\\ud83d' + b"\\\\" * (BIG // 2) + b'"}',
    ],
    ids=lambda text: f"{text[:16]!r}...{text[-8:]!r}",
)
def test_hostile_body_takes_no_time(text):
    """Five megabytes made to cost are read or refused in a fraction of a second."""
    began = time.process_time()
    with contextlib.suppress(InvalidRequest):
        read(text)
    assert time.process_time() - began < 1.0


def test_long_strings_take_no_memory():
    """Walking over a long string needs no memory for each of its bytes."""
    text = b'{"x":1,"x":2,"' + b'\\"' * 90_000 + b'":"' + b"a\\\\" * 200_000 + b'"}'
    tracemalloc.start()
    read(text)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 12 * len(text)


def test_half_a_character_reads_as_the_replacement():
    """A half character in a member reads as U+FFFD, which no model name has, and the upstream gets it as it came (D26)."""
    body = read(b'{"model":"m\\ud83d","n":1}')
    assert body.string("model") == "m\ufffd"
    assert body.with_members({"n": b"2"}) == b'{"model":"m\\ud83d","n":2}'
