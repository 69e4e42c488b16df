"""The words of the upstream side: Upstream, UpstreamKey, ModelRoute. Which key serves a call is decided in ``selection.py``."""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import SecretStr


@dataclass(frozen=True, slots=True)
class UpstreamKey:
    """One key of an upstream. ``weight`` is its share of the calls; the secret never shows in a repr."""

    id: str
    secret: SecretStr
    weight: int = 1


@dataclass(frozen=True, slots=True)
class Upstream:
    """A server that speaks OpenAI's API below ``base_url`` (without a trailing slash; ``base_query`` is put on every call)."""

    name: str
    base_url: str
    base_query: str = field(repr=False)  # may hold a key, for servers that want one there
    keys: tuple[UpstreamKey, ...]


@dataclass(frozen=True, slots=True)
class ModelRoute:
    """A public model name, the upstream it goes to, and the name it has there."""

    name: str
    upstream: str
    upstream_model: str
