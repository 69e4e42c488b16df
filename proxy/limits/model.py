"""The words of limiting: Rate, Limit, BoundLimit, Level, Decision. Counting is the algorithms' affair, keys and IO the store's.

Times given to and by the store are integer microseconds of the store's clock; everything shown to people is float seconds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from urllib.parse import quote

PERIODS_S = {"s": 1, "min": 60, "hour": 3600, "day": 86400}
LEASE_S = 15  # how long a lease lasts without a renewal
MAX_AMOUNT = 10**12  # above it, sums of costs would leave the integers that a double (and so Lua) holds exactly

_RATE = re.compile(r"(\d{1,13})/(s|min|hour|day)")


class Unit(StrEnum):
    """What a limit counts."""

    REQUESTS = "requests"
    TOKENS = "tokens"  # prompt and completion
    INPUT_TOKENS = "input_tokens"
    OUTPUT_TOKENS = "output_tokens"
    CONCURRENCY = "concurrency"  # requests that run at once


class Algorithm(StrEnum):
    """How a limit counts."""

    TOKEN_BUCKET = "token_bucket"  # noqa: S105  (an algorithm's name)
    SLIDING_WINDOW = "sliding_window"
    LEASES = "leases"

    @property
    def letter(self) -> str:
        """What the scripts call it: b, w or l."""
        return {"token_bucket": "b", "sliding_window": "w", "leases": "l"}[self.value]


@dataclass(frozen=True, slots=True)
class Rate:
    """An amount per period, such as 10,000 per 60 seconds."""

    amount: int
    period_s: int

    @classmethod
    def parse(cls, text: str) -> Rate:
        """Read ``<amount>/<s|min|hour|day>``. Raises ValueError with the expected form."""
        match = _RATE.fullmatch(text)
        if match is None or int(match[1]) > MAX_AMOUNT:
            raise ValueError(f"expected <amount>/<s|min|hour|day> with an amount up to {MAX_AMOUNT:,}, such as 10000/min")
        return cls(int(match[1]), PERIODS_S[match[2]])

    @property
    def period_name(self) -> str:
        """``s``, ``min``, ``hour`` or ``day``."""
        return next(name for name, seconds in PERIODS_S.items() if seconds == self.period_s)

    def __str__(self) -> str:
        return f"{self.amount}/{self.period_name}"


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit as configured. ``models`` are shell patterns whose models are counted together; None means every request.

    ``is_shadow``: it counts and reports, and never refuses.
    """

    name: str
    unit: Unit
    rate: Rate | None  # None for leases, which have a maximum instead
    algorithm: Algorithm
    burst: int | None = None
    models: tuple[str, ...] | None = None
    is_shadow: bool = False
    maximum: int = 0  # of leases

    @property
    def amount(self) -> int:
        """What the rate gives in a period; of leases the maximum."""
        return self.rate.amount if self.rate is not None else self.maximum

    @property
    def period_s(self) -> int:
        """The rate's period; of leases their lifetime."""
        return self.rate.period_s if self.rate is not None else LEASE_S

    @property
    def capacity(self) -> int:
        """The most that may be used at once: the bucket's size, the window's amount, the leases' maximum."""
        return self.amount if self.burst is None else self.burst

    def is_for(self, model: str | None) -> bool:
        """Whether a request for ``model`` (None: it names none) is counted by this limit."""
        if self.models is None:
            return True
        return model is not None and any(fnmatchcase(model, pattern) for pattern in self.models)


SERVICE = "service"  # owner of the limits that all tenants share


@dataclass(frozen=True, slots=True)
class BoundLimit:
    """A limit of one owner, with the key under which the store keeps its state."""

    owner: str  # "tenant:<id>", or SERVICE
    limit: Limit
    key: str

    @property
    def period_us(self) -> int:
        """Length of the rate's period in microseconds."""
        return self.limit.period_s * 1_000_000

    @property
    def models_label(self) -> str:
        """The ``model`` label of this limit's gauges; empty when it counts every model."""
        return ",".join(self.limit.models or ())


def bind(owner: str, limit: Limit) -> BoundLimit:
    """Give ``limit`` its store key.

    Parts are percent-encoded, so no tenant id or limit name can run into another's key. The algorithm and period are part
    of the key: state of one shape is never read as another after a change of the configuration; a changed amount keeps it.
    """
    shape = limit.algorithm.letter + str(limit.period_s)
    models = ",".join(quote(pattern, safe="") for pattern in limit.models or ())
    parts = (quote(owner, safe=""), quote(limit.name, safe=""), models, limit.unit.value, shape)
    return BoundLimit(owner, limit, "sg:{d:0}:limit:" + ":".join(parts))


@dataclass(frozen=True, slots=True)
class Demand:
    """What one request asks of one limit. ``cost`` is in the limit's unit."""

    bound: BoundLimit
    cost: int


@dataclass(frozen=True, slots=True)
class Level:
    """Where one limit stands. ``remaining`` may be negative: a settle has left debt."""

    remaining: int
    reset_us: int  # until it is full (bucket) or empty of use (window)


@dataclass(frozen=True, slots=True)
class Admission:
    """The script's answer: granted with one level and one window cell per demand, or refused by demand number ``refused``.

    ``waits`` are each demand's own, in microseconds: a shadow limit whose wait is not 0 would have refused.

    A stale call, one that reached the store after its deadline, has no effect and is neither granted nor refused by a limit.
    ``wait_us`` is the earliest wait after which this very request would be granted if nobody else came; -1 means never.
    """

    granted: bool
    now_us: int
    refused: int
    wait_us: int
    levels: tuple[Level, ...]
    cells: tuple[int, ...]
    waits: tuple[int, ...] = ()

    @property
    def is_stale(self) -> bool:
        """Whether the call came too late: nothing was charged."""
        return not self.granted and self.refused < 0

    @property
    def is_too_large(self) -> bool:
        """Whether the cost exceeds the limit's whole capacity, so that waiting is no remedy."""
        return not self.granted and self.wait_us < 0


@dataclass(frozen=True, slots=True)
class Spent:
    """Tokens that a request used in the end. ``total`` is what the upstream says, where it says it."""

    input_tokens: int
    output_tokens: int
    total_tokens: int

    def of(self, unit: Unit) -> int:
        """The amount in a unit of tokens."""
        if unit is Unit.INPUT_TOKENS:
            return self.input_tokens
        return self.output_tokens if unit is Unit.OUTPUT_TOKENS else self.total_tokens


@dataclass(frozen=True, slots=True)
class Correction:
    """The difference between what was charged to a limit and what was used: positive charges more, negative gives back.

    For leases: negative ends the request's lease, 0 renews it.
    """

    bound: BoundLimit
    cell: int  # window cell of the original charge; of a lease the store time of its grant; 0 for buckets
    delta: int
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """What the limiter says of one request, in the terms of the limit that matters most to it."""

    allowed: bool
    limit: Limit
    remaining: int
    reset_after: float
    retry_after: float | None  # None when allowed, or when the request can never fit
    requested: int = 0
    would_refuse: bool = False  # a shadow limit that is exceeded

    @property
    def used(self) -> int:
        """How much of the capacity is taken."""
        return self.limit.capacity - self.remaining
