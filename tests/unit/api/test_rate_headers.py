"""The x-ratelimit headers, read the way clients read them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.api import rate_headers
from proxy.limits.decisions import go_duration
from proxy.limits.model import Algorithm, Decision, Limit, Rate, Unit

_PARTS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}


def parse(text):
    """Seconds of a Go duration, as OpenAI's clients parse reset headers."""
    assert re.fullmatch(r"(\d+(\.\d+)?(h|ms|m|s))+", text), text
    return sum(float(number) * _PARTS[unit] for number, _, unit in re.findall(r"(\d+(\.\d+)?)(h|ms|m|s)", text))


def decision(unit, remaining, capacity, reset_after=0.0, allowed=True):
    limit = Limit("l", unit, Rate(capacity, 60), Algorithm.SLIDING_WINDOW)
    return Decision(allowed, limit, remaining, reset_after, None if allowed else 1.0)


def of(*decisions):
    rendered = rate_headers.of(decisions)
    assert len({name for name, _ in rendered}) == len(rendered)
    return {name.decode(): value.decode() for name, value in rendered}


@given(seconds=st.floats(0, 10**6))
def test_go_duration_round_trip(seconds):
    """Any duration reads back as itself, rounded up to the millisecond and never down (A14)."""
    assert -1e-8 <= parse(go_duration(seconds)) - seconds <= 0.001 + 1e-8


@pytest.mark.parametrize("allowed", [True, False])
def test_six_headers(allowed):
    """Both units give limit, remaining and reset, on grants and refusals alike (A14)."""
    assert of(decision(Unit.REQUESTS, 9, 10, 6.0, allowed), decision(Unit.TOKENS, 60, 100, 361.5)) == {
        "x-ratelimit-limit-requests": "10",
        "x-ratelimit-remaining-requests": "9",
        "x-ratelimit-reset-requests": "6s",
        "x-ratelimit-limit-tokens": "100",
        "x-ratelimit-remaining-tokens": "60",
        "x-ratelimit-reset-tokens": "6m1.5s",
    }


def test_only_limits_that_exist():
    """A unit without a limit has no headers; no limits, no headers at all (A29)."""
    assert sorted(of(decision(Unit.TOKENS, 1, 2))) == [
        "x-ratelimit-limit-tokens",
        "x-ratelimit-remaining-tokens",
        "x-ratelimit-reset-tokens",
    ]
    assert of() == {}


def test_several_limits_of_a_unit_give_one_value():
    """Of several limits of one unit the tightest is shown, each header once (A33)."""
    rendered = of(
        decision(Unit.REQUESTS, 999, 1000, 1.0), decision(Unit.REQUESTS, 3, 10, 2.0), decision(Unit.REQUESTS, 500, 500, 3.0)
    )
    assert rendered == {
        "x-ratelimit-limit-requests": "10",
        "x-ratelimit-remaining-requests": "3",
        "x-ratelimit-reset-requests": "2s",
    }


def test_debt_shows_as_zero():
    """What is left is never shown below zero."""
    assert of(decision(Unit.TOKENS, -50, 100))["x-ratelimit-remaining-tokens"] == "0"
