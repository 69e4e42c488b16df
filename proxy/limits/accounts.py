"""Upstream accounts as the admission script sees them: which could take a request now, by their health and their quotas.

Decides from what is written in an account's state: disabled, cooling after a 429, open after failures, or half open, when
exactly one trial may pass. Who writes that state, and in which order accounts are tried, is decided elsewhere.
"""

from __future__ import annotations

from proxy.limits.model import LEASE_S
from proxy.limits.state import Account

TRIAL_US = LEASE_S * 1_000_000


def blocked_until_us(account: Account | None, request_id: str, now_us: int) -> int:
    """0 when it is usable; else the store time from which it may be, or -1 when nobody knows."""
    if account is None:
        return 0
    if account.is_disabled:
        return -1
    until = max(account.cooling_until_us, account.open_until_us)
    if until > now_us:
        return until
    if account.is_half_open and account.trial_until_us > now_us and account.trial != request_id:
        return account.trial_until_us
    return 0


def take(account: Account | None, request_id: str, now_us: int) -> None:
    """Begin the one trial of an account that is half open."""
    if account is not None and account.is_half_open:
        account.trial = request_id
        account.trial_until_us = now_us + TRIAL_US
