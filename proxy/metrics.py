"""Every Prometheus series, by name, and ``record``, which turns the fact of a finished request into counts.

Logic never counts: it hands in a frozen fact. Labels come from the configuration and from closed vocabularies only, so no
caller can create a series. Several workers write memory-mapped files, one set per worker slot, which the control process adds
up; a replacement goes on with its slot's files, so totals never fall.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, values
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from proxy.limits.model import BoundLimit, Level

REQUEST_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)
FIRST_BYTE_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 120)
OVERHEAD_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1)

OUTCOMES = (
    "ok",
    "client_error",
    "client_abort",
    "denied_auth",
    "denied_limit",
    "upstream_error",
    "internal_error",
)


@dataclass(frozen=True, slots=True)
class RequestFact:
    """What happened to one request. Durations are seconds, None where that part was never reached."""

    tenant: str  # a configured id, or empty before the key was recognised
    model: str  # a configured name, "other", or empty for a request that names none
    endpoint: str  # from a closed list
    upstream: str
    upstream_key: str
    status: int  # 499: the client left first
    outcome: str  # one of OUTCOMES
    is_stream: bool
    duration: float
    overhead: float | None  # until the upstream was called
    upstream_duration: float | None
    first_byte_after: float | None
    input_tokens: int
    output_tokens: int
    refused_by: str  # limit name, or empty
    exceeded_shadows: tuple[str, ...]  # names of shadow limits that would have refused
    upstream_fault: str  # label of the upstream's fault, or empty
    is_estimate_guessed: bool


def use_slot(directory: Path, slot: int) -> None:
    """Make this process write its metrics to ``directory`` as worker ``slot``. To be called before ``Metrics`` is made."""
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(directory)
    values.ValueClass = values.MultiProcessValue(process_identifier=lambda: slot)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class Series:
    """One row of the table: a metric's name, what it means, its labels, and the edges of a histogram."""

    name: str
    meaning: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    def counter(self, registry: CollectorRegistry) -> Counter:
        """A counter of this name (``_total`` is added when it is exposed)."""
        return Counter(self.name, self.meaning, self.labels, registry=registry)

    def histogram(self, registry: CollectorRegistry) -> Histogram:
        """A histogram of seconds."""
        return Histogram(self.name, self.meaning, self.labels, buckets=self.buckets, registry=registry)

    def gauge(self, registry: CollectorRegistry) -> Gauge:
        """A gauge summed over workers, at 0: a worker that was killed left its counts of the moment in its slot's files."""
        made = Gauge(self.name, self.meaning, self.labels, multiprocess_mode="sum", registry=registry)
        made.set(0)
        return made


REQUESTS = Series(
    "sluicegate_requests", "Requests by what became of them.", ("tenant", "model", "endpoint", "status_class", "outcome")
)
TOKENS = Series("sluicegate_tokens", "Tokens that upstreams reported.", ("tenant", "model", "direction"))
REFUSALS = Series("sluicegate_limit_refusals", "Requests refused by a limit.", ("tenant", "model", "limit"))
SHADOW_REFUSALS = Series(
    "sluicegate_shadow_refusals", "Requests that a limit in shadow mode would have refused.", ("tenant", "model", "limit")
)
UPSTREAM_ERRORS = Series("sluicegate_upstream_errors", "Upstream failures by kind.", ("upstream", "upstream_key", "fault"))
GUESSES = Series(
    "sluicegate_estimate_guesses",
    "Requests whose text could not be read, so that their size was taken as estimate.",
    ("tenant", "model"),
)
REQUEST_SECONDS = Series(
    "sluicegate_request_seconds",
    "From a request to the end of its answer; refused requests are not in it.",
    ("model", "endpoint", "stream"),
    REQUEST_BUCKETS,
)
UPSTREAM_SECONDS = Series(
    "sluicegate_upstream_request_seconds",
    "From calling an upstream to the end of its answer.",
    ("upstream", "model"),
    REQUEST_BUCKETS,
)
FIRST_BYTE_SECONDS = Series(
    "sluicegate_time_to_first_byte_seconds",
    "From a request to the first byte of its answer's body.",
    ("model",),
    FIRST_BYTE_BUCKETS,
)
OVERHEAD_SECONDS = Series(
    "sluicegate_overhead_seconds",
    "The gateway's own time before it calls an upstream: reading, admission, key.",
    buckets=OVERHEAD_BUCKETS,
)
IN_FLIGHT = Series("sluicegate_in_flight_requests", "Requests being served.")
OPEN_STREAMS = Series("sluicegate_open_streams", "Event streams being relayed.")


class Metrics:
    """The series that data workers write."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = REQUESTS.counter(registry)
        self.tokens = TOKENS.counter(registry)
        self.refusals = REFUSALS.counter(registry)
        self.shadow_refusals = SHADOW_REFUSALS.counter(registry)
        self.upstream_errors = UPSTREAM_ERRORS.counter(registry)
        self.guessed = GUESSES.counter(registry)
        self.request_seconds = REQUEST_SECONDS.histogram(registry)
        self.upstream_seconds = UPSTREAM_SECONDS.histogram(registry)
        self.first_byte_seconds = FIRST_BYTE_SECONDS.histogram(registry)
        self.overhead_seconds = OVERHEAD_SECONDS.histogram(registry)
        self.in_flight = IN_FLIGHT.gauge(registry)
        self.open_streams = OPEN_STREAMS.gauge(registry)

    def record(self, fact: RequestFact) -> None:
        """Count one finished request."""
        status_class = f"{fact.status // 100}xx"
        self.requests.labels(fact.tenant, fact.model, fact.endpoint, status_class, fact.outcome).inc()
        if fact.input_tokens:
            self.tokens.labels(fact.tenant, fact.model, "input").inc(fact.input_tokens)
        if fact.output_tokens:
            self.tokens.labels(fact.tenant, fact.model, "output").inc(fact.output_tokens)
        if fact.is_estimate_guessed:
            self.guessed.labels(fact.tenant, fact.model).inc()
        if fact.refused_by:
            self.refusals.labels(fact.tenant, fact.model, fact.refused_by).inc()
        else:
            stream = "true" if fact.is_stream else "false"
            self.request_seconds.labels(fact.model, fact.endpoint, stream).observe(fact.duration)
        for limit in fact.exceeded_shadows:
            self.shadow_refusals.labels(fact.tenant, fact.model, limit).inc()
        if fact.upstream_fault:
            self.upstream_errors.labels(fact.upstream, fact.upstream_key, fact.upstream_fault).inc()
        if fact.overhead is not None:
            self.overhead_seconds.observe(fact.overhead)
        if fact.upstream_duration is not None:
            self.upstream_seconds.labels(fact.upstream, fact.model).observe(fact.upstream_duration)
        if fact.first_byte_after is not None:
            self.first_byte_seconds.labels(fact.model).observe(fact.first_byte_after)


# the control process's side ----------------------------------------------------------------------------------------------


def wipe(directory: Path) -> None:
    """Empty the workers' metrics directory: counters start anew with the gateway."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)


@dataclass(frozen=True, slots=True)
class LimitLevels:
    """Levels read from the store for one scrape; ``levels`` None: the store gave no answer in time."""

    service: str
    bounds: tuple[tuple[str, BoundLimit], ...]  # tenant id, limit
    levels: tuple[Level, ...] | None
    roundtrip_seconds: float


class _LevelsCollector(Collector):
    def __init__(self, read: LimitLevels, version: str) -> None:
        self._read = read
        self._version = version

    def collect(self) -> Iterable[GaugeMetricFamily]:
        read = self._read
        names = ["service", "key", "tenant", "model", "limit", "unit"]
        remaining = GaugeMetricFamily("rate_limit_remaining", "What is left of a limit; negative: debt.", labels=names)
        total = GaugeMetricFamily("rate_limit_total", "A limit's capacity.", labels=names)
        for (tenant, bound), level in zip(read.bounds, read.levels or (), strict=False):
            labels = [read.service, bound.owner, tenant, bound.models_label, bound.limit.name, bound.limit.unit.value]
            remaining.add_metric(labels, level.remaining)
            total.add_metric(labels, bound.limit.capacity)
        yield remaining
        yield total
        up = 0 if read.levels is None else 1
        yield GaugeMetricFamily("sluicegate_store_up", "Whether the limit store answered this scrape.", value=up)
        yield GaugeMetricFamily(
            "sluicegate_store_roundtrip_seconds",
            "How long reading all limits took for this scrape.",
            value=read.roundtrip_seconds,
        )
        build = GaugeMetricFamily("sluicegate_build_info", "Always 1; the version is a label.", labels=["version"])
        build.add_metric([self._version], 1)
        yield build


def expose(directory: Path, read: LimitLevels, version: str) -> bytes:
    """The text of one scrape: what the workers wrote, added up, and the limits' levels. Blocking: run it in a thread."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(directory))  # type: ignore[no-untyped-call]
    registry.register(_LevelsCollector(read, version))
    return generate_latest(registry)
