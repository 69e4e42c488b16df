"""Server-sent events: cuts a byte stream into records and finds each one's data, keeping every byte as it came.

Sans-IO: bytes in, records out. What a record means is ``tokens/usage.py``'s affair. LF, CRLF and CR end a line; a blank line
ends a record; there is no bound on the length of either, since a partial image is megabytes on one line.
"""

from __future__ import annotations

import re

_RECORD_END = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
_LINE_END = re.compile(rb"\r\n|\n|\r")
_LONGEST_END = 4
_BOM = b"\xef\xbb\xbf"


class SseSplitter:
    """Feed it chunks as they come; it gives back complete records, blank line included, and keeps the rest."""

    def __init__(self) -> None:
        self._pending = bytearray()
        self._searched = 0

    def __repr__(self) -> str:
        return f"<SseSplitter {len(self._pending)} bytes pending>"

    def feed(self, chunk: bytes) -> list[bytes]:
        """The records that ``chunk`` completes, in order."""
        self._pending += chunk
        records, start = [], 0
        # A line end may have been cut by the chunk border: look again at the last few bytes.
        search_from = max(0, self._searched - _LONGEST_END)
        while (end := _RECORD_END.search(self._pending, max(start, search_from))) is not None:
            if end.end() == len(self._pending) and self._pending.endswith(b"\r"):
                break  # an LF may follow and belong to it
            records.append(bytes(self._pending[start : end.end()]))
            start = end.end()
        del self._pending[:start]
        self._searched = len(self._pending)
        return records

    @property
    def pending_bytes(self) -> int:
        """How much of an unfinished record is kept."""
        return len(self._pending)

    def rest(self) -> bytes:
        """What is left when the stream has ended: an unfinished record, or nothing."""
        rest, self._pending, self._searched = bytes(self._pending), bytearray(), 0
        return rest


def data_of(record: bytes) -> bytes | None:
    """The record's data, its lines joined by LF; None for a record without any (a comment, a bare event name).

    A byte order mark, which a stream may begin with, is none of it.
    """
    if record.startswith(b"data:") and record.endswith(b"\n\n") and record.find(b"\n") == len(record) - 2 and b"\r" not in record:
        return record[5:-2].removeprefix(b" ")  # one line of data: nearly every record there is
    lines = [line[5:].removeprefix(b" ") for line in _LINE_END.split(record.removeprefix(_BOM)) if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None
