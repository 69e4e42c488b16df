"""Records and data of an event stream, by example; any cut of any stream is tested under properties."""

from __future__ import annotations

import time

import pytest

from proxy.forwarding.sse import SseSplitter, data_of


@pytest.mark.parametrize(
    ("chunks", "records", "rest"),
    [
        ([b"data: a\n\ndata: b\n\n"], [[b"data: a\n\n", b"data: b\n\n"]], b""),
        ([b"data: a\n", b"\ndata: b"], [[], [b"data: a\n\n"]], b"data: b"),
        ([b"data: a\r\n\r", b"\ndata: b\r\n\r\n"], [[], [b"data: a\r\n\r\n", b"data: b\r\n\r\n"]], b""),
        ([b"data: a\r\n\r\n"], [[b"data: a\r\n\r\n"]], b""),
        ([b"data: a\r\rdata: b\r", b"\r", b"d"], [[b"data: a\r\r"], [], [b"data: b\r\r"]], b"d"),
        ([b": ping\n\n"], [[b": ping\n\n"]], b""),
        ([b"", b""], [[], []], b""),
        ([b"\xef\xbb\xbfdata: a\n\n"], [[b"\xef\xbb\xbfdata: a\n\n"]], b""),
    ],
)
def test_records(chunks, records, rest):
    """Records come out as soon as they are surely complete, the rest at the end (D07)."""
    splitter = SseSplitter()
    assert [splitter.feed(chunk) for chunk in chunks] == records
    assert splitter.rest() == rest
    assert splitter.rest() == b""


@pytest.mark.parametrize(
    ("record", "data"),
    [
        (b"data: a\n\n", b"a"),
        (b"data:a\n\n", b"a"),
        (b"data:  a \n\n", b" a "),
        (b"data:\n\n", b""),
        (b"data: a\ndata: b\n\n", b"a\nb"),
        (b"data: a\r\ndata: b\r\n\r\n", b"a\nb"),
        (b"data: a\rdata: b\r\r", b"a\nb"),
        (b"event: x\ndata: a\nid: 1\n\n", b"a"),
        (b"\n\ndata: a\n\n", b"a"),
        (b"data: a", b"a"),
        (b"\xef\xbb\xbfdata: a\n\n", b"a"),
        (b"\xef\xbb\xbf: ping\n\n", None),
        (b": data: a\n\n", None),
        (b"event: done\n\n", None),
        (b"database: a\n\n", None),
        (b" data: a\n\n", None),
        (b"\n\n", None),
        (b"", None),
    ],
)
def test_data(record, data):
    """The data lines of a record, joined by LF; None where it has none."""
    assert data_of(record) == data


def test_one_long_line_takes_no_time():
    """A partial image of twenty megabytes on one line, in small chunks, is not searched again and again."""
    splitter, began = SseSplitter(), time.process_time()
    for _ in range(5000):
        assert splitter.feed(b"x" * 4096) == []
    assert len(splitter.feed(b"\n\n")) == 1
    assert time.process_time() - began < 1.0
