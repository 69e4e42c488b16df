"""What a request costs a limit: pure arithmetic on what it asks for. How much it probably uses is ``tokens/``'s affair."""

from __future__ import annotations

from dataclasses import dataclass

from proxy.limits.model import BoundLimit, Unit


@dataclass(frozen=True, slots=True)
class Ask:
    """Tokens a request asks for. ``is_completion_stated``: the client bounded the completion itself.

    ``likely_completion_tokens``: what such requests were seen to use, None where too little is known.
    """

    prompt_tokens: int
    completion_tokens: int
    is_completion_stated: bool
    likely_completion_tokens: int | None = None


def cost_of(bound: BoundLimit, ask: Ask) -> int:
    """What a request costs a limit. A guess is clamped to the capacity, so that only the client's own numbers are too large."""
    unit = bound.limit.unit
    if unit in (Unit.REQUESTS, Unit.CONCURRENCY):
        return 1
    prompt = 0 if unit is Unit.OUTPUT_TOKENS else ask.prompt_tokens
    if unit is Unit.INPUT_TOKENS:
        return prompt
    if ask.is_completion_stated and prompt + ask.completion_tokens > bound.limit.capacity:
        return prompt + ask.completion_tokens
    completion, likely = ask.completion_tokens, ask.likely_completion_tokens
    if likely is not None and not ask.is_completion_stated:
        completion = likely
    elif likely is not None and not bound.limit.reserves_max:
        completion = min(completion, likely)
    return max(prompt, min(prompt + completion, bound.limit.capacity))
