"""What only the shared store has to do: forgotten scripts, expiry, pipelines, errors, and a server that is gone."""

from __future__ import annotations

import asyncio
import contextlib
import signal

import pytest
import uvloop
from redis import Redis

from proxy.clock import Clock
from proxy.errors import StartupError, StoreUnavailable
from proxy.limits.model import Algorithm, Correction, Demand, Limit, Rate, Unit, bind
from proxy.limits.redis import RedisStore

BUCKET, WINDOW = Algorithm.TOKEN_BUCKET, Algorithm.SLIDING_WINDOW
START_US = 1_700_000_000_123_456


def bound(algorithm=BUCKET, rate="60/min", burst=None, name="l"):
    return bind("tenant:a", Limit(name, Unit.TOKENS, Rate.parse(rate), algorithm, burst))


async def admit(store, limit, cost=1):
    return await store.admit([Demand(limit, cost)])


async def remaining(store, *bounds):
    return [level.remaining for level in await store.peek(bounds)]


async def test_forgotten_scripts_are_loaded_again(redis_store, client):
    """After SCRIPT FLUSH ten concurrent calls in one pipeline are decided rightly and charged once (A18)."""
    limit = bound(burst=7, rate="1/day")
    await admit(redis_store, limit)
    client.script_flush()
    admissions = await asyncio.gather(*(admit(redis_store, limit) for _ in range(10)))
    assert sum(admission.granted for admission in admissions) == 6
    assert await remaining(redis_store, limit) == [0]


async def test_forgotten_scripts_in_many_pipelines(redis_store, client):
    """Admissions, settles and peeks that meet a flushed server in several pipelines at once all get their answer (A18)."""
    limit = bound(burst=1000, rate="1/day")
    client.script_flush()
    admissions = [admit(redis_store, limit) for _ in range(200)]
    settles = [redis_store.settle("0", f"w{i}", 1, [Correction(limit, 0, 1)]) for i in range(50)]
    replies = await asyncio.gather(*admissions, *settles, redis_store.peek([limit]))
    assert all(admission.granted for admission in replies[:200])
    assert [settled.sequence for settled in replies[200:250]] == [1] * 50
    assert await remaining(redis_store, limit) == [750]


async def test_concurrent_stores_share_one_limit(server_url, client):
    """Two hundred calls through four stores at once take exactly the limit (A01, A30)."""
    stores = [RedisStore(server_url, Clock()) for _ in range(4)]
    limits = [bound(WINDOW, rate="20/hour", name="w"), bound(rate="20/day", name="b")]
    for limit in limits:
        admissions = await asyncio.gather(*(admit(stores[i % 4], limit) for i in range(200)))
        assert sum(admission.granted for admission in admissions) == 20
    await asyncio.gather(*(store.close() for store in stores))


async def test_server_time_is_used(server_url, client):
    """Without a fake time the scripts decide on the server's clock, to the microsecond."""
    store = RedisStore(server_url, Clock())
    seconds, microseconds = client.time()
    admission = await admit(store, bound())
    assert 0 <= admission.now_us - (seconds * 1_000_000 + microseconds) < 60_000_000
    await store.close()


@pytest.mark.parametrize("algorithm", [BUCKET, WINDOW])
async def test_key_without_expiry_is_repaired(redis_store, client, algorithm):
    """A key that lost its expiry gets one with the next charge and with the next settle, and every key has one (A03)."""
    limit = bound(algorithm)
    await admit(redis_store, limit)
    for repair in (admit(redis_store, limit), redis_store.settle("0", "w", 1, [Correction(limit, 0, -1)])):
        for key in client.scan_iter():
            client.persist(key)
        await repair
        assert client.ttl(limit.key) > 0
    assert client.ttl("sg:{d:0}:settled:w") > 0
    await admit(redis_store, limit)
    assert all(client.ttl(key) > 0 for key in client.scan_iter() if not key.endswith((":settled:w", ":state")))


async def test_full_window_without_expiry_recovers(redis_store, client):
    """A window that stands at its limit without expiry blocks for one window and not for ever (A03)."""
    limit = bound(WINDOW, rate="5/min")
    await admit(redis_store, limit, 5)
    client.persist(limit.key)
    redis_store.fake_time_us += 61_000_001
    assert (await admit(redis_store, limit, 5)).granted
    assert client.ttl(limit.key) > 0


@pytest.mark.parametrize(
    ("limit", "debt", "seconds"),
    [
        (bound(rate="60/min", burst=60), 0, (60, 62)),
        (bound(rate="60/min", burst=60), 600, (660, 662)),
        (bound(rate="60/hour", burst=1), 119, (7199, 7201)),
        (bound(WINDOW, rate="60/s"), 0, (61, 62)),
        (bound(WINDOW, rate="60/day"), 60, (87_899, 87_900)),
    ],
)
async def test_expiry_covers_the_debt(redis_store, client, limit, debt, seconds):
    """A key lives until its state equals that of an absent one, and a minute longer, debt included."""
    await redis_store.settle("0", "w", 1, [Correction(limit, 0, debt or 1)])
    assert seconds[0] <= client.ttl(limit.key) <= seconds[1]


async def test_all_keys_share_one_hash_tag(redis_store, client):
    """Limits, clock and settle numbers lie in one slot of a cluster, whatever names are made of (A18)."""
    limit = bind("tenant:{x}", Limit("{y}:z", Unit.TOKENS, Rate.parse("5/min"), BUCKET, models=("gpt-*", "{q},}")))
    await admit(redis_store, limit)
    await redis_store.settle("0", "w", 1, [Correction(limit, 0, 1)])
    keys = client.keys()
    assert len(keys) == 3
    assert all(key.startswith("sg:{d:0}:") and key.count("{") == key.count("}") == 1 for key in keys)


async def test_script_error_fails_only_its_own_call(redis_store, client):
    """A key of a foreign type makes its own call fail; the others of the pipeline are answered, and nothing is half charged."""
    good, bad = bound(name="good"), bound(name="bad")
    client.set(bad.key, "not a hash", ex=60)
    replies = await asyncio.gather(
        admit(redis_store, good),
        redis_store.admit([Demand(good, 1), Demand(bad, 1)]),
        admit(redis_store, good),
        return_exceptions=True,
    )
    assert [isinstance(reply, StoreUnavailable) for reply in replies] == [False, True, False]
    assert await remaining(redis_store, good) == [58]


async def test_settle_that_failed_half_way_is_not_applied_twice(redis_store, client):
    """When one correction of a settle fails the ones before it stay applied once, though the worker sends it again."""
    good, bad = bound(name="good", rate="1/day", burst=100), bound(name="bad")
    client.set(bad.key, "not a hash", ex=60)
    corrections = [Correction(good, 0, 10), Correction(bad, 0, 10)]
    with pytest.raises(StoreUnavailable):
        await redis_store.settle("0", "w", 1, corrections)
    assert (await redis_store.settle("0", "w", 1, corrections)).sequence == 1
    assert await remaining(redis_store, good) == [90]


async def test_cancelled_waiter_does_not_disturb_the_others(redis_store):
    """Of three calls in one pipeline the middle one is cancelled; its neighbours get their own replies."""
    limits = [bound(name=name, burst=size) for name, size in (("a", 10), ("b", 20), ("c", 30))]
    tasks = [asyncio.create_task(admit(redis_store, limit)) for limit in limits]
    await asyncio.sleep(0)
    tasks[1].cancel()
    replies = await asyncio.gather(*tasks, return_exceptions=True)
    assert replies[0].levels[0].remaining == 9
    assert isinstance(replies[1], asyncio.CancelledError)
    assert replies[2].levels[0].remaining == 29


async def test_all_waiters_cancelled(redis_store):
    """A pipeline nobody waits for any more leaves the store working."""
    tasks = [asyncio.create_task(admit(redis_store, bound())) for _ in range(5)]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (await admit(redis_store, bound(name="other"))).granted


async def test_unforeseen_error_reaches_every_waiter(redis_store, monkeypatch):
    """Whatever breaks in the client library, nobody waits for ever (A17)."""

    async def broken(calls):
        raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")

    monkeypatch.setattr(redis_store._pipelines, "_execute", broken)
    replies = await asyncio.gather(*(admit(redis_store, bound()) for _ in range(3)), return_exceptions=True)
    assert [type(reply) for reply in replies] == [StoreUnavailable] * 3


async def test_hundreds_of_limits_are_read_in_their_order(redis_store):
    """Peeking at more limits than one script call takes keeps their order."""
    bounds = [bound(name=str(number), burst=1000) for number in range(250)]
    await asyncio.gather(*(admit(redis_store, limit, number) for number, limit in enumerate(bounds)))
    assert await remaining(redis_store, *bounds) == [1000 - number for number in range(250)]


# a server that is gone --------------------------------------------------------------------------------------------------


async def calls_of(store):
    for call in (
        admit(store, bound()),
        store.settle("0", "w", 1, [Correction(bound(), 0, 1)]),
        store.peek([bound()]),
        store.ping(),
    ):
        try:
            await call
        except StoreUnavailable as error:
            yield error


@pytest.mark.parametrize("url", ["unix:///nonexistent/store", "redis://127.0.0.1:1/0"])
async def test_no_server_is_unavailable(url):
    """Where nothing listens every method says so, with a time to come back (A17)."""
    store = RedisStore(url, Clock())
    errors = [error async for error in calls_of(store)]
    assert len(errors) == 4
    assert all(error.retry_after == 1.0 for error in errors)
    await store.close()


async def test_silent_server_is_unavailable_within_the_bound(own_server):
    """A paused server costs twenty calls one bound in all, and is used again when it goes on (A17)."""
    store = RedisStore(own_server.url, Clock(), answer_within_s=0.1)
    await admit(store, bound())
    loop = asyncio.get_running_loop()
    own_server.process.send_signal(signal.SIGSTOP)
    began = loop.time()
    replies = await asyncio.gather(*(admit(store, bound()) for _ in range(20)), return_exceptions=True)
    assert {type(reply) for reply in replies} == {StoreUnavailable}
    assert loop.time() - began < 1.0
    own_server.process.send_signal(signal.SIGCONT)
    store._pipelines.answer_within_s = 5.0
    assert (await admit(store, bound(name="other"))).granted
    await store.close()


async def test_abandoned_connection_gives_no_late_reply(own_server, monkeypatch):
    """A reply that comes after its call gave up is never taken for the answer of the next call."""
    store = RedisStore(own_server.url, Clock())
    store.fake_time_us = START_US
    wide, narrow = bound(name="wide", burst=1000), bound(name="narrow", burst=10)
    await admit(store, wide)
    with monkeypatch.context() as patch:
        patch.setattr(store._pipelines, "answer_within_s", 0.05)
        own_server.process.send_signal(signal.SIGSTOP)
        with pytest.raises(StoreUnavailable):
            await admit(store, wide)
    own_server.process.send_signal(signal.SIGCONT)
    assert [(await admit(store, narrow)).levels[0].remaining for _ in range(3)] == [9, 8, 7]
    await store.close()


def test_restarted_server_is_used_again(own_server):
    """After the server died under open connections the next calls fail cleanly, on uvloop too, and a new one is used (A17)."""

    async def story(store: RedisStore) -> None:
        limit = bound(burst=1000)
        await asyncio.gather(*(admit(store, limit) for _ in range(100)))
        with Redis.from_url(own_server.url) as plain:
            plain.client_kill_filter(_type="normal", skipme=True)
        assert (await admit(store, limit)).granted
        own_server.stop()
        replies = await asyncio.gather(*(admit(store, limit) for _ in range(100)), return_exceptions=True)
        assert {type(reply) for reply in replies} == {StoreUnavailable}
        own_server.start()
        assert not (await admit(store, limit)).granted, "it has lost its memory, so what was used counts as all"
        assert (await admit(store, bound(burst=1000), cost=0)).granted

    async def run() -> None:
        store = RedisStore(own_server.url, Clock())
        try:
            await story(store)
        finally:
            await store.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


# what a server must be --------------------------------------------------------------------------------------------------


async def test_server_of_ours_is_accepted(redis_store):
    """A server that is new enough and evicts nothing passes."""
    await redis_store.check_server()


async def test_server_that_evicts_is_refused(own_server):
    """A server that would forget limits under pressure is refused, in words that say what to set."""
    with Redis.from_url(own_server.url) as plain:
        plain.config_set("maxmemory-policy", "allkeys-lru")
    store = RedisStore(own_server.url, Clock())
    with pytest.raises(StartupError, match=r"allkeys-lru.*noeviction"):
        await store.check_server()
    await store.close()


@pytest.mark.parametrize("version", ["6.0.16", "5.0.7", "6.1"])
async def test_old_server_is_refused(redis_store, monkeypatch, version):
    """A server older than 6.2 is refused by its version."""

    async def info():
        return [{"redis_version": version}]

    monkeypatch.setattr(redis_store._pipelines, "info", info)
    with pytest.raises(StartupError, match=version):
        await redis_store.check_server()


async def test_calls_abandoned_in_a_pause_charge_nothing(own_server):
    """A hundred admissions that waited out a pause of the server, and that nobody waits for any more, have no effect."""
    store = RedisStore(own_server.url, Clock())
    try:
        limit = bind("tenant:a", Limit("rpd", Unit.REQUESTS, Rate.parse("1000/day"), Algorithm.SLIDING_WINDOW))
        assert (await store.admit([Demand(limit, 1)])).granted
        own_server.process.send_signal(signal.SIGSTOP)
        outcomes = await asyncio.gather(*(store.admit([Demand(limit, 1)]) for _ in range(100)), return_exceptions=True)
        own_server.process.send_signal(signal.SIGCONT)
        assert {type(outcome) for outcome in outcomes} == {StoreUnavailable}
        async with asyncio.timeout(10):
            while True:
                with contextlib.suppress(StoreUnavailable):
                    (level,) = await store.peek([limit])
                    break
        assert level.remaining == 999
        assert (await store.admit([Demand(limit, 1)])).granted, "the deadline follows the store's clock"
    finally:
        await store.close()
