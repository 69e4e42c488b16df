"""The limiter: reserve before the call, settle after it, exactly once. Counting is the script's; IO is the store's.

A grant is a Reservation, a refusal a Decision: "no" is an answer here, not an exception. Settles of one worker leave in one
numbered stream, one at a time and repeated until acknowledged, so none is lost to a blink of the store or applied twice.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Container, Sequence
from dataclasses import dataclass

from proxy.errors import StoreUnavailable
from proxy.limits.model import Admission, BoundLimit, Correction, Decision, Demand, Spent, Unit
from proxy.limits.store import Store
from proxy.logs import logger

RENEW_EVERY_S = 5.0  # leases: a third of their life
SETTLE_WAIT_S = 0.05  # how long an answer is held back so that its own settle is visible to the client's next request
_RESEND_S = 0.1
_MOST_PER_SETTLE = 200
_CLOSE_WITHIN_S = 2.0


@dataclass(frozen=True, slots=True)
class Ask:
    """Tokens a request asks for. ``is_completion_stated``: the client bounded the completion itself."""

    prompt_tokens: int
    completion_tokens: int
    is_completion_stated: bool


def cost_of(bound: BoundLimit, ask: Ask) -> int:
    """What a request costs a limit. A guessed completion is clamped, so that only the client's own numbers are too large."""
    unit = bound.limit.unit
    if unit in (Unit.REQUESTS, Unit.CONCURRENCY):
        return 1
    stated = 0 if unit is Unit.OUTPUT_TOKENS else ask.prompt_tokens
    cost = stated + (0 if unit is Unit.INPUT_TOKENS else ask.completion_tokens)
    return cost if ask.is_completion_stated else max(stated, min(cost, bound.limit.capacity))


class Reservation:
    """What one admitted request holds. ``settle`` it exactly once, however the request ends; later calls do nothing."""

    __slots__ = ("_cells", "_demands", "_limiter", "_request_id", "_settled", "decisions")

    def __init__(self, limiter: Limiter, request_id: str, demands: Sequence[Demand], admission: Admission) -> None:
        self._limiter = limiter
        self._request_id = request_id
        self._demands = demands
        self._cells = admission.cells
        self._settled = False
        self.decisions = tuple(_decision(demand, admission, number) for number, demand in enumerate(demands))

    def __repr__(self) -> str:
        held = ", ".join(f"{demand.bound.limit.name}={demand.cost}" for demand in self._demands)
        return f"<Reservation {held or 'nothing'}, {'settled' if self._settled else 'open'}>"

    def settle(self, spent: Spent | None, *, is_request_kept: bool) -> asyncio.Future[None] | None:
        """Book what was ``spent`` (None: as reserved), and whether the request itself counts.

        Returns a future that is done when the store has it, or None when nothing differs. Waiting for it is optional.
        """
        if self._settled:
            return None
        self._settled = True
        self._limiter.forget(self)
        corrections = []
        for demand, cell in zip(self._demands, self._cells, strict=True):
            unit = demand.bound.limit.unit
            if unit is Unit.CONCURRENCY:
                delta = -demand.cost
            elif unit is Unit.REQUESTS:
                delta = 0 if is_request_kept else -demand.cost
            else:
                delta = 0 if spent is None else spent.of(unit) - demand.cost
            if delta:
                corrections.append(Correction(demand.bound, cell, delta, self._request_id))
        return self._limiter.post(corrections) if corrections else None

    def renewals(self) -> list[Correction]:
        """What keeps this request's leases alive; nothing when it holds none."""
        held = zip(self._demands, self._cells, strict=True)
        return [Correction(d.bound, cell, 0, self._request_id) for d, cell in held if d.bound.limit.unit is Unit.CONCURRENCY]

    def release(self) -> asyncio.Future[None] | None:
        """Give everything back: nothing was sent."""
        return self.settle(Spent(0, 0, 0), is_request_kept=False)


def _decision(demand: Demand, admission: Admission, number: int) -> Decision:
    level = admission.levels[number]
    is_refuser = not admission.granted and admission.refused == number
    return Decision(
        allowed=not is_refuser,
        limit=demand.bound.limit,
        remaining=level.remaining,
        reset_after=level.reset_us / 1e6,
        retry_after=admission.wait_us / 1e6 if is_refuser and not admission.is_too_large else None,
        requested=demand.cost,
        would_refuse=demand.bound.limit.is_shadow and admission.waits[number] != 0,
    )


@dataclass(frozen=True, slots=True)
class Refusal:
    """``refuser`` says which limit refused and for how long; ``decisions`` are the levels of all limits asked."""

    refuser: Decision
    decisions: tuple[Decision, ...]


class Limiter:
    """``worker`` names this process's incarnation: it must be new at every start, as its settles are numbered from 1."""

    def __init__(self, store: Store, worker: str) -> None:
        self._store = store
        self._worker = worker
        self._outbox: list[tuple[Correction, asyncio.Future[None]]] = []
        self._posted = asyncio.Event()
        self._sender: asyncio.Task[None] | None = None
        self._late: set[asyncio.Task[Admission]] = set()
        self._sequence = 0
        self._admissions = 0
        self._holders: set[Reservation] = set()  # open ones that hold leases
        self._renewer: asyncio.Task[None] | None = None
        self._log = logger("limiter")

    async def reserve(self, bounds: Sequence[BoundLimit], ask: Ask) -> Reservation | Refusal:
        """Charge every limit or none. Raises StoreUnavailable. A caller that is cancelled meanwhile leaves no charge."""
        self._admissions += 1
        request_id = f"{self._worker}:{self._admissions}"
        if not bounds:
            return Reservation(self, request_id, (), Admission(granted=True, now_us=0, refused=-1, wait_us=0, levels=(), cells=()))
        demands = [Demand(bound, cost_of(bound, ask)) for bound in bounds]
        asking = asyncio.ensure_future(self._store.admit(demands, request_id))
        try:
            admission = await asyncio.shield(asking)
        except asyncio.CancelledError:
            self._late.add(asking)  # the loop keeps only weak references to tasks
            asking.add_done_callback(lambda late: self._give_back(late, request_id, demands))
            raise
        if admission.granted:
            return self._hold(Reservation(self, request_id, demands, admission))
        decisions = tuple(_decision(demand, admission, number) for number, demand in enumerate(demands))
        return Refusal(decisions[admission.refused], decisions)

    def _hold(self, reservation: Reservation) -> Reservation:
        if reservation.renewals():
            self._holders.add(reservation)
            if self._renewer is None:
                self._renewer = asyncio.create_task(self._renew())
        return reservation

    def forget(self, reservation: Reservation) -> None:
        """The reservation is settled: its leases are not renewed any more."""
        self._holders.discard(reservation)

    async def _renew(self) -> None:
        """Renew all leases in the stream of settles: after one that ends a lease, none can bring it back."""
        while True:
            await asyncio.sleep(RENEW_EVERY_S)
            renewals = [renewal for reservation in self._holders for renewal in reservation.renewals()]
            if renewals:
                await self.post(renewals)

    def _give_back(self, late: asyncio.Task[Admission], request_id: str, demands: Sequence[Demand]) -> None:
        self._late.discard(late)
        if not late.cancelled() and late.exception() is None and late.result().granted:
            Reservation(self, request_id, demands, late.result()).release()

    def post(self, corrections: Sequence[Correction]) -> asyncio.Future[None]:
        """Queue corrections for the store; the future is done once they are applied."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._outbox += [(correction, done) for correction in corrections]
        self._posted.set()
        if self._sender is None:
            self._sender = asyncio.create_task(self._send_settles())
        return done

    async def _send_settles(self) -> None:
        while True:
            await self._posted.wait()
            self._posted.clear()
            while self._outbox:
                # New ones may be appended meanwhile; these stay in front until the store has acknowledged them.
                batch = self._outbox[:_MOST_PER_SETTLE]
                await self._send(self._sequence + 1, [correction for correction, _ in batch])
                self._sequence += 1
                del self._outbox[: len(batch)]
                waiting = {done for _, done in self._outbox[:1]}
                for _, done in batch:
                    if not done.done() and done not in waiting:
                        done.set_result(None)

    async def _send(self, sequence: int, corrections: list[Correction]) -> None:
        while True:
            try:
                await self._store.settle(self._worker, sequence, corrections)
            except StoreUnavailable:
                await asyncio.sleep(_RESEND_S)
            else:
                return

    async def close(self) -> None:
        """Send what is still to be settled, for a bounded time."""
        try:
            async with asyncio.timeout(_CLOSE_WITHIN_S):
                while self._late:
                    await asyncio.wait(self._late)
                if self._outbox:
                    await asyncio.wait([self._outbox[-1][1]])
        except TimeoutError:
            self._log.error("settles_lost", count=len(self._outbox), reason="the store did not answer before shutdown")
        for task in (self._sender, self._renewer):
            if task is not None:
                task.cancel()


async def settled(booking: asyncio.Future[None] | None) -> None:
    """Wait briefly until a settle is in the store, so that a client which asks again meets its own refund."""
    if booking is not None:
        await asyncio.wait([booking], timeout=SETTLE_WAIT_S)


def tightest(decisions: Sequence[Decision], units: Container[Unit]) -> Decision | None:
    """The enforced limit of those units with the least left, the smaller one among equals; None when there is none."""
    of_unit = [decision for decision in decisions if decision.limit.unit in units and not decision.limit.is_shadow]
    return min(of_unit, key=lambda decision: (decision.remaining, decision.limit.capacity), default=None)


def go_duration(seconds: float) -> str:
    """A duration as OpenAI's reset headers have it (Go's format, to the millisecond): 1m30s, 8.64s, 12ms, 0s.

    Rounded up, so that a client which waits as told is not early.
    """
    milliseconds = math.ceil(max(0.0, seconds) * 1000 - 1e-6)
    if milliseconds == 0:
        return "0s"
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, milliseconds = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    text = f"{milliseconds / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    if hours:
        return f"{hours}h{minutes}m{text}"
    return f"{minutes}m{text}" if minutes else text
