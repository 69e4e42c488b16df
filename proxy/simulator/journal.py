"""What the simulator was asked, by which key and how it ended, and who waits for that to become true.

What to answer is left to ``app.py``; no key is ever kept, only the beginning of its hash.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_ENTRIES = 100_000


def key_id_of(key: str) -> str:
    """The name of a key that may be shown: ``sha256:`` and the first 12 hexadecimal digits of its SHA-256."""
    return "sha256:" + hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:12]


@dataclass(slots=True, repr=False, eq=False)
class Seen:
    """A request and what became of it. ``path`` and ``query`` are as they came; times are monotonic seconds.

    In the end one of three is true: ``finished``, ``disconnected`` (by the client) or ``cut`` (by the script).
    """

    number: int
    method: str
    path: str
    query: str
    key_id: str | None
    headers: list[tuple[bytes, bytes]]
    started_at: float
    body: bytes = b""
    model: str | None = None
    answered_status: int | None = None
    tokens_sent: int = 0
    finished: bool = False
    disconnected: bool = False
    disconnected_at: float | None = None
    cut: bool = False

    def __repr__(self) -> str:
        """One line without body, headers or key."""
        state = "disconnected" if self.disconnected else "cut" if self.cut else "finished" if self.finished else "open"
        return (
            f"<Seen {self.number}: {self.method} {self.path} by {self.key_id or 'nobody'}, model {self.model}, "
            f"status {self.answered_status}, {self.tokens_sent} tokens, {state}>"
        )

    def document(self) -> dict[str, Any]:
        """All members as JSON can hold them; the body as text."""
        return {
            "number": self.number,
            "method": self.method,
            "path": self.path,
            "query": self.query,
            "key_id": self.key_id,
            "headers": [[name.decode("latin-1"), value.decode("latin-1")] for name, value in self.headers],
            "body": self.body.decode("utf-8", "replace"),
            "model": self.model,
            "started_at": self.started_at,
            "answered_status": self.answered_status,
            "tokens_sent": self.tokens_sent,
            "finished": self.finished,
            "disconnected": self.disconnected,
            "disconnected_at": self.disconnected_at,
            "cut": self.cut,
        }


@dataclass(slots=True, eq=False)
class _Waiter:
    predicate: Callable[[list[Seen]], bool]
    future: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Journal:
    """The last 100,000 requests, oldest first."""

    def __init__(self, most_entries: int = MOST_ENTRIES) -> None:
        self._entries: deque[Seen] = deque(maxlen=most_entries)
        self._waiters: list[_Waiter] = []

    @property
    def entries(self) -> list[Seen]:
        """A copy of the list; the entries are the living ones."""
        return list(self._entries)

    def add(self, seen: Seen) -> None:
        """Enter a request."""
        self._entries.append(seen)
        self.note()

    def clear(self) -> None:
        """Forget all requests."""
        self._entries.clear()
        self.note()

    def note(self) -> None:
        """An entry has changed: ask the waiting predicates at once, so that no passing state escapes them."""
        if not self._waiters:
            return
        entries = self.entries
        for waiter in [waiter for waiter in self._waiters if not waiter.future.done()]:
            try:
                if waiter.predicate(entries):
                    waiter.future.set_result(None)
            except Exception as error:  # noqa: BLE001  (it is the waiter's own, and raised to the waiter)
                waiter.future.set_exception(error)

    async def wait_for(self, predicate: Callable[[list[Seen]], bool], timeout_s: float) -> list[Seen]:
        """Wait until the predicate holds for the entries, and return them. Raises TimeoutError, naming the last."""
        if predicate(self.entries):
            return self.entries
        waiter = _Waiter(predicate)
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                await waiter.future
        except TimeoutError:
            raise TimeoutError(f"Not seen within {timeout_s:g} s. The last requests: {self.entries[-10:]}") from None
        finally:
            self._waiters.remove(waiter)
        return self.entries
