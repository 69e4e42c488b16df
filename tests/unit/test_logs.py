"""Log lines: their format, and that no key stands in them. What is said is left to whoever says it."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from proxy import logs

KEYS = ["sk-proj-Ab_12-xyz", "sg-" + "0a" * 24, "Bearer abc.def~1", "bearer \tsk-short", "BEARER opaque-token"]
LOUD = ("asyncio", "uvicorn.error", "uvicorn.access")


@pytest.fixture
def stderr(monkeypatch) -> io.StringIO:
    """Stands for standard error."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


@pytest.fixture
def lines(stderr):
    """Configures JSON logs, gives a function that returns the lines so far, and puts everything back."""
    root, kept = logging.getLogger(), structlog.get_config()
    handlers, levels = root.handlers[:], {name: logging.getLogger(name).level for name in ("root", *LOUD)}
    logs.configure("info", "json", process="test")

    def read() -> list[dict[str, object]]:
        text = stderr.getvalue()
        assert text.endswith("\n") or not text
        return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]

    yield read
    structlog.configure(**kept)
    structlog.contextvars.clear_contextvars()
    root.handlers[:] = handlers
    for name, level in levels.items():
        (root if name == "root" else logging.getLogger(name)).setLevel(level)


def test_line_is_json_with_its_context(lines):
    """A line carries component, level, time, what is bound to all lines, and its own values in JSON's types."""
    logs.logger("part").info("happened", count=3, ratio=0.5, is_it=True, nothing=None, names=["a", "b"])
    (line,) = lines()
    stamp = line.pop("timestamp")
    assert isinstance(stamp, str)
    assert stamp.endswith("Z")
    expected = {"event": "happened", "component": "part", "process": "test", "level": "info", "count": 3, "ratio": 0.5}
    assert line == expected | {"is_it": True, "nothing": None, "names": ["a", "b"]}


def test_standard_library_lines_look_alike(lines):
    """Records of the standard library, arguments and all, have the same form."""
    logging.getLogger("some.library").warning("took %d of %s", 3, "four")
    (line,) = lines()
    assert (line["event"], line["level"], line["process"]) == ("took 3 of four", "warning", "test")


def test_level_is_kept(lines):
    """What is below the level is not written; of asyncio and uvicorn only what matters is."""
    logs.logger("part").debug("silent")
    logging.getLogger("library").debug("silent")
    logging.getLogger("asyncio").info("silent")
    logging.getLogger("uvicorn.error").error("silent")
    logging.getLogger("asyncio").warning("heard")
    assert [line["event"] for line in lines()] == ["heard"]


@pytest.mark.parametrize("key", KEYS)
def test_keys_are_masked_wherever_they_stand(lines, key):
    """No value, nested value, name, or object's repr lets a key through."""
    pair = namedtuple("pair", "a b")
    logs.logger("part").info(
        f"event with {key}",
        text=f"x={key}",
        nested={"list": [1, {"deep": (f"'{key}'", {f"{key}"})}], f"name {key}": 0},
        pair=pair(key, 1),
        error=ValueError(f"refused {key}"),
        path=Path("/tmp") / key,  # noqa: S108  (a name only)
        raw=f"raw {key}".encode(),
    )
    logging.getLogger("library").warning("header %s", key)
    text = json.dumps(lines())
    assert text.count("[masked]") == 10
    assert key not in text
    assert key.split()[-1] not in text


def test_exceptions_stay_on_one_line_and_are_masked(lines):
    """A traceback is text inside its line, from either kind of logger; a key that opens one of its lines is masked too."""
    try:
        int("first\nsk-second-line-key and 'Bearer abc\"'")
    except ValueError:
        logs.logger("part").exception("failed")
        logging.getLogger("library").exception("failed too")
    ours, theirs = lines()
    for line in (ours, theirs):
        assert str(line["exception"]).count("[masked]") == 4  # twice in the source line, twice in the message
        assert "second" not in str(line["exception"])
        assert "abc" not in str(line)
        assert "Traceback" in str(line["exception"])
        assert "exc_info" not in line


def test_text_without_keys_is_left_alone(lines):
    """Words that only resemble a key are not masked."""
    text = "task-scheduler risk-assessment sk-1 disk-usage bearer"
    logs.logger("part").info(text, url="http://host/a-b", number=-1)
    (line,) = lines()
    assert (line["event"], line["url"], line["number"]) == (text, "http://host/a-b", -1)


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), {("a", 1): 2}, {1, 2}, b"\xff", SecretStr("hidden"), "\ud800", object()]
)
def test_whatever_is_logged_is_valid_json(lines, value):
    """Values that JSON lacks do not break the line, and a wrapped secret stays hidden."""
    logs.logger("part").info("odd", value=value)
    (line,) = lines()
    assert line["value"] is not None
    assert "hidden" not in str(line)


@given(
    st.recursive(
        st.text() | st.floats() | st.integers() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_masking_keeps_what_holds_no_key(value):
    """Masked values are JSON; one that JSON can hold and that has no key in it comes out as it went in."""
    masked = logs._masked(value)
    text = json.dumps(masked, allow_nan=False)
    if "[masked]" not in text and not {"nan", "inf", "-inf"} & set(text.replace('"', " ").split()):
        assert json.loads(text) == value


def test_text_format_is_readable(lines, stderr):
    """The text format shows event and values, masked as well, and no JSON."""
    with contextlib.redirect_stderr(stderr):
        logs.configure("warning", "text")
    logs.logger("part").warning("happened", key="sk-planted-0001", count=3)
    text = stderr.getvalue()
    assert "happened" in text
    assert "count=3" in text
    assert "planted" not in text
    assert not text.startswith("{")


def test_auto_is_json_where_nobody_reads_along(lines, stderr):
    """Without a terminal, auto is JSON."""
    with contextlib.redirect_stderr(stderr):
        logs.configure("info", "auto")
    logs.logger("part").info("happened")
    assert json.loads(stderr.getvalue())["event"] == "happened"
