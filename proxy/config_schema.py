"""The schema of the configuration file: which options exist, their types and units, and how a violation is worded.

Validation resolves ``${VARIABLE}`` by the look-up that the caller passes as context; relations between options (a model's
upstream exists, ids are unique) are checked in ``config.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeAlias, get_args, get_origin
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationInfo, model_validator

from proxy.limits.model import MAX_AMOUNT, Algorithm, Rate, Unit
from proxy.settings import checked_secret, checked_store_url
from proxy.tenants import GENERATED_KEY_PREFIX, hash_key

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_HASH = re.compile(r"sha256:([0-9a-f]{64})")
_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(ms|s|min|m|hour|h)")
_BASE_URL = re.compile(r"https?://[^/?#@\s]+(/[^?#\s]*)?(\?[^#\s]*)?")
_SIZE = re.compile(r"(\d{1,9})(B|KiB|MiB|GiB|KB|MB|GB)")
_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3600, "hour": 3600}
_BYTES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


Lookup: TypeAlias = Callable[[str], str | None]
"""Gives the value of an environment variable, or None where it is not set."""


@dataclass(frozen=True, slots=True)
class Context:
    """What validation needs from outside: the environment, and the folder that relative file names start from."""

    lookup: Lookup
    folder: Path


def _variable(name: str, info: ValidationInfo) -> str:
    context: Context = info.context  # type: ignore[assignment]  # every validation is given one
    value = context.lookup(name)
    if value is None or not value.strip():
        raise ValueError(f"the environment variable {name} is not set; expected it to hold the value")
    return value


def _expand(value: Any, info: ValidationInfo) -> str:
    return _VARIABLE.sub(lambda match: _variable(match[1], info), value) if isinstance(value, str) else ""


def _base_url(value: Any, info: ValidationInfo) -> str:
    text = _expand(value, info)
    try:
        url = urlsplit(text)
        is_address = bool(_BASE_URL.fullmatch(text) and text.isprintable() and url.hostname and url.port != 0)
    except ValueError:
        is_address = False
    if not is_address:
        raise ValueError(
            "expected http:// or https://, a host and a path, such as https://api.openai.com/v1 (no user, no fragment)"
        )
    return text


def _store_url(value: Any, info: ValidationInfo) -> str:
    return checked_store_url(_expand(value, info))


def _without_variable(text: str) -> str:
    if _VARIABLE.search(text):
        raise ValueError("variables are not read here; expected the value itself")
    return text


def _secret(value: Any, info: ValidationInfo) -> SecretStr:
    match = _VARIABLE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError("a literal secret is refused; expected a variable such as ${OPENAI_API_KEY}")
    return checked_secret(_variable(match[1], info), source=f"the environment variable {match[1]}")


def _upstream_secret(value: Any, info: ValidationInfo) -> SecretStr:
    secret = _secret(value, info)
    refuse_own_key(secret)
    return secret


def refuse_own_key(secret: SecretStr) -> None:
    """Raise ValueError where an upstream secret is one of our own tenant keys: the wrong key was pasted."""
    if secret.get_secret_value().startswith(GENERATED_KEY_PREFIX):
        raise ValueError(
            f"this is a key of this gateway ({GENERATED_KEY_PREFIX}…), not one of the upstream; expected the upstream's own key"
        )


def _key_hash(value: Any, info: ValidationInfo) -> str:
    if isinstance(value, str) and (match := _HASH.fullmatch(value)):
        return match[1]
    if isinstance(value, str) and (match := _VARIABLE.fullmatch(value)):
        return hash_key(checked_secret(_variable(match[1], info), source=f"the environment variable {match[1]}").get_secret_value())
    raise ValueError("expected sha256:<64 hex digits> (see `sluicegate hash-key`) or a variable such as ${TENANT_KEY}")


def _duration(value: Any) -> float:
    match = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError("expected a duration such as 500ms, 30s or 2m")
    return float(match[1]) * _SECONDS[match[2]]


def _size(value: Any) -> int:
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError("expected a size such as 512KiB or 32MiB")
    return int(match[1]) * _BYTES[match[2]]


def _rate(value: Any) -> Rate:
    return Rate.parse(value if isinstance(value, str) else "")


def _unit(value: Any) -> Unit:
    if value not in list(Unit):
        raise ValueError("expected requests, tokens, input_tokens, output_tokens or concurrency")
    return Unit(value)


def _mode(value: Any) -> str:
    if value not in ("enforce", "shadow"):
        raise ValueError("expected enforce or shadow")
    return str(value)


def _algorithm(value: Any) -> Algorithm:
    if value not in (Algorithm.TOKEN_BUCKET, Algorithm.SLIDING_WINDOW):
        raise ValueError("expected token_bucket or sliding_window")
    return Algorithm(value)


Text = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$"), AfterValidator(_without_variable)]
Port = Annotated[int, Field(ge=0, le=65535)]


class Schema(BaseModel):
    """Base: unknown options are errors; ``not_built`` names those of the design that this version refuses."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, arbitrary_types_allowed=True)
    not_built: ClassVar[frozenset[str]] = frozenset()


class ServerSchema(Schema):
    """Sockets, processes and bounds."""

    host: Text = "127.0.0.1"
    port: Port = 8000
    control_port: Port = 9091
    workers: Annotated[int, Field(ge=1, le=64)] = 1
    drain_timeout: Annotated[float, BeforeValidator(_duration)] = 30.0
    max_body: Annotated[int, BeforeValidator(_size)] = 32 * 2**20


class StoreSchema(Schema):
    """Where the limits' state lives."""

    not_built = frozenset({"on_outage"})
    url: Annotated[str, BeforeValidator(_store_url)] | None = None


class AdminSchema(Schema):
    """Who may use the admin API."""

    token: Annotated[SecretStr, BeforeValidator(_secret)] | None = None


class KeySchema(Schema):
    """One key of an upstream: ``secret`` or ``secret_file``."""

    not_built = frozenset({"account", "group"})
    id: Text
    secret: Annotated[SecretStr, BeforeValidator(_upstream_secret)] | None = None
    secret_file: Text | None = None
    weight: Annotated[int, Field(ge=1, le=1000)] = 1

    @model_validator(mode="after")
    def _one_source(self) -> KeySchema:
        if (self.secret is None) == (self.secret_file is None):
            raise ValueError("expected either secret or secret_file")
        return self


class UpstreamSchema(Schema):
    """A server that speaks OpenAI's API."""

    not_built = frozenset({"kind", "limits", "probe", "breaker", "retry", "profile", "timeouts"})
    base_url: Annotated[str, BeforeValidator(_base_url)]
    keys: Annotated[list[KeySchema], Field(min_length=1)]


class ModelSchema(Schema):
    """Where a public model name goes."""

    upstream: Text
    upstream_model: Text | None = None


class LimitSchema(Schema):
    """One limit of a tenant."""

    not_built = frozenset({"reserve"})
    name: Text
    unit: Annotated[Unit, BeforeValidator(_unit)]
    rate: Annotated[Rate, BeforeValidator(_rate)] | None = None
    max: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    algorithm: Annotated[Algorithm, BeforeValidator(_algorithm)] | None = None
    burst: Annotated[int, Field(ge=1, le=MAX_AMOUNT)] | None = None
    models: Annotated[list[Text], Field(min_length=1)] | None = None
    per_model: bool = False
    mode: Annotated[str, BeforeValidator(_mode)] = "enforce"

    @property
    def chosen_algorithm(self) -> Algorithm:
        """The algorithm, where absent the unit's usual one."""
        if self.unit is Unit.CONCURRENCY:
            return Algorithm.LEASES
        usual = Algorithm.SLIDING_WINDOW if self.unit is Unit.REQUESTS else Algorithm.TOKEN_BUCKET
        return self.algorithm or usual

    @model_validator(mode="after")
    def _has_amount(self) -> LimitSchema:
        if self.unit is not Unit.CONCURRENCY:
            if self.rate is None or self.max is not None:
                raise ValueError(f"unit: {self.unit} goes with a rate, such as 10000/min, and without max")
        elif self.max is None or self.rate is not None or self.algorithm is not None:
            raise ValueError("unit: concurrency goes with max alone, such as max: 64")
        return self

    @model_validator(mode="after")
    def _burst_fits(self) -> LimitSchema:
        if self.burst is not None and self.chosen_algorithm is not Algorithm.TOKEN_BUCKET:
            raise ValueError("burst goes with algorithm: token_bucket only")
        if self.burst is not None and self.rate is not None and self.rate.amount == 0:
            raise ValueError("a rate of 0 blocks every request; expected no burst beside it")
        return self


class TenantDefaultsSchema(Schema):
    """What holds for tenants that do not say otherwise."""

    limits: list[LimitSchema] = []


class DefaultsSchema(Schema):
    """Defaults by kind."""

    tenant: TenantDefaultsSchema = TenantDefaultsSchema()


class TenantSchema(Schema):
    """A tenant with its keys, models and limits."""

    not_built = frozenset({"priority", "max_wait", "max_waiters", "key_group", "reserve"})
    keys: Annotated[list[Annotated[str, BeforeValidator(_key_hash)]], Field(min_length=1)]
    models: Annotated[list[Text], Field(min_length=1)] | None = None
    limits: list[LimitSchema] | None = None


class RootSchema(Schema):
    """The whole file."""

    service: Text = "sluicegate"
    server: ServerSchema = ServerSchema()
    store: StoreSchema = StoreSchema()
    admin: AdminSchema = AdminSchema()
    defaults: DefaultsSchema = DefaultsSchema()
    service_limits: list[LimitSchema] = []
    upstreams: Annotated[dict[str, UpstreamSchema], Field(min_length=1)]
    models: Annotated[dict[str, ModelSchema], Field(min_length=1)]
    tenants: Annotated[dict[str, TenantSchema], Field(min_length=1)]


# how a violation is worded -----------------------------------------------------------------------------------------------


def describe(problem: Mapping[str, Any]) -> str:
    """One line for one of pydantic's errors: the path in the file, and what was expected. Never the value itself."""
    location: tuple[str | int, ...] = problem["loc"]
    if location and location[-1] == "[key]":
        return f"{path_of(location[:-1])}: expected a name of printable characters"
    return f"{path_of(location)}: {_expected(problem, location)}"


def path_of(location: tuple[str | int, ...]) -> str:
    """``tenants.tenant-a.limits[0].rate``; names with other characters stand in brackets."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        elif re.fullmatch(r"[\w\-]+", part):
            text += f".{part}"
        else:
            text += f"[{json.dumps(part, ensure_ascii=not part.isprintable())}]"  # never more than one line
    return text.lstrip(".") or "the file"


def _expected(problem: Mapping[str, Any], location: tuple[str | int, ...]) -> str:  # noqa: PLR0911  (a table)
    kind, context = problem["type"], problem.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown(location)
    if kind == "missing":
        return "is missing; it is required"
    if kind == "value_error":
        return str(context["error"])
    if kind == "too_short":
        return "is empty; expected at least one entry"
    if kind in ("model_type", "dict_type", "model_attributes_type"):
        return "expected a mapping"
    if kind == "string_pattern_mismatch":
        return "expected text without control characters"
    return re.sub(r"^\w+ should (be|have) ", "expected ", str(problem["msg"]))


def _unknown(location: tuple[str | int, ...]) -> str:
    schema = _schema_at(location[:-1])
    if location[-1] in schema.not_built:
        return "is not built yet; remove it"
    return f"is not an option; expected one of {', '.join(schema.model_fields)}"


def _schema_at(location: tuple[str | int, ...]) -> type[Schema]:
    """The schema class that validates what stands at ``location``."""
    current: Any = RootSchema
    for part in location:
        if isinstance(current, type) and issubclass(current, Schema):
            current = current.model_fields[str(part)].annotation
        else:
            current = get_args(current)[-1]
        while get_origin(current) is Annotated or type(None) in get_args(current):
            current = get_args(current)[0]
    if not (isinstance(current, type) and issubclass(current, Schema)):
        raise TypeError(f"no schema at {location}")
    return current
