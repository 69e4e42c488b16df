"""The stream splitter: any bytes, cut anywhere."""

from __future__ import annotations

import re
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.forwarding.sse import SseSplitter, data_of

PIECES = [
    b"data: x",
    b"data:",
    b"event: y",
    b":",
    b"\n",
    b"\r",
    b"\r\n",
    b"\n\n",
    b"\r\n\r\n",
    "é€😀".encode(),
    b"\xff",
    b"\xef\xbb\xbf",
    b"\x00",
]
streams = st.lists(st.sampled_from(PIECES), max_size=30).map(b"".join) | st.binary(max_size=60)
cut_points = st.lists(st.integers(0, 200), max_size=12)


def cut(stream, points):
    edges = [0, *sorted(min(point, len(stream)) for point in points), len(stream)]
    return [stream[begin:end] for begin, end in pairwise(edges)]


def split(chunks):
    splitter = SseSplitter()
    records = [record for chunk in chunks for record in splitter.feed(chunk)]
    return [*records, rest] if (rest := splitter.rest()) else records


@settings(max_examples=500)
@given(stream=streams, points=cut_points)
def test_records_do_not_depend_on_the_cuts(stream, points):
    """Every byte comes out once and in order, in the same records however the stream is cut (D07)."""
    whole = split([stream])
    assert b"".join(whole) == stream
    assert split(cut(stream, points)) == whole
    assert split([stream[i : i + 1] for i in range(len(stream))]) == whole


@given(stream=streams)
def test_records_end_with_their_first_blank_line(stream):
    """A complete record has a blank line at its end and, past the line ends it begins with, none before."""
    blank_line = re.compile(rb"(\r\n|\n|\r)(?!(?<=\r)\n)(\r\n|\n|\r)")
    for record in split([stream])[:-1]:
        found = blank_line.search(record)
        assert found is not None
        assert found.end() == len(record)


texts = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=20)


@given(
    events=st.lists(st.lists(texts, min_size=1, max_size=3), min_size=1, max_size=5),
    line_end=st.sampled_from(["\n", "\r\n", "\r"]),
    points=cut_points,
)
def test_data_survives_any_line_end_and_cut(events, line_end, points):
    """The data of each event is read back, its lines joined by LF, with any line end and cut, characters included (D07)."""
    stream = "".join("".join(f"data: {line}{line_end}" for line in lines) + line_end for lines in events).encode()
    data = [data_of(record) for record in split(cut(stream, points))]
    assert data == ["\n".join(lines).encode() for lines in events]
