"""What a store keeps of one domain, as the scripts in Python see it; ``lua/`` keeps the same in hashes and sorted sets.

Words only: how any of it changes is decided in the modules named at each part, and put in order by ``admission.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from proxy.limits.leases import Leases
from proxy.limits.sliding_window import Window
from proxy.limits.token_bucket import Bucket


@dataclass(slots=True)
class ClassUse:
    """Of one limit: what classes asked for and got in this period and the one before, and what they are owed (``classes.py``)."""

    period: int = 0
    demand: list[int] = field(default_factory=lambda: [0, 0])  # of interactive and normal, in this period
    demand_before: list[int] = field(default_factory=lambda: [0, 0])
    granted: list[int] = field(default_factory=lambda: [0, 0])
    granted_before: list[int] = field(default_factory=lambda: [0, 0])
    credit: list[float] = field(default_factory=lambda: [0.0, 0.0])  # of normal and background
    held_up_us: list[int] = field(default_factory=lambda: [0, 0])  # since when it accrues; 0: it does not


@dataclass(slots=True)
class Ticket:
    """A request that waits (``queues.py``). Its place is the same in every queue that it stands in."""

    place: int
    tenant: str
    seen_us: int
    queues: tuple[str, ...] = ()


@dataclass(slots=True)
class Account:
    """Health of an upstream account (``accounts.py``). Times are store time in microseconds, 0 for none."""

    is_disabled: bool = False
    cooling_until_us: int = 0
    open_until_us: int = 0
    is_half_open: bool = False
    trial: str = ""  # request id
    trial_until_us: int = 0


@dataclass(slots=True)
class Restored:
    """How a limit was taken to stand when the store had lost its memory: as seen at ``seen_us``, ``assumed`` units."""

    seen_us: int
    assumed: float


@dataclass(slots=True)
class State:
    """Everything of one domain. ``epoch`` is when this memory began; ``lost_us`` when an earlier one was found to be lost."""

    last_us: int = 0
    epoch: int = 0
    lost_us: int = 0
    lower_us: int = 0  # the last call of a class below interactive
    buckets: dict[str, Bucket] = field(default_factory=dict)
    windows: dict[str, Window] = field(default_factory=dict)
    leases: dict[str, Leases] = field(default_factory=dict)
    restored: dict[str, Restored] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)  # cost refused since the last grant, by limit
    classes: dict[str, ClassUse] = field(default_factory=dict)
    settled: dict[str, int] = field(default_factory=dict)  # last number by worker
    workers: dict[str, int] = field(default_factory=dict)  # last sign of life
    accounts: dict[str, Account] = field(default_factory=dict)
    tickets: dict[str, Ticket] = field(default_factory=dict)
    queues: dict[str, dict[str, int]] = field(default_factory=dict)  # places by request id, by limit
    tags: dict[str, int] = field(default_factory=dict)  # each tenant's last tag
    virtual: int = 0  # tag of the last one that was served
    woken: list[str] = field(default_factory=list)  # request ids that came first; whoever holds the state passes them on
