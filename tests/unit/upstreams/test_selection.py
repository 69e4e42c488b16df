"""The wheel and the pool that turns it."""

from __future__ import annotations

import pytest
from pydantic import SecretStr

from proxy.upstreams.model import Upstream, UpstreamKey
from proxy.upstreams.pool import KeyPool
from proxy.upstreams.selection import SmoothWeightedRoundRobin


@pytest.mark.parametrize(
    ("weights", "turns"),
    [([1], [0, 0, 0]), ([1, 1], [0, 1, 0, 1]), ([5, 1, 1], [0, 0, 1, 0, 2, 0, 0]), ([1, 2], [1, 0, 1, 1, 0, 1])],
)
def test_turns(weights, turns):
    """Turns follow the weights, spread out, the first one among equals."""
    wheel = SmoothWeightedRoundRobin(weights)
    assert [wheel.next() for _ in turns] == turns


@pytest.mark.parametrize("weights", [[], [0], [1, -1]])
def test_weights_must_be_positive(weights):
    """No choice at all, or one that could never be taken, is an error."""
    with pytest.raises(ValueError, match="positive"):
        SmoothWeightedRoundRobin(weights)


def upstream(name, **weights):
    keys = tuple(UpstreamKey(key, SecretStr(f"sk-secret-{key}"), weight) for key, weight in weights.items())
    return Upstream(name, "https://example.test/v1", "", keys)


def test_pool_turns_each_upstream_by_itself():
    """Keys of one upstream take turns by weight, whatever is leased from another in between."""
    pool = KeyPool({"a": upstream("a", x=2, y=1), "b": upstream("b", z=1)})
    taken = []
    for _ in range(6):
        taken.append(pool.lease("a").key.id)
        assert pool.lease("b").key.id == "z"
    assert sorted(taken) == ["x"] * 4 + ["y"] * 2
    assert taken[:3] == taken[3:]


def test_nothing_shows_a_secret():
    """No repr of pool, lease or key holds the key's secret (D24)."""
    pool = KeyPool({"a": upstream("a", x=1)})
    assert "sk-secret" not in f"{pool!r} {pool.lease('a')!r} {pool.lease('a')} {pool.lease('a').key}"
