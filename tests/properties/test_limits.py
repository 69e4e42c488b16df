"""What limits promise for any traffic: bounds over every interval, honest waits, refusals for nothing, settles once."""

from __future__ import annotations

import asyncio
import random
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.limits import admission
from proxy.limits.costs import Ask
from proxy.limits.limiter import Limiter
from proxy.limits.memory import MemoryStore
from proxy.limits.model import PERIODS_S, Algorithm, Correction, Demand, Limit, Rate, Spent, Unit, bind
from tests.fakes import FakeClock


def spent(tokens):
    """That many tokens in all, half of them output; None: as reserved."""
    return None if tokens is None else Spent(tokens - tokens // 2, tokens // 2, tokens)


START_US = 1_700_000_000_123_456
SECOND_US = 1_000_000
BUCKET, WINDOW = Algorithm.TOKEN_BUCKET, Algorithm.SLIDING_WINDOW

periods_s = st.sampled_from(list(PERIODS_S.values()))
capacities = st.integers(1, 50) | st.sampled_from([1000, 300_000])


def bound(algorithm, amount, period_s=60, burst=None):
    return bind("tenant:a", Limit("l", Unit.TOKENS, Rate(amount, period_s), algorithm, burst))


def admit(state, limit, cost, now_us):
    return admission.admit(state, [Demand(limit, cost)], now_us)


# traffic: steps in parts of a period, costs in parts of the capacity, and what became of each admitted request
traffic = st.lists(
    st.tuples(
        st.sampled_from([0, 0, 1, 5, 9, 40, 120, 240, 700, 1440]) | st.integers(0, 1500),
        st.sampled_from([1, 2, 5, 10, 33, 50, 100]),
    ),
    min_size=1,
    max_size=60,
)


def part(limit, percent):
    return max(1, limit.limit.capacity * percent // 100)


def most_in_any_interval(charges, length_us):
    """The largest sum of charges (time, cost) whose times lie within ``length_us``, end excluded, wherever that begins."""
    sums = [0, *accumulate(cost for _, cost in charges)]
    most, first = 0, 0
    for last, (time_us, _) in enumerate(charges):
        while charges[first][0] <= time_us - length_us:
            first += 1
        most = max(most, *(sums[last + 1] - sums[begin] for begin in range(first, last + 1)))
    return most


@given(amount=capacities, period_s=periods_s, burst=st.none() | capacities, traffic=traffic)
def test_bucket_admits_at_most_burst_and_refill(amount, period_s, burst, traffic):
    """In every interval of length T a bucket lets through no more than burst + rate x T."""
    limit, state, now_us, charges = bound(BUCKET, amount, period_s, burst), admission.State(), START_US, []
    for step, percent in traffic:
        now_us += step * limit.period_us // 1440
        cost = part(limit, percent)
        if admit(state, limit, cost, now_us).granted:
            charges.append((now_us, cost))
    for first, (begin_us, _) in enumerate(charges):
        total = 0
        for end_us, cost in charges[first:]:
            total += cost
            assert total <= limit.limit.capacity + amount / limit.period_us * (end_us - begin_us) + 1e-5


@settings(max_examples=200)
@given(amount=capacities, period_s=periods_s, traffic=traffic)
def test_window_admits_at_most_the_limit_in_any_window(amount, period_s, traffic):
    """No window of the period holds more than the limit, wherever it starts."""
    limit, state, now_us, charges = bound(WINDOW, amount, period_s), admission.State(), START_US, []
    for step, percent in traffic:
        now_us += step * limit.period_us // 1440
        cost = part(limit, percent)
        if admit(state, limit, cost, now_us).granted:
            charges.append((now_us, cost))
    assert most_in_any_interval(charges, limit.period_us) <= amount


@settings(max_examples=200)
@given(amount=capacities, period_s=periods_s, traffic=traffic, data=st.data())
def test_window_holds_with_settles(amount, period_s, traffic, data):
    """At the moment of each grant the use still standing in the last period, refunds and later charges in, is within the limit."""
    limit, state, now_us = bound(WINDOW, amount, period_s), admission.State(), START_US
    booked: list[list[int]] = []  # [booking time, amount still standing]
    open_grants: list[tuple[int, int, int]] = []  # (index into booked, cell, cost)
    for number, (step, percent) in enumerate(traffic, start=1):
        now_us += step * limit.period_us // 1440
        cost = part(limit, percent)
        granted = admit(state, limit, cost, now_us)
        if granted.granted:
            booked.append([now_us, cost])
            open_grants.append((len(booked) - 1, granted.cells[0], cost))
            assert sum(left for time_us, left in booked if time_us > now_us - limit.period_us) <= amount
        if open_grants and data.draw(st.booleans()):
            index, cell, cost = open_grants.pop(data.draw(st.integers(0, len(open_grants) - 1)))
            used = data.draw(st.integers(0, 2 * cost))
            admission.settle(state, "w", number, [Correction(limit, cell, used - cost)], now_us)
            if used > cost:
                booked.append([now_us, used - cost])
            else:
                booked[index][1] = used


@settings(max_examples=200)
@given(
    algorithm=st.sampled_from([BUCKET, WINDOW]), amount=capacities, period_s=periods_s, traffic=traffic, percent=st.integers(1, 100)
)
def test_wait_is_honest(algorithm, amount, period_s, traffic, percent):
    """Who waits exactly as told is admitted; a bucket's wait is not noticeably longer than needed (A12)."""
    limit, state, now_us = bound(algorithm, amount, period_s), admission.State(), START_US
    for step, share in traffic:
        now_us += step * limit.period_us // 1440
        admit(state, limit, part(limit, share), now_us)
    cost = part(limit, percent)
    state.refused.clear()  # alone: nobody else was told to come back
    refused = admit(state, limit, cost, now_us)
    if refused.granted:
        return
    assert refused.wait_us > 0
    assert refused.wait_us == refused.waits[0]
    slack_us = 2e-6 * limit.period_us / amount + 3
    if algorithm is BUCKET and refused.wait_us > slack_us:
        assert not admit(state, limit, cost, now_us + int(refused.wait_us - slack_us)).granted
    assert admit(state, limit, cost, now_us + refused.wait_us).granted


@pytest.mark.parametrize("algorithm", [BUCKET, WINDOW])
@pytest.mark.parametrize("rate", ["5/min", "7/s", "60/min", "1000/hour", "3/day"])
def test_wait_is_honest_at_any_phase(algorithm, rate):
    """Fifty exhaustions at random phases, each retried after exactly the wait, all succeed (A12)."""
    parsed, chance, now_us = Rate.parse(rate), random.Random(12), START_US  # noqa: S311  (phases, not secrets)
    limit, state = bound(algorithm, parsed.amount, parsed.period_s), admission.State()
    for _ in range(50):
        while (admission_now := admit(state, limit, 1, now_us)).granted:
            now_us += chance.randrange(1 + limit.period_us // (20 * parsed.amount))
        now_us += admission_now.wait_us
        assert admit(state, limit, 1, now_us).granted
        now_us += chance.randrange(limit.period_us)


@pytest.mark.parametrize("algorithm", [BUCKET, WINDOW])
def test_polling_does_not_extend_the_lock_out(algorithm):
    """Five used, then one try a second: a bucket gives one every 12 s, a window all five again after 61 s (A15)."""
    limit, state = bound(algorithm, 5), admission.State()
    assert all(admit(state, limit, 1, START_US).granted for _ in range(5))
    granted = [second for second in range(1, 121) if admit(state, limit, 1, START_US + second * SECOND_US).granted]
    expected = [12, 24, 36, 48, 60, 72, 84, 96, 108, 120] if algorithm is BUCKET else [61, 62, 63, 64, 65]
    assert [round(second) for second in granted] == expected


def test_no_double_burst_across_the_minute():
    """Sixty at second 59.5 leave nothing for second 60.5, and come back when they are a window old (A04)."""
    limit, state, minute_us = bound(WINDOW, 60), admission.State(), START_US // (60 * SECOND_US) * 60 * SECOND_US
    assert all(admit(state, limit, 1, minute_us + 59_500_000).granted for _ in range(60))
    assert not any(admit(state, limit, 1, minute_us + 60_500_000).granted for _ in range(60))
    assert not admit(state, limit, 1, minute_us + 119_499_999).granted
    assert sum(admit(state, limit, 1, minute_us + 120_500_001).granted for _ in range(100)) == 60


def test_bucket_bursts_twice_only_by_its_refill():
    """A bucket of sixty lets the refill of one second through after a burst, no second burst (A04)."""
    limit, state = bound(BUCKET, 60), admission.State()
    assert all(admit(state, limit, 1, START_US).granted for _ in range(60))
    assert sum(admit(state, limit, 1, START_US + SECOND_US).granted for _ in range(60)) == 1


@pytest.mark.parametrize(("rate", "least"), [("10000/min", 0.98), ("120/min", 0.98), ("1000/s", 0.98)])
def test_window_can_be_used_to_120_of_122(rate, least):
    """At a steady pace somewhat above it a window gives at least 98 % of its rate."""
    parsed = Rate.parse(rate)
    limit, state = bound(WINDOW, parsed.amount, parsed.period_s), admission.State()
    steps = 8 * parsed.amount
    granted = sum(admit(state, limit, 1, START_US + n * limit.period_us // (2 * parsed.amount)).granted for n in range(steps))
    assert granted <= 5 * parsed.amount
    assert granted / (4 * parsed.amount) >= least


settlements = st.lists(st.tuples(st.integers(0, 80), st.booleans(), st.integers(1, 3)), min_size=1, max_size=15)


@settings(max_examples=60)
@given(settlements=settlements)
def test_reservations_settle_exactly_once(settlements):
    """However often each reservation is settled, only its first settle counts, and the sums come out even."""
    clock = FakeClock()
    tokens = bound(BUCKET, 0, burst=10_000)
    requests = bind("tenant:a", Limit("r", Unit.REQUESTS, Rate(1000, 86400), WINDOW))

    async def story() -> tuple[int, int]:
        store = MemoryStore(clock.time_us)
        limiter = Limiter(store, "w", clock)
        bookings = []
        for used, is_kept, times in settlements:
            reservation = await limiter.reserve([tokens, requests], Ask(10, 30, is_completion_stated=True))
            bookings.append(reservation.settle(spent(used), is_request_kept=is_kept))
            bookings += [reservation.settle(spent(used + 1000), is_request_kept=not is_kept) for _ in range(times - 1)]
        await asyncio.gather(*(booking for booking in bookings if booking))
        await limiter.close()
        left = await store.peek([tokens, requests])
        return left[0].remaining, left[1].remaining

    expected = (10_000 - sum(used for used, _, _ in settlements), 1000 - sum(is_kept for _, is_kept, _ in settlements))
    assert asyncio.run(story()) == expected
