"""What every store promises, by worked examples: the same on memory, the embedded Valkey, and another server."""

from __future__ import annotations

import pytest

from proxy.limits.model import Algorithm, Applicant, Correction, Demand, Level, Limit, Rate, Unit, bind
from proxy.limits.sliding_window import CELLS

SECOND_US = 1_000_000
BUCKET, WINDOW = Algorithm.TOKEN_BUCKET, Algorithm.SLIDING_WINDOW


def bound(algorithm=BUCKET, rate="60/min", burst=None, name="l", owner="tenant:a"):
    return bind(owner, Limit(name, Unit.TOKENS, Rate.parse(rate), algorithm, burst))


async def ask(timed, *pairs):
    return await timed.store.admit([Demand(limit, cost) for limit, cost in pairs])


async def remaining(timed, *bounds):
    return [level.remaining for level in await timed.store.peek(bounds)]


async def test_first_refusal_names_its_wait(timed):
    """Ten of ten pass at once, the eleventh is told the second that one unit takes."""
    limit = bound(rate="60/min", burst=10)
    assert (await ask(timed, (limit, 10))).levels == (Level(0, 10 * SECOND_US),)
    refused = await ask(timed, (limit, 1))
    assert not refused.granted
    assert (refused.refused, refused.wait_us, refused.cells) == (0, SECOND_US + 1, ())


async def test_one_refusing_limit_leaves_the_others_uncharged(timed):
    """All limits of a request are charged, or none."""
    wide, narrow = bound(name="wide", rate="100/min"), bound(WINDOW, name="narrow", rate="5/min")
    assert (await ask(timed, (wide, 5), (narrow, 5))).granted
    refused = await ask(timed, (wide, 5), (narrow, 1))
    assert refused.refused == 1
    assert await remaining(timed, wide, narrow) == [95, 0]


async def test_longest_wait_names_the_refuser(timed):
    """Of two refusing limits the one that must be waited for longest is named."""
    slow, fast = bound(name="slow", rate="60/hour"), bound(name="fast", rate="60/s")
    assert (await ask(timed, (fast, 60), (slow, 60))).granted
    refused = await ask(timed, (fast, 1), (slow, 1))
    assert (refused.refused, refused.wait_us) == (1, 60 * SECOND_US + 1)


@pytest.mark.parametrize("algorithm", [BUCKET, WINDOW])
async def test_larger_than_the_capacity_is_never(timed, algorithm):
    """A cost above the whole capacity is too large, whatever another limit would say."""
    full, small = bound(name="full", rate="1/min"), bound(algorithm, name="small", rate="5/min")
    await ask(timed, (full, 1))
    refused = await ask(timed, (full, 1), (small, 6))
    assert refused.is_too_large
    assert refused.refused == 1


@pytest.mark.parametrize("algorithm", [BUCKET, WINDOW])
async def test_capacity_of_zero_blocks(timed, algorithm):
    """A limit of 0 admits nothing that costs, and never will (A29)."""
    assert (await ask(timed, (bound(algorithm, rate="0/min"), 1))).is_too_large


@pytest.mark.parametrize("algorithm", [BUCKET, WINDOW])
async def test_refusals_cost_nothing(timed, algorithm):
    """Hundred refused requests change neither what is left nor when it comes back (A15)."""
    limit = bound(algorithm, rate="5/min")
    await ask(timed, (limit, 5))
    before = await timed.store.peek([limit])
    for _ in range(100):
        assert not (await ask(timed, (limit, 1))).granted
    assert await timed.store.peek([limit]) == before


@pytest.mark.parametrize("algorithm", [BUCKET, WINDOW])
async def test_peek_changes_nothing(timed, algorithm):
    """Looking at limits, used or not, leaves them as they are."""
    used, unused = bound(algorithm, name="used"), bound(algorithm, name="unused")
    await ask(timed, (used, 7))
    timed.advance(3 * SECOND_US)
    first = await timed.store.peek([used, unused])
    assert await timed.store.peek([used, unused]) == first
    assert await timed.store.peek([]) == ()


async def test_settle_applies_once_however_often_it_is_sent(timed):
    """A repeated or older number changes nothing and is answered by the last one applied."""
    limit = bound(burst=100)
    await ask(timed, (limit, 50))
    give_back = [Correction(limit, 0, -10)]
    replies = [await timed.store.settle("0", "w", number, give_back) for number in (1, 1, 2, 1, 2)]
    assert [reply.sequence for reply in replies] == [1, 1, 2, 2, 2]
    assert await remaining(timed, limit) == [70]


async def test_workers_number_their_settles_apart(timed):
    """One worker's numbers say nothing of another's."""
    limit = bound(burst=100)
    await ask(timed, (limit, 50))
    assert (await timed.store.settle("0", "w1", 5, [Correction(limit, 0, -10)])).sequence == 5
    assert (await timed.store.settle("0", "w2", 1, [Correction(limit, 0, -10)])).sequence == 1
    assert await remaining(timed, limit) == [70]


async def test_gap_in_the_numbers_applies(timed):
    """A number further on than the next one applies: the store has lost its memory, not the worker its order."""
    limit = bound(burst=100)
    await ask(timed, (limit, 50))
    assert (await timed.store.settle("0", "w", 9, [Correction(limit, 0, -10)])).sequence == 9
    assert await remaining(timed, limit) == [60]


async def test_settle_number_zero_is_old(timed):
    """Numbers begin with 1, so 0 is as good as applied."""
    assert (await timed.store.settle("0", "w", 0, [Correction(bound(), 0, 5)])).sequence == 0


@pytest.mark.parametrize("algorithm", [BUCKET, WINDOW])
async def test_debt_is_carried_until_refilled(timed, algorithm):
    """A settle never refuses: what was used beyond the limit must be paid off before the next request."""
    limit = bound(algorithm, rate="60/min")
    admission = await ask(timed, (limit, 60))
    await timed.store.settle("0", "w", 1, [Correction(limit, admission.cells[0], 60)])
    assert await remaining(timed, limit) == [-60]
    wait_us = (await ask(timed, (limit, 1))).wait_us
    timed.advance(wait_us)
    assert (await ask(timed, (limit, 1))).granted


@pytest.mark.parametrize("algorithm", [BUCKET, WINDOW])
async def test_what_costs_nothing_passes_in_debt(timed, algorithm):
    """A request that uses none of a unit is not refused for the debt of others."""
    limit = bound(algorithm, rate="60/min")
    granted = await ask(timed, (limit, 60))
    await timed.store.settle("0", "w", 1, [Correction(limit, granted.cells[0], 100)])
    assert not (await ask(timed, (limit, 1))).granted
    assert (await ask(timed, (limit, 0))).granted


@pytest.mark.parametrize("algorithm", [BUCKET, WINDOW])
async def test_shadow_limit_counts_and_never_refuses(timed, algorithm):
    """A limit in shadow mode is charged beyond its capacity, says what it would have done, and leaves the verdict to others."""
    shadow = bind("tenant:a", Limit("s", Unit.TOKENS, Rate.parse("60/min"), algorithm, is_shadow=True))
    real = bound(name="real", rate="1000/min")
    first = await ask(timed, (shadow, 50), (real, 50))
    assert (first.granted, first.waits) == (True, (0, 0))
    second = await ask(timed, (shadow, 50), (real, 50))
    assert second.granted
    assert second.waits[0] > 0
    assert await remaining(timed, shadow, real) == [-40, 900]
    assert (await ask(timed, (shadow, 61), (real, 1))).waits == (-1, 0)
    refused = await ask(timed, (shadow, 1), (real, 900))
    assert (refused.granted, refused.refused) == (False, 1)
    assert await remaining(timed, shadow) == [-101]


async def test_bucket_refund_stops_at_the_capacity(timed):
    """Giving back more than is missing fills the bucket and no more."""
    limit = bound(burst=10)
    await ask(timed, (limit, 5))
    await timed.store.settle("0", "w", 1, [Correction(limit, 0, -100)])
    assert await remaining(timed, limit) == [10]


async def test_window_refund_stops_at_what_the_cell_holds(timed):
    """Giving back more than was charged to a cell takes nothing from other cells."""
    limit = bound(WINDOW, rate="60/min")
    first = await ask(timed, (limit, 5))
    timed.advance(SECOND_US)
    await ask(timed, (limit, 7))
    await timed.store.settle("0", "w", 1, [Correction(limit, first.cells[0], -100)])
    assert await remaining(timed, limit) == [53]


@pytest.mark.parametrize(("cells_later", "left"), [(CELLS - 1, 57), (CELLS, 57)])
async def test_window_refund_of_a_cell_that_left_goes_nowhere(timed, cells_later, left):
    """A refund reaches its cell while that is in the ring; once it left, the refund must not hit the cell in its place."""
    limit = bound(WINDOW, rate="60/min")
    first = await ask(timed, (limit, 3))
    timed.advance(cells_later * SECOND_US // 2)
    second = await ask(timed, (limit, 3))
    assert second.cells[0] - first.cells[0] == cells_later
    await timed.store.settle("0", "w", 1, [Correction(limit, first.cells[0], -3)])
    assert await remaining(timed, limit) == [left]


async def test_time_that_runs_backwards_stands_still(timed):
    """When the server's clock steps back nothing refills and nothing is forgotten."""
    bucket, window = bound(name="b", burst=10), bound(WINDOW, name="w", rate="10/min")
    timed.advance(3600 * SECOND_US)
    later = await ask(timed, (bucket, 10), (window, 10))
    timed.advance(-1800 * SECOND_US)
    refused = await ask(timed, (bucket, 1), (window, 1))
    assert refused.now_us == later.now_us
    assert not refused.granted
    assert await remaining(timed, bucket, window) == [0, 0]


@pytest.mark.parametrize(("rate", "burst"), [("1000/min", None), ("5/min", None)])
@pytest.mark.parametrize("algorithm", [BUCKET, WINDOW])
async def test_changed_amount_keeps_the_use(timed, algorithm, rate, burst):
    """After a change of the amount what was used still counts, and never leaves more than the new capacity."""
    before, after = bound(algorithm, rate="100/min"), bound(algorithm, rate=rate, burst=burst)
    await ask(timed, (before, 50))
    left = (await remaining(timed, after))[0]
    assert left <= after.limit.capacity
    assert left == (after.limit.capacity - 50 if algorithm is WINDOW else min(50, after.limit.capacity))
    assert (await ask(timed, (after, 1))).granted is (left > 0)


async def test_limits_of_different_owners_do_not_meet(timed):
    """Owners and names that are prefixes of each other or hold separators keep their own levels (A21)."""
    pairs = [("tenant:a", "b:c"), ("tenant:a:b", "c"), ("tenant:a", "b"), ("tenant:a%3Ab", "c"), ("tenant:a{b}", "c")]
    bounds = [bound(owner=owner, name=name, burst=10) for owner, name in pairs]
    for used, limit in enumerate(bounds):
        await ask(timed, (limit, used))
    assert await remaining(timed, *bounds) == [10, 9, 8, 7, 6]


async def test_times_beyond_reason_stay_in_bounds(timed):
    """A debt that takes longer than 31 years to refill is shown as 31 years, not as a wrapped number."""
    limit = bound(rate="1/day", burst=10**12)
    await timed.store.settle("0", "w", 1, [Correction(limit, 0, 10**13)])
    level = (await timed.store.peek([limit]))[0]
    assert (level.remaining, level.reset_us) == (10**12 - 10**13, 10**15)
    assert (await ask(timed, (limit, 1))).wait_us == 10**15


def parallel(maximum=3, name="parallel"):
    return bind("tenant:a", Limit(name, Unit.CONCURRENCY, None, Algorithm.LEASES, maximum=maximum))


async def hold(timed, limit, request_id):
    return await timed.store.admit([Demand(limit, 1)], Applicant(request_id))


async def test_leases_bound_what_runs_at_once(timed):
    """Three of three may run; a fourth is told an estimate of when one ends, from how long others took (A22)."""
    limit = parallel()
    grants = [await hold(timed, limit, f"r{i}") for i in range(3)]
    assert all(grant.granted for grant in grants)
    refused = await hold(timed, limit, "r3")
    assert (refused.granted, refused.levels[0].remaining) == (False, 0)
    assert refused.wait_us == -(-SECOND_US // 3)
    timed.advance(6 * SECOND_US)
    await timed.store.settle("0", "w", 1, [Correction(limit, grants[0].cells[0], -1, "r0")])
    assert (await hold(timed, limit, "r3")).granted
    assert (await hold(timed, limit, "r4")).wait_us == 2 * SECOND_US


async def test_lease_lapses_unless_it_is_renewed(timed):
    """A worker that was killed holds its slots for 15 s and no longer; a renewal counts from when it comes (A22)."""
    limit = parallel(2)
    dead, alive = await hold(timed, limit, "dead"), await hold(timed, limit, "alive")
    timed.advance(10 * SECOND_US)
    await timed.store.settle("0", "w", 1, [Correction(limit, alive.cells[0], 0, "alive")])
    timed.advance(5 * SECOND_US - 1)
    assert await remaining(timed, limit) == [0]
    timed.advance(1)
    assert await remaining(timed, limit) == [1]
    assert dead.granted
    timed.advance(10 * SECOND_US)
    assert await remaining(timed, limit) == [2]


async def test_ended_lease_is_ended_once(timed):
    """Ending a lease that is not held any more changes nothing."""
    limit = parallel(2)
    grant = await hold(timed, limit, "a")
    await hold(timed, limit, "b")
    for number in (1, 2):
        await timed.store.settle("0", "w", number, [Correction(limit, grant.cells[0], -1, "a")])
    assert await remaining(timed, limit) == [1]
