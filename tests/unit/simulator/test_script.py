"""Reading scripts and laying one over another. How they are followed is left to ``test_following.py``."""

from __future__ import annotations

import json

import pytest

from proxy.simulator.script import _KINDS, KNOWN, NOTHING, Script, ScriptError

EXAMPLES = {
    "latency_s": 0.5,
    "status": 429,
    "error_code": "c",
    "error_type": "t",
    "error_message": "m",
    "retry_after_s": 1,
    "tokens": 3,
    "token_pace_s": 0.01,
    "hang": "body",
    "hang_after": 1,
    "cut_after": 2,
    "cut": "reset",
    "drop": True,
    "hold": "gate",
    "hold_after": 0,
    "usage": {"total_tokens": 1},
    "no_done": False,
    "error_in_stream": 0,
    "chunk_bytes": 1,
    "raw_body": "ü",
    "raw_content_type": "text/html",
    "raw_headers": {"X-A": "1"},
}


def test_every_field_can_be_read():
    """The table of readers knows each field of a script, and no other."""
    assert set(_KINDS) == set(KNOWN) == set(EXAMPLES)


@pytest.mark.parametrize("name", KNOWN)
def test_field_is_read_from_json(name):
    """A valid value sets its own field and leaves all others unsaid."""
    script = Script.from_json(json.dumps({name: EXAMPLES[name]}))
    assert [field for field in KNOWN if getattr(script, field) is not None] == [name]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("latency_s", -1),
        ("latency_s", True),
        ("latency_s", "1"),
        ("status", 199),
        ("status", 600),
        ("status", 200.0),
        ("error_code", 1),
        ("tokens", -1),
        ("hang", "forever"),
        ("cut", "abort"),
        ("drop", 1),
        ("usage", "some"),
        ("chunk_bytes", 0),
        ("raw_body", {}),
        ("raw_content_type", "a\r\nb: c"),
        ("raw_headers", {"a b": "1"}),
        ("raw_headers", {"a": "1\r\n"}),
        ("raw_headers", [["a"]]),
        ("raw_headers", "a: 1"),
    ],
)
def test_value_that_makes_no_sense_is_refused_by_name(name, value):
    """An unusable value is an error that names the field."""
    with pytest.raises(ScriptError, match=f"'{name}' must be"):
        Script.from_document({name: value})


def test_unknown_field_is_refused_with_the_known_ones():
    """A misspelt field is an error that names it and lists what there is."""
    with pytest.raises(ValueError, match=r"Unknown script field 'latency'\. Known fields: latency_s, status, .*raw_headers"):
        Script.from_document({"latency": None})


@pytest.mark.parametrize("text", ["", "{", "[]", "3", b"\xff", "[" * 100_000])
def test_script_must_be_a_json_object(text):
    """Anything but a JSON object is an error."""
    with pytest.raises(ScriptError, match="must be a JSON object"):
        Script.from_json(text)


def test_null_says_nothing():
    """A member that is null is the same as an absent one."""
    assert Script.from_json('{"status": null}') == NOTHING


def test_more_specific_script_wins_field_by_field():
    """Laying a script over another replaces what it says and keeps what it does not say."""
    base = Script(status=500, tokens=3, hang="body")
    assert Script(status=200, hang="none").over(base) == Script(status=200, tokens=3, hang="none")


def test_zero_and_false_are_said():
    """A zero or false of the more specific script wins like any other value."""
    assert Script(latency_s=0.0, drop=False).over(Script(latency_s=5.0, drop=True)) == Script(latency_s=0.0, drop=False)


def test_silent_script_leaves_the_base_as_it_is():
    """A script that says nothing gives the base back, so that the plain path stays cheap."""
    assert NOTHING.over(NOTHING) is NOTHING
