"""The limiter: costs, decisions, and settles that reach the store exactly once whatever the store does meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from proxy.errors import StoreUnavailable
from proxy.limits import limiter as limiter_module
from proxy.limits import reservations, settling
from proxy.limits.costs import Ask, cost_of
from proxy.limits.decisions import go_duration, tightest
from proxy.limits.limiter import Limiter
from proxy.limits.memory import MemoryStore
from proxy.limits.model import ANYONE, NO_POOL, Algorithm, Decision, Limit, Rate, Spent, Unit, bind
from proxy.limits.reservations import Refusal, Reservation, settled
from tests.fakes import FakeClock


def spent(tokens):
    """That many tokens in all, half of them output; None: as reserved."""
    return None if tokens is None else Spent(tokens - tokens // 2, tokens // 2, tokens)


ASK = Ask(10, 30, is_completion_stated=True)


def bound(unit=Unit.TOKENS, rate="100/day", algorithm=Algorithm.TOKEN_BUCKET, burst=None, name=None):
    return bind("tenant:a", Limit(name or unit.value, unit, Rate.parse(rate), algorithm, burst))


TOKENS = bound()
REQUESTS = bound(Unit.REQUESTS, "10/day", Algorithm.SLIDING_WINDOW)


class FlakyStore(MemoryStore):
    """Fails as told: ``silent`` settles have no effect, ``deaf`` ones apply but their reply is lost."""

    def __init__(self) -> None:
        super().__init__(FakeClock().time_us)
        self.silent = 0
        self.deaf = 0
        self.sent: list[tuple[int, int]] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def admit(self, demands, applicant=ANYONE, pool=NO_POOL):
        await self.gate.wait()
        return await super().admit(demands, applicant, pool)

    async def settle(self, domain, worker, sequence, corrections):
        self.sent.append((sequence, len(corrections)))
        await self.gate.wait()
        if self.silent:
            self.silent -= 1
            raise StoreUnavailable("no answer")
        reply = await super().settle(domain, worker, sequence, corrections)
        if self.deaf:
            self.deaf -= 1
            raise StoreUnavailable("no answer")
        return reply


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr(settling, "_RESEND_S", 0)
    return FlakyStore()


@pytest.fixture
async def limiter(store):
    limiter = Limiter(store, "w", FakeClock())
    yield limiter
    await limiter.close()


async def left(store, *bounds):
    return [level.remaining for level in await store.peek(bounds or [TOKENS, REQUESTS])]


# what a request costs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "ask", "cost"),
    [
        (REQUESTS, ASK, 1),
        (TOKENS, ASK, 40),
        (TOKENS, Ask(90, 256, is_completion_stated=False), 100),
        (TOKENS, Ask(100, 256, is_completion_stated=False), 100),
        (TOKENS, Ask(101, 256, is_completion_stated=False), 101),
        (TOKENS, Ask(10, 256, is_completion_stated=True), 266),
        (TOKENS, Ask(0, 0, is_completion_stated=True), 0),
        (bound(rate="0/min"), Ask(1, 256, is_completion_stated=False), 1),
        (bound(rate="100/day", burst=50), Ask(10, 256, is_completion_stated=False), 50),
    ],
)
def test_cost(limit, ask, cost):
    """A guessed completion is clamped to the capacity; what the client states is not (A11)."""
    assert cost_of(limit, ask) == cost


# reserving --------------------------------------------------------------------------------------------------------------


async def test_no_limits_is_no_store_call(store, limiter):
    """Without limits everything is admitted, and nothing is left to settle (A29)."""
    store.gate.clear()
    reservation = await limiter.reserve([], ASK)
    assert isinstance(reservation, Reservation)
    assert reservation.decisions == ()
    assert reservation.settle(spent(500), is_request_kept=True) is None


async def test_reservation_tells_what_is_left(limiter):
    """A grant carries a decision per limit, none of them with a wait."""
    reservation = await limiter.reserve([TOKENS, REQUESTS], ASK)
    assert [(decision.allowed, decision.remaining, decision.retry_after) for decision in reservation.decisions] == [
        (True, 60, None),
        (True, 9, None),
    ]
    assert reservation.decisions[0].used == 40


async def test_refusal_names_its_limit_and_wait(limiter):
    """A refusal names the limit that refused, what was asked of it and for how long to wait."""
    await limiter.reserve([TOKENS, REQUESTS], Ask(100, 0, is_completion_stated=True))
    refusal = await limiter.reserve([TOKENS, REQUESTS], ASK)
    assert isinstance(refusal, Refusal)
    assert refusal.refuser.limit is TOKENS.limit
    assert refusal.refuser.requested == 40
    assert refusal.refuser.retry_after == pytest.approx(0.4 * 86400)
    assert [decision.allowed for decision in refusal.decisions] == [False, True]


async def test_too_large_has_no_wait(limiter):
    """A request that can never fit is refused without a time to come back."""
    refusal = await limiter.reserve([TOKENS], Ask(101, 0, is_completion_stated=True))
    assert isinstance(refusal, Refusal)
    assert refusal.refuser.retry_after is None


async def test_cancelled_reserve_leaves_no_charge(store, limiter):
    """A caller that goes while the store is being asked gets its charge given back, tokens and request."""
    store.gate.clear()
    asking = asyncio.create_task(limiter.reserve([TOKENS, REQUESTS], ASK))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    store.gate.set()
    await limiter.close()
    assert store.sent == [(1, 2)]
    assert await left(store) == [100, 10]


async def test_cancelled_at_the_moment_of_the_answer_leaves_no_charge(store, limiter):
    """A cancel that arrives together with the answer gives back as well."""
    asking = asyncio.create_task(limiter.reserve([TOKENS], ASK))
    while (await left(store, TOKENS)) == [100]:
        await asyncio.sleep(0)
    asking.cancel()
    result = await asyncio.gather(asking, return_exceptions=True)
    if isinstance(result[0], Reservation):
        result[0].release()
    await limiter.close()
    assert await left(store, TOKENS) == [100]


async def test_cancelled_reserve_that_fails_later_is_quiet(store, limiter, monkeypatch):
    """A caller that went and a store that then fails leave nothing to give back and no unheard exception."""
    gate = asyncio.Event()

    async def failing(demands, applicant):
        await gate.wait()
        raise StoreUnavailable("no answer")

    monkeypatch.setattr(store, "admit", failing)
    asking = asyncio.create_task(limiter.reserve([TOKENS], ASK))
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    gate.set()
    await limiter.close()
    assert store.sent == []


async def test_unavailable_store_is_the_callers_to_hear(limiter, store, monkeypatch):
    """A store without an answer raises, and nothing is queued (A17)."""

    async def failing(demands, applicant):
        raise StoreUnavailable("no answer")

    monkeypatch.setattr(store, "admit", failing)
    with pytest.raises(StoreUnavailable):
        await limiter.reserve([TOKENS], ASK)
    assert store.sent == []


# settling ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "is_request_kept", "remaining"),
    [
        (0, False, [100, 10]),  # never sent, or the upstream failed
        (0, True, [100, 9]),  # the upstream refused
        (20, True, [80, 9]),  # less used than reserved
        (90, True, [10, 9]),  # more
        (140, True, [-40, 9]),  # more than there is: debt
        (None, True, [60, 9]),  # as reserved
        (40, True, [60, 9]),
    ],
)
async def test_settle_books_what_was_used(store, limiter, tokens, is_request_kept, remaining):
    """Each row of the settlement table leaves the limits as it says (A08)."""
    reservation = await limiter.reserve([TOKENS, REQUESTS], ASK)
    await settled(reservation.settle(spent(tokens), is_request_kept=is_request_kept))
    assert await left(store) == remaining


async def test_second_settle_does_nothing(store, limiter):
    """After the first settle neither another nor a release changes anything."""
    reservation = await limiter.reserve([TOKENS, REQUESTS], ASK)
    assert "open" in repr(reservation)
    await reservation.settle(spent(50), is_request_kept=True)
    assert reservation.settle(spent(0), is_request_kept=False) is None
    assert reservation.release() is None
    assert "settled" in repr(reservation)
    assert await left(store) == [50, 9]


async def test_nothing_to_correct_is_not_sent(store, limiter):
    """A reservation that was right costs no second call."""
    reservation = await limiter.reserve([TOKENS, REQUESTS], ASK)
    assert reservation.settle(spent(40), is_request_kept=True) is None
    await limiter.close()
    assert store.sent == []


@pytest.mark.parametrize(("silent", "deaf"), [(3, 0), (0, 1), (2, 1), (0, 4)])
async def test_settle_is_sent_until_heard_and_applied_once(store, limiter, silent, deaf):
    """Calls that never arrived and replies that got lost are repeated under the same number, and applied once."""
    store.silent, store.deaf = silent, deaf
    reservation = await limiter.reserve([TOKENS], ASK)
    await reservation.settle(spent(10), is_request_kept=True)
    assert store.sent == [(1, 1)] * (silent + deaf + 1)
    assert await left(store, TOKENS) == [90]


async def test_settles_that_come_meanwhile_wait_for_their_turn(store, limiter):
    """What is posted while an earlier settle is repeated goes out after it, under the next number, together."""
    reservations = [await limiter.reserve([REQUESTS], ASK) for _ in range(3)]
    store.gate.clear()
    store.deaf = 2
    bookings = [reservations[0].release()]
    while not store.sent:
        await asyncio.sleep(0)
    bookings += [reservation.release() for reservation in reservations[1:]]
    store.gate.set()
    await asyncio.gather(*bookings)
    assert store.sent == [(1, 1)] * 3 + [(2, 2)]
    assert await left(store, REQUESTS) == [10]


async def test_many_settles_go_in_batches(store, limiter, monkeypatch):
    """More corrections than one call takes go in several; each future is done when its last correction is in."""
    monkeypatch.setattr(settling, "_MOST_PER_SETTLE", 3)
    reservations = [await limiter.reserve([TOKENS, REQUESTS], Ask(1, 0, is_completion_stated=True)) for _ in range(4)]
    await asyncio.gather(*(reservation.release() for reservation in reservations))
    assert store.sent == [(1, 3), (2, 3), (3, 2)]
    assert await left(store) == [100, 10]


async def test_abandoned_wait_does_not_stop_the_settle(store, limiter):
    """Who cancels its wait for a settle stops neither that one nor the next."""
    first, second = await limiter.reserve([TOKENS], ASK), await limiter.reserve([TOKENS], ASK)
    booking = first.release()
    booking.cancel()
    await second.release()
    assert await left(store, TOKENS) == [100]


async def test_close_sends_what_is_left(store):
    """Closing waits for settles that are still on their way."""
    limiter = Limiter(store, "w", FakeClock())
    reservation = await limiter.reserve([TOKENS], ASK)
    store.silent = 2
    reservation.release()
    await limiter.close()
    assert await left(store, TOKENS) == [100]


async def test_close_gives_up_in_time(store, monkeypatch):
    """A store that stays silent doesn't hold the shutdown up for ever."""
    monkeypatch.setattr(settling, "_CLOSE_WITHIN_S", 0.02)
    limiter = Limiter(store, "w", FakeClock())
    reservation = await limiter.reserve([TOKENS], ASK)
    store.gate.clear()
    reservation.release()
    async with asyncio.timeout(2):
        await limiter.close()
    assert await left(store, TOKENS) == [60]


async def test_wait_for_a_settle_is_bounded(monkeypatch):
    """An answer is held back for its settle only briefly, and not at all where there is none."""
    monkeypatch.setattr(reservations, "SETTLE_WAIT_S", 0.01)
    never = asyncio.get_running_loop().create_future()
    async with asyncio.timeout(2):
        await settled(never)
        await settled(None)
    assert not never.done()


# showing ----------------------------------------------------------------------------------------------------------------


def decision(unit, remaining, capacity):
    return Decision(True, bound(unit, f"{capacity}/min").limit, remaining, 0.0, None)


def test_tightest_of_a_unit():
    """The limit with the least left is shown; of equals the smaller one; other units don't matter (A33)."""
    many = [
        decision(Unit.REQUESTS, 7, 1000),
        decision(Unit.REQUESTS, 7, 10),
        decision(Unit.TOKENS, 1, 5),
        decision(Unit.REQUESTS, 8, 8),
    ]
    assert tightest(many, Unit.REQUESTS) is many[1]
    assert tightest(many, Unit.TOKENS) is many[2]
    assert tightest(many[:2], Unit.TOKENS) is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (-5, "0s"),
        (0.0001, "1ms"),
        (0.012, "12ms"),
        (0.9991, "1s"),
        (1, "1s"),
        (1.146, "1.146s"),
        (8.64, "8.64s"),
        (59.9999, "1m0s"),
        (60, "1m0s"),
        (90.05, "1m30.05s"),
        (359.5, "5m59.5s"),
        (3600, "1h0m0s"),
        (86400, "24h0m0s"),
        (10**9, "277777h46m40s"),
    ],
)
def test_go_duration(seconds, text):
    """Durations read as Go writes them, to the millisecond and rounded up (A14)."""
    assert go_duration(seconds) == text


@pytest.mark.parametrize(
    ("unit", "stated", "reserved", "left"),
    [
        (Unit.INPUT_TOKENS, True, 10, 100 - 11),
        (Unit.OUTPUT_TOKENS, True, 30, 100 - 7),
        (Unit.TOKENS, True, 40, 100 - 18),
        (Unit.OUTPUT_TOKENS, False, 30, 100 - 7),
    ],
)
async def test_units_of_tokens_count_their_own_part(unit, stated, reserved, left):
    """Input and output tokens are reserved and settled apart, each by its own part of the usage."""
    store = MemoryStore(FakeClock().time_us)
    limiter = Limiter(store, "w", FakeClock())
    limit = bound(unit)
    reservation = await limiter.reserve([limit], Ask(10, 30, is_completion_stated=stated))
    assert isinstance(reservation, Reservation)
    assert (await store.peek([limit]))[0].remaining == 100 - reserved
    await settled(reservation.settle(Spent(11, 7, 18), is_request_kept=True))
    assert (await store.peek([limit]))[0].remaining == left
    await limiter.close()


def test_guessed_output_is_clamped_to_an_output_limit():
    """A completion that was only guessed is never too large for a limit on output tokens; a stated one may be."""
    limit = bound(Unit.OUTPUT_TOKENS, "20/day")
    assert cost_of(limit, Ask(10, 30, is_completion_stated=False)) == 20
    assert cost_of(limit, Ask(10, 30, is_completion_stated=True)) == 30


async def test_leases_are_renewed_while_a_request_runs(monkeypatch):
    """An open reservation renews its lease in the stream of settles; a settled one ends it and is renewed no more (A22)."""
    monkeypatch.setattr(limiter_module, "RENEW_EVERY_S", 0.0)
    clock = FakeClock()
    store = MemoryStore(clock.time_us)
    limiter = Limiter(store, "w", FakeClock())
    limit = bind("tenant:a", Limit("parallel", Unit.CONCURRENCY, None, Algorithm.LEASES, maximum=1))
    reservation = await limiter.reserve([limit], ASK)
    assert isinstance(reservation, Reservation)
    for _ in range(5):
        clock.advance(10)
        await limiter.renew()
        assert (await store.peek([limit]))[0].remaining == 0
    await settled(reservation.settle(None, is_request_kept=True))
    assert (await store.peek([limit]))[0].remaining == 1
    await asyncio.sleep(0)
    assert isinstance(await limiter.reserve([limit], ASK), Reservation)
    await limiter.close()
