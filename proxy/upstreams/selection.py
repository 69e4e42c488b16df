"""Smooth weighted round robin: which of several weighted choices comes next. What the choices are is the caller's affair.

Each turn every choice gains its weight, the richest is taken and pays the sum of all weights. Over any full cycle (as many
turns as the weights sum up to) each choice is taken exactly its weight times, spread out rather than in runs.

Example: weights 5, 1, 1 give 0 0 1 0 2 0 0.
"""

from __future__ import annotations

from collections.abc import Sequence


class SmoothWeightedRoundRobin:
    """Turns over ``weights`` (positive integers, at least one). Raises ValueError otherwise."""

    def __init__(self, weights: Sequence[int]) -> None:
        if not weights or any(weight < 1 for weight in weights):
            raise ValueError("weights must be positive and there must be at least one")
        self._weights = tuple(weights)
        self._total = sum(weights)
        self._credit = [0] * len(weights)

    def __repr__(self) -> str:
        return f"<SmoothWeightedRoundRobin weights={self._weights} credit={self._credit}>"

    def next(self) -> int:
        """The index whose turn it is; the first one among equals."""
        for index, weight in enumerate(self._weights):
            self._credit[index] += weight
        chosen = max(range(len(self._credit)), key=self._credit.__getitem__)
        self._credit[chosen] -= self._total
        return chosen
