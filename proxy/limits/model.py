"""The words of limiting: Rate, Limit, BoundLimit, Level, Decision. Counting is the algorithms' affair, keys and IO the store's.

Times given to and by the store are integer microseconds of the store's clock; everything shown to people is float seconds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum, StrEnum
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


class Priority(IntEnum):
    """Whose turn comes first. Lower classes (greater numbers) leave headroom, and have a small guaranteed share."""

    INTERACTIVE = 0
    NORMAL = 1
    BACKGROUND = 2


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
    reserves_max: bool = False  # the stated max_tokens, however much less is usually used

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
DEFAULT_DOMAIN = "0"


@dataclass(frozen=True, slots=True)
class BoundLimit:
    """A limit of one owner, with the key under which the store keeps its state."""

    owner: str  # "tenant:<id>", or SERVICE
    limit: Limit
    key: str
    domain: str = DEFAULT_DOMAIN  # limits of one request are of one domain, whose keys live on one node

    @property
    def period_us(self) -> int:
        """Length of the rate's period in microseconds."""
        return self.limit.period_s * 1_000_000

    @property
    def models_label(self) -> str:
        """The ``model`` label of this limit's gauges; empty when it counts every model."""
        return ",".join(self.limit.models or ())


def domain_key(domain: str, *parts: str) -> str:
    """A store key of a domain. The braces make a cluster keep all keys of a domain on one node."""
    return ":".join((f"sg:{{d:{quote(domain, safe='')}}}", *parts))


def bind(owner: str, limit: Limit, domain: str = DEFAULT_DOMAIN) -> BoundLimit:
    """Give ``limit`` its store key.

    Parts are percent-encoded, so no tenant id or limit name can run into another's key. The algorithm and period are part
    of the key: state of one shape is never read as another after a change of the configuration; a changed amount keeps it.
    """
    shape = limit.algorithm.letter + str(limit.period_s)
    models = ",".join(quote(pattern, safe="") for pattern in limit.models or ())
    parts = (quote(owner, safe=""), quote(limit.name, safe=""), models, limit.unit.value, shape)
    return BoundLimit(owner, limit, domain_key(domain, "limit", *parts), domain)


@dataclass(frozen=True, slots=True)
class Demand:
    """What one request asks of one limit. ``cost`` is in the limit's unit."""

    bound: BoundLimit
    cost: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """An upstream account that could serve a request: the key of its state, and what its own quotas are asked for."""

    key: str
    demands: tuple[Demand, ...] = ()


@dataclass(frozen=True, slots=True)
class Pool:
    """The accounts that could serve a request, first choice first, and the key of the queue for their quotas."""

    key: str = ""
    candidates: tuple[Candidate, ...] = ()


NO_POOL = Pool()


@dataclass(frozen=True, slots=True)
class Applicant:
    """Who asks, and how long it may still wait for its turn."""

    request_id: str = ""
    tenant: str = ""
    priority: Priority = Priority.INTERACTIVE
    wait_us: int = 0
    max_waiters: int = 0  # of its tenant, itself included
    is_first: bool = True  # not a poll of one that waits


ANYONE = Applicant()


@dataclass(frozen=True, slots=True)
class Level:
    """Where one limit stands. ``remaining`` may be negative: a settle has left debt."""

    remaining: int
    reset_us: int  # until it is full (bucket) or empty of use (window)


class Verdict(IntEnum):
    """What the script decided. The numbers are its reply."""

    STALE = 0  # it reached the store after its deadline: no effect
    GRANTED = 1
    REFUSED = 2
    WAITING = 3
    NO_ACCOUNT = 4  # every upstream account is open, cooling or disabled


@dataclass(frozen=True, slots=True)
class Admission:
    """The script's answer: granted with one level and one window cell per demand, or not, by demand number ``refused``.

    ``wait_us``: when refused, after which wait this very request would be granted if nobody else came, and a spread so that
    many who were refused do not come back at once; -1 never. When it waits, how long at least; 0 where others go first.
    ``waits`` are each demand's own: a shadow limit whose wait is not 0 would have refused.
    ``refused`` is the number of the base demands where no upstream account has quota left.
    """

    verdict: Verdict
    now_us: int
    refused: int = -1
    wait_us: int = 0
    levels: tuple[Level, ...] = ()
    cells: tuple[int, ...] = ()
    waits: tuple[int, ...] = ()
    position: int = 0  # how many go first
    account: int = -1  # number of the candidate that was taken
    account_cells: tuple[int, ...] = ()
    epoch: int = 0  # of the store's memory: another one means that it was lost
    is_local: bool = False  # decided by this worker alone: the store did not answer

    @property
    def granted(self) -> bool:
        """Whether everything was charged."""
        return self.verdict is Verdict.GRANTED

    @property
    def is_stale(self) -> bool:
        """Whether the call came too late: nothing was charged."""
        return self.verdict is Verdict.STALE

    @property
    def is_too_large(self) -> bool:
        """Whether the cost exceeds the limit's whole capacity, so that waiting is no remedy."""
        return self.verdict is Verdict.REFUSED and self.wait_us < 0


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
class Settled:
    """A worker's last applied settle, and the store time of the answer."""

    sequence: int
    now_us: int


@dataclass(frozen=True, slots=True)
class Sight:
    """How a limit was seen to stand, ``remaining`` units at the store time ``seen_us``."""

    bound: BoundLimit
    remaining: int
    seen_us: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A domain's answer to a worker's sign of life: how many workers live, and whether its memory was lost (0: never)."""

    now_us: int
    workers: int
    epoch: int
    lost_us: int


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
