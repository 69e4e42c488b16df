"""The Lua scripts against their Python twin: the same calls at the same times must give the same replies."""

from __future__ import annotations

import asyncio
from dataclasses import astuple, dataclass
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis import Redis

from proxy.clock import Clock
from proxy.limits.memory import MemoryStore
from proxy.limits.model import (
    MAX_AMOUNT,
    NO_POOL,
    PERIODS_S,
    SERVICE,
    Algorithm,
    Applicant,
    BoundLimit,
    Candidate,
    Correction,
    Demand,
    Limit,
    Pool,
    Priority,
    Rate,
    Sight,
    Unit,
    bind,
    domain_key,
)
from proxy.limits.redis import RedisStore
from proxy.limits.sliding_window import CELLS, cell_at
from proxy.limits.state import Account

START_US = 1_700_000_000_123_456
DAY_US = 86_400_000_000
COUNTING = (Algorithm.TOKEN_BUCKET, Algorithm.SLIDING_WINDOW)

amounts = st.one_of(st.integers(0, 20), st.sampled_from([100, 1000, 123_457, 300_000, 10**9, MAX_AMOUNT]))
steps_us = st.one_of(
    st.just(0),
    st.integers(0, 20_000),
    st.integers(0, 2_000_000),
    st.integers(0, 90_000_000),
    st.integers(0, 3 * DAY_US),
    st.sampled_from([8333, 8334, 500_000, 30_000_000, 61_000_000, 61_000_001, 3_660_000_000, 87_840_000_000]),
    st.integers(-5_000_000, -1),
)
part_of_capacity = st.sampled_from([0, 0.01, 0.3, 0.5, 0.9, 1, 1.01, 3])
costs = st.one_of(st.integers(0, 12), part_of_capacity, st.just(10**13))
deltas = st.one_of(
    st.integers(-12, 12), part_of_capacity, part_of_capacity.map(lambda part: -part), st.sampled_from([10**13, -(10**13)])
)


@st.composite
def limits(draw: st.DrawFn, algorithm: Algorithm, period_s: int) -> BoundLimit:
    """Name, unit and models are left alike, so limits of one shape share a key whatever their amounts."""
    is_shadow = draw(st.sampled_from([False, False, False, True]))
    owner = "tenant:a:{b}" if period_s != 60 else SERVICE
    if algorithm is Algorithm.LEASES:
        maximum = draw(st.integers(0, 4))
        return bind(owner, Limit("l", Unit.CONCURRENCY, None, algorithm, is_shadow=is_shadow, maximum=maximum))
    burst = draw(st.one_of(st.none(), amounts)) if algorithm is Algorithm.TOKEN_BUCKET else None
    return bind(owner, Limit("l", Unit.TOKENS, Rate(draw(amounts), period_s), algorithm, burst, is_shadow=is_shadow))


@st.composite
def shapes(draw: st.DrawFn) -> list[list[BoundLimit]]:
    """One to four limits; each in one or two versions, as before and after a change of the configuration."""
    every_shape = [(algorithm, period_s) for algorithm in COUNTING for period_s in PERIODS_S.values()]
    every_shape += [(Algorithm.LEASES, 15)] * 3
    chosen = draw(st.lists(st.sampled_from(every_shape), min_size=1, max_size=4, unique=True))
    return [draw(st.lists(limits(*shape), min_size=1, max_size=2)) for shape in chosen]


@st.composite
def quotas(draw: st.DrawFn) -> list[BoundLimit]:
    """What upstream accounts are asked for: limits with keys of their own."""
    made = []
    for number in range(draw(st.integers(0, 4))):
        algorithm = draw(st.sampled_from(COUNTING))
        limit = Limit(f"q{number}", Unit.TOKENS, Rate(draw(amounts), draw(st.sampled_from(list(PERIODS_S.values())))), algorithm)
        made.append(bind("upstream:u", limit))
    return made


@dataclass(frozen=True)
class Step:
    """One call, in terms that are made concrete when it is its turn."""

    after_us: int
    call: str
    version: int
    which: tuple[int, ...]
    numbers: tuple[float, ...]
    worker: str
    sequence_step: int
    cells_back: tuple[int, ...]
    asker: Applicant
    accounts: tuple[tuple[int, ...], ...]
    account: Account


many = ["admit"] * 8 + ["settle"] * 3 + ["cancel", "peek", "beat", "restore", "account", "forget"]
askers = st.builds(
    Applicant,
    request_id=st.sampled_from([f"w{worker}:{number}" for worker in (1, 2) for number in range(4)]),
    tenant=st.sampled_from(["a", "b", "", "c {d}:x"]),
    priority=st.sampled_from(Priority),
    wait_us=st.sampled_from([0, 1000, 400_000, 20_000_000, 10**12, 10**12]),
    max_waiters=st.sampled_from([0, 1, 2, 100]),
    is_first=st.booleans(),
)
moments = st.sampled_from([0, 0, START_US + 1_000_000, START_US + 60_000_000, 2 * 10**15])
account_states = st.builds(
    Account,
    is_disabled=st.sampled_from([False, False, False, True]),
    cooling_until_us=moments,
    open_until_us=moments,
    is_half_open=st.booleans(),
    trial=st.sampled_from(["", "w1:0", "w2:1"]),
    trial_until_us=moments,
)
calls = st.builds(
    Step,
    after_us=steps_us,
    call=st.sampled_from(many),
    version=st.integers(0, 1),
    which=st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True).map(tuple),
    numbers=st.tuples(costs, costs, costs, costs) | st.tuples(deltas, deltas, deltas, deltas),
    worker=st.sampled_from(["w1", "w2"]),
    sequence_step=st.sampled_from([1, 1, 1, 1, 0, -1, 2, 7]),
    cells_back=st.tuples(*[st.sampled_from([0, 0, 1, 2, 60, 119, 120, 121, 122, 123, 500, -1, -3])] * 4),
    asker=askers,
    accounts=st.lists(st.lists(st.integers(0, 3), max_size=2, unique=True).map(tuple), max_size=3).map(tuple) | st.just(()),
    account=account_states,
)


def concrete(number: float, bound: BoundLimit) -> int:
    """A fraction means that part of the limit's capacity."""
    return number if isinstance(number, int) and abs(number) > 3 else int(number * bound.limit.capacity) or int(number)


class Twins:
    """Both stores on one clock. Every call goes to both, and the replies must be equal; so must the wake-ups."""

    def __init__(self, redis: RedisStore, server_url: str) -> None:
        self.now_us = START_US
        self.memory = MemoryStore(lambda: self.now_us)
        self.redis = redis
        self.sequences = {"w1": 0, "w2": 0}
        self.last_us = 0
        self.calls = 0
        self.woken: list[str] = []
        for worker in self.sequences:
            self.memory.listen(["0"], worker, self.woken.append)
        self.plain = Redis.from_url(server_url, decode_responses=True)
        self.channel = self.plain.pubsub(ignore_subscribe_messages=True)
        self.channel.psubscribe("sg:{d:0}:wake:*")
        self.channel.get_message(timeout=5)

    def close(self) -> None:
        """The wake-ups of the whole example, in order."""
        self.plain.publish("sg:{d:0}:wake:end", "end")
        heard = []
        while not heard or heard[-1] != "end":
            message = self.channel.get_message(timeout=5)
            if message is not None:
                heard.append(message["data"])
        self.channel.close()
        self.plain.close()
        assert heard[:-1] == self.woken

    async def ask(self, name: str, *arguments: Any) -> Any:
        expected = await getattr(self.memory, name)(*arguments)
        self.redis.fake_time_us = self.now_us
        assert await getattr(self.redis, name)(*arguments) == expected
        self.calls += 1
        return expected

    def charged_at(self, bound: BoundLimit, back: int) -> int:
        """The window cell, or the time of a lease's grant, that lies so far back."""
        if bound.limit.algorithm is Algorithm.LEASES:
            return self.last_us - back * 10_000
        return cell_at(self.last_us, bound.period_us) - back

    async def do(self, step: Step, shapes: list[list[BoundLimit]], quotas: list[BoundLimit]) -> None:
        self.now_us = max(0, self.now_us + step.after_us)
        self.last_us = max(self.last_us, self.now_us)
        versions = [shapes[i] for i in step.which if i < len(shapes)]
        bounds = [version[min(step.version, len(version) - 1)] for version in versions]
        await getattr(self, f"do_{step.call}")(step, bounds, quotas)

    async def do_peek(self, _: Step, bounds: list[BoundLimit], quotas: list[BoundLimit]) -> None:
        await self.ask("peek", [*bounds, *quotas])

    async def do_beat(self, step: Step, *_: Any) -> None:
        await self.ask("beat", "0", step.worker)

    async def do_cancel(self, step: Step, *_: Any) -> None:
        await self.ask("cancel", "0", step.asker.request_id)

    async def do_forget(self, *_: Any) -> None:
        self.memory.forget()
        self.plain.flushdb()

    async def do_account(self, step: Step, *_: Any) -> None:
        key = domain_key("0", "account", str(step.version))
        found = step.account
        self.memory.state().accounts[key] = Account(*astuple(found))
        state = {"d": int(found.is_disabled), "c": found.cooling_until_us, "o": found.open_until_us}
        state |= {"h": int(found.is_half_open), "tr": found.trial, "tu": found.trial_until_us}
        self.plain.hset(key, mapping=state)
        self.plain.expire(key, 60)

    async def do_restore(self, step: Step, bounds: list[BoundLimit], _: Any) -> None:
        numbers = zip(bounds, step.numbers, step.cells_back, strict=False)
        sights = [Sight(bound, concrete(number, bound), self.last_us - back * 100_000) for bound, number, back in numbers]
        await self.ask("restore", "0", sights)

    async def do_admit(self, step: Step, bounds: list[BoundLimit], quotas: list[BoundLimit]) -> None:
        numbers = [abs(concrete(number, bound)) for bound, number in zip(bounds, step.numbers, strict=False)]
        demands = [Demand(bound, number) for bound, number in zip(bounds, numbers, strict=True)]
        candidates = []
        for account, which in enumerate(step.accounts):
            asked = [quotas[i] for i in which if i < len(quotas)]
            asks = tuple(Demand(bound, abs(concrete(number, bound))) for bound, number in zip(asked, step.numbers, strict=False))
            candidates.append(Candidate(domain_key("0", "account", str(account)), asks))
        pool = Pool(domain_key("0", "pool", "p"), tuple(candidates)) if candidates else NO_POOL
        await self.ask("admit", demands, step.asker, pool)

    async def do_settle(self, step: Step, bounds: list[BoundLimit], quotas: list[BoundLimit]) -> None:
        self.sequences[step.worker] = max(1, self.sequences[step.worker] + step.sequence_step)
        corrections = [
            Correction(bound, self.charged_at(bound, back), concrete(number, bound), step.asker.request_id)
            for bound, number, back in zip([*bounds, *quotas], step.numbers, step.cells_back, strict=False)
        ]
        await self.ask("settle", "0", step.worker, self.sequences[step.worker], corrections + corrections[:1])


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(shapes=shapes(), quotas=quotas(), steps=st.lists(calls, min_size=1, max_size=40))
def test_every_reply_is_that_of_the_memory_store(server_url: str, runner: asyncio.Runner, shapes, quotas, steps):
    """Any sequence of calls gets the replies of the Python twin, and leaves no key without expiry or hash tag (A03, A18)."""

    async def example() -> None:
        redis = RedisStore(server_url, Clock())
        try:
            twins = Twins(redis, server_url)
            for step in steps:
                await twins.do(step, shapes, quotas)
            await twins.ask("peek", [bound for versions in shapes for bound in versions])
            twins.close()
        finally:
            await redis.close()

    with Redis.from_url(server_url, decode_responses=True) as client:
        client.flushdb()
        runner.run(example())
        for key in client.scan_iter():
            assert client.pttl(key) > 0, key
            assert "{d:0}" in key


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    period_s=st.sampled_from(list(PERIODS_S.values())),
    algorithm=st.sampled_from(COUNTING),
)
def test_twins_agree_on_a_busy_limit(server_url: str, runner: asyncio.Runner, data, period_s, algorithm):
    """A limit that is used at its brink for many periods, with refunds and debts, gets the same replies from both."""
    bound = data.draw(limits(algorithm, period_s))
    ticks = data.draw(st.lists(st.tuples(st.integers(0, 2 * CELLS), st.integers(-40, 60)), min_size=20, max_size=60))

    async def example() -> None:
        redis = RedisStore(server_url, Clock())
        try:
            twins = Twins(redis, server_url)
            for number, (twelfths_of_cells, percent) in enumerate(ticks, start=1):
                twins.now_us += twelfths_of_cells * period_s * 1_000_000 // 1440
                share = bound.limit.capacity * abs(percent) // 100
                if percent >= 0:
                    await twins.ask("admit", [Demand(bound, share)])
                else:
                    cell = cell_at(twins.now_us, bound.period_us) - abs(percent)
                    await twins.ask("settle", "0", "w", number, [Correction(bound, cell, share if number % 3 else -share)])
            twins.close()
        finally:
            await redis.close()

    with Redis.from_url(server_url) as client:
        client.flushdb()
    runner.run(example())
