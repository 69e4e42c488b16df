"""The shared store: Redis >= 6.2 or Valkey, one EVALSHA per decision.

What the scripts decide stands in ``lua/``; this turns demands into their arguments and replies into answers, and keeps each
domain's clock and epoch in view, so that every admission carries a deadline, and a store that lost its memory hears of it. How
calls travel is ``pipeline.py``'s affair.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast
from urllib.parse import quote

from proxy.clock import Clock
from proxy.errors import StartupError
from proxy.limits.model import (
    ANYONE,
    DEFAULT_DOMAIN,
    NO_POOL,
    SERVICE,
    Admission,
    Applicant,
    BoundLimit,
    Correction,
    Demand,
    Heartbeat,
    Level,
    Pool,
    Settled,
    Sight,
    Verdict,
    domain_key,
)
from proxy.limits.pipeline import ANSWER_WITHIN_S, Argument, Pipelines, Script, unavailable
from proxy.limits.store import Wake, domain_of

OLDEST_SERVER = (6, 2)

_PEEK_AT_ONCE = 100  # limits read by one script call
_FADE_US = 100  # a reply; more than two clocks drift apart between replies
_HEAD, _PER_LIMIT = 7, 4  # numbers of an admission's reply

ADMIT = Script.load("state", "limits", "queues", "classes", "admit")
SETTLE = Script.load("state", "limits", "queues", "settle")
CANCEL = Script.load("state", "queues", "cancel")
PEEK = Script.load("state", "limits", "peek")
BEAT = Script.load("state", "beat")
RESTORE = Script.load("state", "limits", "restore")


class RedisStore:
    """``fake_time_us`` is for tests: it replaces the server's clock in every script."""

    def __init__(self, url: str, clock: Clock, answer_within_s: float = ANSWER_WITHIN_S) -> None:
        self._pipelines = Pipelines(url, answer_within_s)
        self._clock = clock
        self._ahead_us: dict[str, int] = {}  # by domain, store time minus ours: the clocks of a cluster's nodes differ
        self._epochs: dict[str, int] = {}
        self.fake_time_us: int | None = None

    async def admit(self, demands: Sequence[Demand], applicant: Applicant = ANYONE, pool: Pool = NO_POOL) -> Admission:
        """See ``store.Store``."""
        domain = domain_of(demands, pool)
        keys = [domain_key(domain, "state"), *(demand.bound.key for demand in demands)]
        arguments: list[Argument] = [*_introduce(applicant), len(demands)]
        for demand in demands:
            arguments += _describe(demand.bound, demand.cost)
        if pool.candidates:
            keys.append(pool.key)
        for candidate in pool.candidates:
            keys += (candidate.key, *(demand.bound.key for demand in candidate.demands))
            arguments.append(len(candidate.demands))
            for demand in candidate.demands:
                arguments += _describe(demand.bound, demand.cost)
        await self._see_store_time(domain)

        def head() -> list[Argument]:
            return [*self._time(), self._deadline(domain), self._epochs.get(domain, 0)]

        reply = cast("list[int]", await self._pipelines.call(ADMIT, keys, arguments, head))
        self._note(domain, now_us=reply[1], epoch=reply[2])
        if reply[0] == Verdict.STALE:
            raise unavailable(TimeoutError("the store decided after the deadline"))
        return _admission(reply, len(demands))

    async def settle(self, domain: str, worker: str, sequence: int, corrections: Sequence[Correction]) -> Settled:
        """See ``store.Store``."""
        keys = [domain_key(domain, "state"), domain_key(domain, "settled", worker)]
        arguments: list[Argument] = [sequence]
        for correction in corrections:
            keys.append(correction.bound.key)
            arguments += (*_describe(correction.bound, correction.delta), correction.cell, correction.request_id)
        last, now_us = cast("list[int]", await self._pipelines.call(SETTLE, keys, arguments, lambda: self._time_and_epoch(domain)))
        return Settled(last, now_us)

    async def cancel(self, domain: str, request_id: str) -> None:
        """See ``store.Store``."""
        await self._pipelines.call(CANCEL, [domain_key(domain, "state")], [request_id], self._time)

    async def beat(self, domain: str, worker: str) -> Heartbeat:
        """See ``store.Store``."""
        keys = [domain_key(domain, "state"), domain_key(domain, "workers")]
        reply = cast("list[int]", await self._pipelines.call(BEAT, keys, [worker], lambda: self._time_and_epoch(domain)))
        heartbeat = Heartbeat(*reply)
        self._note(domain, now_us=heartbeat.now_us, epoch=heartbeat.epoch)
        return heartbeat

    async def restore(self, domain: str, sights: Sequence[Sight]) -> None:
        """See ``store.Store``."""
        keys = [domain_key(domain, "state"), *(sight.bound.key for sight in sights)]
        arguments: list[Argument] = []
        for sight in sights:
            arguments += (*_describe(sight.bound, sight.remaining), sight.seen_us)
        await self._pipelines.call(RESTORE, keys, arguments, lambda: self._time_and_epoch(domain))

    async def peek(self, bounds: Sequence[BoundLimit]) -> tuple[Level, ...]:
        """See ``store.Store``."""
        by_domain: dict[str, list[int]] = {}
        for number, bound in enumerate(bounds):
            by_domain.setdefault(bound.domain, []).append(number)
        parts = [found[i : i + _PEEK_AT_ONCE] for found in by_domain.values() for i in range(0, len(found), _PEEK_AT_ONCE)]
        replies = await asyncio.gather(*(self._peek_part([bounds[number] for number in part]) for part in parts))
        levels = {
            number: level for part, reply in zip(parts, replies, strict=True) for number, level in zip(part, reply, strict=True)
        }
        return tuple(levels[number] for number in range(len(bounds)))

    async def _peek_part(self, bounds: Sequence[BoundLimit]) -> list[Level]:
        keys = [domain_key(bounds[0].domain, "state"), *(bound.key for bound in bounds)]
        arguments: list[Argument] = []
        for bound in bounds:
            arguments += _describe(bound, 0)
        reply = cast("list[int]", await self._pipelines.call(PEEK, keys, arguments, self._time))
        return [Level(reply[i], reply[i + 1]) for i in range(0, len(reply), 2)]

    def listen(self, domains: Sequence[str], worker: str, wake: Wake) -> None:
        """See ``store.Store``."""
        channels = [domain_key(domain, "wake", worker) for domain in domains]
        self._pipelines.subscribe(channels, lambda message: wake(message.decode("utf-8", "replace")))

    async def ping(self) -> None:
        """See ``store.Store``. It writes: a server with a full disk or memory still reads, and can't hold limits."""
        await self._pipelines.write(domain_key(DEFAULT_DOMAIN, "ping"))

    async def check_server(self) -> None:
        """Refuse a server that can't hold limits: older than 6.2, or one that evicts keys. Raises StartupError."""
        for info in await self._pipelines.info():
            version = str(info.get("valkey_version") or info.get("redis_version", "0"))
            if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_SERVER:
                raise StartupError(f"store.url: the server is version {version}; Redis 6.2 or Valkey 7.2 and newer are supported")
            policy = str(info.get("maxmemory_policy", "noeviction"))
            if policy != "noeviction":
                raise StartupError(
                    f"store.url: the server's maxmemory-policy is {policy}, which would forget limits; set it to noeviction"
                )

    async def close(self) -> None:
        """See ``store.Store``."""
        await self._pipelines.close()

    # each domain's clock and epoch --------------------------------------------------------------------------------------

    def _our_time_us(self) -> int:
        return int(self._clock.monotonic() * 1e6)

    async def _see_store_time(self, domain: str) -> None:
        if self.fake_time_us is None and domain not in self._ahead_us:
            self._ahead_us[domain] = await self._pipelines.time_us(domain_key(domain, "state")) - self._our_time_us()

    def _time(self) -> list[Argument]:
        return ["" if self.fake_time_us is None else self.fake_time_us]

    def _time_and_epoch(self, domain: str) -> list[Argument]:
        return [*self._time(), self._epochs.get(domain, 0)]

    def _deadline(self, domain: str) -> Argument:
        """The store time until which an admission sent now may take effect: as long as its caller waits for it."""
        ahead_us = self._ahead_us.get(domain)
        if self.fake_time_us is not None or ahead_us is None:
            return ""
        return self._our_time_us() + ahead_us + int(self._pipelines.answer_within_s * 1e6)

    def _note(self, domain: str, *, now_us: int, epoch: int) -> None:
        """Follow the store's clock. A reply that lay in the socket shows too little, so the largest seen holds, fading slowly."""
        self._epochs[domain] = epoch
        if self.fake_time_us is None:
            seen = now_us - self._our_time_us()
            self._ahead_us[domain] = max(seen, self._ahead_us.get(domain, seen) - _FADE_US)


def _introduce(applicant: Applicant) -> tuple[Argument, ...]:
    return (
        applicant.request_id,
        f"t:{quote(applicant.tenant, safe='')}",
        int(applicant.priority),
        applicant.wait_us,
        applicant.max_waiters,
        int(applicant.is_first),
    )


def _describe(bound: BoundLimit, number: int) -> tuple[Argument, ...]:
    limit = bound.limit
    flags = int(limit.is_shadow) + 2 * (bound.owner == SERVICE)
    return limit.algorithm.letter, limit.capacity, limit.amount, bound.period_us, number, flags


def _admission(reply: list[int], count: int) -> Admission:
    verdict, now_us, epoch, refused, wait_us, position, account = reply[:_HEAD]
    of_limits, account_cells = reply[_HEAD : _HEAD + _PER_LIMIT * count], reply[_HEAD + _PER_LIMIT * count :]
    is_granted = verdict == Verdict.GRANTED
    return Admission(
        Verdict(verdict),
        now_us,
        refused=refused,
        wait_us=wait_us,
        levels=tuple(Level(of_limits[i], of_limits[i + 1]) for i in range(0, len(of_limits), _PER_LIMIT)),
        cells=tuple(of_limits[2::_PER_LIMIT]) if is_granted else (),
        waits=tuple(of_limits[3::_PER_LIMIT]),
        position=position,
        account=account,
        account_cells=tuple(account_cells) if is_granted else (),
        epoch=epoch,
    )
