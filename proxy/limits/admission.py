"""The admission script in Python: all limits of a request are charged or none, who waits keeps a place, each settle counts once.

This is the specification and the oracle of ``lua/*.lua``; both must give the same reply to every call. It puts the decisions of
its neighbours in order: what fits and what must be left for others (``claims.py``), who goes first (``queues.py``), which
account serves (``accounts.py``). It owns no state and no clock: the memory store hands in both. Costs,
and which limits a request touches, are the limiter's decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from proxy.limits import accounts, claims, levels, queues
from proxy.limits.claims import Claim
from proxy.limits.model import (
    ANYONE,
    NO_POOL,
    Admission,
    Algorithm,
    Applicant,
    BoundLimit,
    Correction,
    Demand,
    Heartbeat,
    Level,
    Pool,
    Priority,
    Settled,
    Sight,
    Verdict,
)
from proxy.limits.queues import Standing
from proxy.limits.state import State

WORKER_LIVES_US = 10_000_000  # after its last heartbeat


def enter(state: State, time_us: int, known_epoch: int = 0) -> int:
    """Store time: never runs backwards, whatever the server's clock does (a failover may step it).

    A caller who knows of another epoch tells a store that it has lost its memory.
    """
    state.last_us = max(time_us, state.last_us)
    if not state.epoch:
        state.epoch = state.last_us
        state.lost_us = state.last_us if known_epoch else 0
    elif known_epoch not in (0, state.epoch) and not state.lost_us:
        state.lost_us = state.epoch
    return state.last_us


# admit -------------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Choice:
    """Of the accounts: the number taken, -1 for none, or why none was."""

    account: int = -1
    claims: list[Claim] = field(default_factory=list)
    passed_over: list[Claim] = field(default_factory=list)
    is_any_healthy: bool = False
    wait_us: int = -1
    ahead: int = 0


@dataclass(slots=True)
class _Case:
    """One request before the script."""

    state: State
    applicant: Applicant
    pool: Pool
    now_us: int
    claims: list[Claim]
    standing: Standing
    choice: _Choice = field(default_factory=_Choice)

    @property
    def has_no_account(self) -> bool:
        """Whether accounts are needed, and all that are healthy lack quota."""
        return bool(self.pool.candidates) and self.choice.account < 0

    @property
    def refused(self) -> list[Claim]:
        """The limits that are in its way."""
        return [claim for claim in self.claims if claim.is_refused]


def admit(
    state: State,
    demands: Sequence[Demand],
    time_us: int,
    *,
    applicant: Applicant = ANYONE,
    pool: Pool = NO_POOL,
    deadline_us: int | None = None,
    known_epoch: int = 0,
) -> Admission:
    """Charge every demand and the quotas of one account, or nothing at all.

    Shadow limits are charged with the others, and refuse nothing. Past the deadline, in store time, the call has no effect:
    whoever asked has given up, and must not be charged.
    """
    now_us = enter(state, time_us, known_epoch)
    if deadline_us is not None and now_us > deadline_us:
        return Admission(Verdict.STALE, now_us, epoch=state.epoch)
    queues.sweep(state, now_us)
    case = _open(state, demands, applicant, pool, now_us)
    for number, claim in enumerate(case.claims):
        if claim.wait_us < 0 and not claim.demand.bound.limit.is_shadow:
            return _refuse(case, number)
    case.choice = _choose(case)
    if case.has_no_account and not case.choice.is_any_healthy:
        _give_up(case)
        return _reply(case, Verdict.NO_ACCOUNT, wait_us=case.choice.wait_us)
    if not case.has_no_account and not case.refused:
        return _grant(case)
    refused, longest_us, known_us = _refuser(case)
    if not _may_wait(case, longest_us, known_us):
        return _refuse(case, refused)
    return _wait(case, refused, longest_us)


def _open(state: State, demands: Sequence[Demand], applicant: Applicant, pool: Pool, now_us: int) -> _Case:
    if applicant.priority is not Priority.INTERACTIVE:
        state.lower_us = now_us
    found = [claims.claim(state, demand, applicant, now_us) for demand in demands]
    if applicant.is_first:
        claims.ask(found, applicant.priority)
    own = queues.place_of(state, applicant, demands)
    place = claims.line_up(state, applicant, found, own)
    return _Case(state, applicant, pool, now_us, found, Standing(own, place))


def _choose(case: _Case) -> _Choice:
    """The first account that is healthy and has quota; none while others wait for quota who go first."""
    state, request_id, now_us = case.state, case.applicant.request_id, case.now_us
    choice = _Choice()
    if case.pool.candidates and state.tickets:
        choice.ahead = queues.ahead(state, case.pool.key, case.standing.place)
    ready_us = []
    for number, candidate in enumerate(case.pool.candidates):
        until_us = accounts.blocked_until_us(state.accounts.get(candidate.key), request_id, now_us)
        if until_us:
            ready_us += [until_us - now_us] if until_us > 0 else []
            continue
        choice.is_any_healthy = True
        found = [claims.claim(state, demand, case.applicant, now_us) for demand in candidate.demands]
        waits = [claim.wait_us for claim in found if claim.is_refused]
        if not waits and choice.ahead == 0:
            choice.account, choice.claims = number, found
            return choice
        choice.passed_over += found
        if -1 not in waits:
            ready_us.append(max([0, *waits]))
    choice.wait_us = min(ready_us, default=-1)
    return choice


def _refuser(case: _Case) -> tuple[int, int, int]:
    """Which demand waits longest (their number: the accounts), for how long, and for how long at least: leases only guess."""
    if case.has_no_account and case.choice.wait_us < 0:
        return len(case.claims), -1, -1
    waits = [(number, claim.wait_us) for number, claim in enumerate(case.claims) if claim.is_refused]
    known_us = [claim.wait_us for claim in case.refused if claim.demand.bound.limit.algorithm is not Algorithm.LEASES]
    if case.has_no_account:
        waits.append((len(case.claims), case.choice.wait_us))
        known_us.append(case.choice.wait_us)
    refused, longest_us = max(waits, key=lambda found: (found[1], -found[0]))
    return refused, longest_us, max(known_us, default=0)


def _may_wait(case: _Case, longest_us: int, known_us: int) -> bool:
    applicant = case.applicant
    if applicant.wait_us <= 0 or longest_us < 0 or known_us > applicant.wait_us:
        return False
    return applicant.request_id in case.state.tickets or queues.waiters(case.state, applicant.tenant) < applicant.max_waiters


def _wait(case: _Case, refused: int, longest_us: int) -> Admission:
    _hold_up(case)
    keys = [claim.demand.bound.key for claim in case.refused]
    ahead = [claim.ahead for claim in case.refused]
    if case.has_no_account:
        keys.append(case.pool.key)
        ahead.append(case.choice.ahead)
    queues.enqueue(case.state, case.applicant, case.standing, keys, case.now_us)
    return _reply(case, Verdict.WAITING, refused=refused, wait_us=longest_us, position=max(ahead))


def _hold_up(case: _Case) -> None:
    found = [*case.claims, *case.choice.claims, *case.choice.passed_over]
    claims.hold_up(found, case.applicant.priority, case.now_us)


def _give_up(case: _Case) -> None:
    _hold_up(case)
    queues.drop(case.state, case.applicant.request_id)


def _refuse(case: _Case, refused: int) -> Admission:
    _give_up(case)
    if refused == len(case.claims):
        choice = case.choice
        return _reply(case, Verdict.REFUSED, refused=refused, wait_us=choice.wait_us, position=choice.ahead)
    claim = case.claims[refused]
    if claim.wait_us < 0:
        return _reply(case, Verdict.REFUSED, refused=refused, wait_us=-1)
    wait_us = claim.wait_us + levels.spread_us(case.state, claim.demand, claim.wait_us, claim.ahead)
    return _reply(case, Verdict.REFUSED, refused=refused, wait_us=wait_us, position=claim.ahead)


def _grant(case: _Case) -> Admission:
    state, applicant, choice, now_us = case.state, case.applicant, case.choice, case.now_us
    charged = [*case.claims, *choice.claims]
    cells = [levels.charge(state, claim.demand, applicant.request_id, now_us) for claim in charged]
    if choice.account >= 0:
        accounts.take(state.accounts.get(case.pool.candidates[choice.account].key), applicant.request_id, now_us)
    if state.tickets:
        queues.served(state, applicant.tenant, case.standing.own % queues.CLASS_STEP)
    queues.drop(state, applicant.request_id)
    claims.ask(choice.claims, applicant.priority)
    claims.granted(state, charged, applicant.priority, now_us)
    claims.hold_up(choice.passed_over, applicant.priority, now_us)
    reply = _reply(case, Verdict.GRANTED)
    count = len(case.claims)
    return replace(reply, account=choice.account, cells=tuple(cells[:count]), account_cells=tuple(cells[count:]))


def _reply(case: _Case, verdict: Verdict, *, refused: int = -1, wait_us: int = 0, position: int = 0) -> Admission:
    return Admission(
        verdict,
        case.now_us,
        refused=refused,
        wait_us=wait_us,
        levels=tuple(levels.level(case.state, claim.demand.bound, case.now_us) for claim in case.claims),
        waits=tuple(claim.wait_us for claim in case.claims),
        position=position,
        epoch=case.state.epoch,
    )


# and afterwards ----------------------------------------------------------------------------------------------------------


def settle(  # noqa: PLR0917  (as the stores have them)
    state: State, worker: str, sequence: int, corrections: Sequence[Correction], time_us: int, known_epoch: int = 0
) -> Settled:
    """Apply a worker's settle number ``sequence`` unless it was applied before; returns the last number applied.

    A worker sends one settle at a time and repeats it until acknowledged, so a gap means that the store lost its memory:
    then the settle applies. It never refuses: debt is carried until it is refilled. Who waits for what is given back is woken.
    """
    now_us = enter(state, time_us, known_epoch)
    last = state.settled.get(worker, 0)
    if sequence <= last:
        return Settled(last, now_us)
    for correction in corrections:
        levels.correct(state, correction, now_us)
    state.settled[worker] = sequence
    for correction in corrections:
        if correction.delta < 0:
            queues.wake(state, correction.bound.key)
    return Settled(sequence, now_us)


def cancel(state: State, request_id: str, time_us: int) -> None:
    """Drop a request's ticket, if it has one: its client left, or its time is up."""
    enter(state, time_us)
    queues.drop(state, request_id)


def beat(state: State, worker: str, time_us: int, known_epoch: int = 0) -> Heartbeat:
    """Note that a worker lives."""
    now_us = enter(state, time_us, known_epoch)
    state.workers[worker] = now_us
    state.workers = {name: seen_us for name, seen_us in state.workers.items() if seen_us > now_us - WORKER_LIVES_US}
    return Heartbeat(now_us, len(state.workers), state.epoch, state.lost_us)


def restore(state: State, sights: Sequence[Sight], time_us: int, known_epoch: int = 0) -> None:
    """Tell a store that lost its memory how limits were last seen."""
    now_us = enter(state, time_us, known_epoch)
    for sight in sights:
        levels.restore(state, sight.bound, sight.remaining, sight.seen_us, now_us)


def peek(state: State, bounds: Sequence[BoundLimit], time_us: int) -> tuple[Level, ...]:
    """Where limits stand, changing nothing."""
    now_us = max(time_us, state.last_us)
    return tuple(levels.level(state, bound, now_us) for bound in bounds)
