"""Smooth weighted round robin: exact shares, and evenly spread."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from proxy.upstreams.selection import SmoothWeightedRoundRobin

weights = st.lists(st.integers(1, 40), min_size=1, max_size=8)


@given(weights=weights, offset=st.integers(0, 300))
def test_full_cycle_gives_each_its_weight(weights, offset):
    """As many turns as the weights sum up to give each choice exactly its weight, wherever they begin."""
    wheel = SmoothWeightedRoundRobin(weights)
    for _ in range(offset):
        wheel.next()
    taken = Counter(wheel.next() for _ in range(sum(weights)))
    assert [taken[index] for index in range(len(weights))] == weights


@given(weights=weights, turns=st.integers(1, 300))
def test_shares_are_never_far_off(weights, turns):
    """After any number of turns no choice is as far from its share as there are choices."""
    wheel = SmoothWeightedRoundRobin(weights)
    taken = Counter(wheel.next() for _ in range(turns))
    for index, weight in enumerate(weights):
        assert abs(taken[index] - turns * weight / sum(weights)) < len(weights)
