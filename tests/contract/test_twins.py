"""The Lua scripts against their Python twin: the same calls at the same times must give the same replies."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis import Redis

from proxy.clock import Clock
from proxy.limits.memory import MemoryStore
from proxy.limits.model import MAX_AMOUNT, PERIODS_S, Algorithm, BoundLimit, Correction, Demand, Limit, Rate, Unit, bind
from proxy.limits.redis import RedisStore
from proxy.limits.sliding_window import CELLS, cell_at

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
    is_shadow = draw(st.sampled_from([False, False, True]))
    if algorithm is Algorithm.LEASES:
        maximum = draw(st.integers(0, 4))
        return bind("tenant:a:{b}", Limit("l", Unit.CONCURRENCY, None, algorithm, is_shadow=is_shadow, maximum=maximum))
    burst = draw(st.one_of(st.none(), amounts)) if algorithm is Algorithm.TOKEN_BUCKET else None
    return bind("tenant:a:{b}", Limit("l", Unit.TOKENS, Rate(draw(amounts), period_s), algorithm, burst, is_shadow=is_shadow))


@st.composite
def shapes(draw: st.DrawFn) -> list[list[BoundLimit]]:
    """One to four limits; each in one or two versions, as before and after a change of the configuration."""
    every_shape = [(algorithm, period_s) for algorithm in COUNTING for period_s in PERIODS_S.values()]
    every_shape += [(Algorithm.LEASES, 15)] * 3
    chosen = draw(st.lists(st.sampled_from(every_shape), min_size=1, max_size=4, unique=True))
    return [draw(st.lists(limits(*shape), min_size=1, max_size=2)) for shape in chosen]


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


calls = st.builds(
    Step,
    after_us=steps_us,
    call=st.sampled_from(["admit", "admit", "admit", "settle", "settle", "peek"]),
    version=st.integers(0, 1),
    which=st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True).map(tuple),
    numbers=st.tuples(costs, costs, costs, costs) | st.tuples(deltas, deltas, deltas, deltas),
    worker=st.sampled_from(["w1", "w2"]),
    sequence_step=st.sampled_from([1, 1, 1, 1, 0, -1, 2, 7]),
    cells_back=st.tuples(*[st.sampled_from([0, 0, 1, 2, 60, 119, 120, 121, 122, 123, 500, -1, -3])] * 4),
)


def concrete(number: float, bound: BoundLimit) -> int:
    """A fraction means that part of the limit's capacity."""
    return number if isinstance(number, int) and abs(number) > 3 else int(number * bound.limit.capacity) or int(number)


class Twins:
    """Both stores on one clock. Every call goes to both, and the replies must be equal."""

    def __init__(self, redis: RedisStore) -> None:
        self.now_us = START_US
        self.memory = MemoryStore(lambda: self.now_us)
        self.redis = redis
        self.sequences = {"w1": 0, "w2": 0}
        self.last_us = 0

    async def ask(self, name: str, *arguments: Any) -> None:
        expected = await getattr(self.memory, name)(*arguments)
        self.redis.fake_time_us = self.now_us
        assert await getattr(self.redis, name)(*arguments) == expected

    def request_id(self, step: Step) -> str:
        """One of a few, so that leases are taken, renewed and ended by the same."""
        return f"r{step.which[0]}{step.sequence_step % 2}"

    def charged_at(self, bound: BoundLimit, back: int) -> int:
        """The window cell, or the time of a lease's grant, that lies so far back."""
        if bound.limit.algorithm is Algorithm.LEASES:
            return self.last_us - back * 10_000
        return cell_at(self.last_us, bound.period_us) - back

    async def do(self, step: Step, shapes: list[list[BoundLimit]]) -> None:
        self.now_us = max(0, self.now_us + step.after_us)
        self.last_us = max(self.last_us, self.now_us)
        versions = [shapes[i] for i in step.which if i < len(shapes)]
        bounds = [version[min(step.version, len(version) - 1)] for version in versions]
        if step.call == "peek":
            await self.ask("peek", bounds)
        elif step.call == "admit":
            numbers = zip(bounds, step.numbers, strict=False)
            demands = [Demand(bound, abs(concrete(number, bound))) for bound, number in numbers]
            await self.ask("admit", demands, self.request_id(step))
        else:
            self.sequences[step.worker] = max(1, self.sequences[step.worker] + step.sequence_step)
            corrections = [
                Correction(bound, self.charged_at(bound, back), concrete(number, bound), self.request_id(step))
                for bound, number, back in zip(bounds, step.numbers, step.cells_back, strict=False)
            ]
            await self.ask("settle", step.worker, self.sequences[step.worker], corrections + corrections[:1])


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(shapes=shapes(), steps=st.lists(calls, min_size=1, max_size=30))
def test_every_reply_is_that_of_the_memory_store(server_url: str, runner: asyncio.Runner, shapes, steps):
    """Any sequence of calls gets the replies of the Python twin, and leaves no key without expiry or hash tag (A03, A18)."""

    async def example() -> None:
        redis = RedisStore(server_url, Clock())
        try:
            twins = Twins(redis)
            for step in steps:
                await twins.do(step, shapes)
            await twins.ask("peek", [bound for versions in shapes for bound in versions])
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
            twins = Twins(redis)
            for number, (twelfths_of_cells, percent) in enumerate(ticks, start=1):
                twins.now_us += twelfths_of_cells * period_s * 1_000_000 // 1440
                share = bound.limit.capacity * abs(percent) // 100
                if percent >= 0:
                    await twins.ask("admit", [Demand(bound, share)])
                else:
                    cell = cell_at(twins.now_us, bound.period_us) - abs(percent)
                    await twins.ask("settle", "w", number, [Correction(bound, cell, share if number % 3 else -share)])
        finally:
            await redis.close()

    with Redis.from_url(server_url) as client:
        client.flushdb()
    runner.run(example())
