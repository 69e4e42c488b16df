"""The configuration: reads the file, checks how its parts relate, and gives the gateway frozen objects.

Every problem becomes one line that names the file, the path in it and what was expected; no line shows a secret. Which
options exist, and their types, is decided in ``config_schema.py``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from glob import escape
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import yaml
from pydantic import SecretStr, ValidationError

from proxy.config_schema import (
    Context,
    KeySchema,
    LimitSchema,
    Lookup,
    RootSchema,
    TenantSchema,
    UpstreamSchema,
    describe,
    path_of,
    refuse_own_key,
)
from proxy.errors import ConfigError
from proxy.limits.model import SERVICE, BoundLimit, Limit, bind
from proxy.logs import mask
from proxy.settings import checked_secret
from proxy.tenants import Tenant, TenantDirectory
from proxy.upstreams.model import ModelRoute, Upstream, UpstreamKey


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Sockets, processes and bounds. ``drain_timeout`` is in seconds."""

    host: str
    port: int
    control_port: int
    workers: int
    drain_timeout: float
    max_body_bytes: int


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """All that the file decides. ``store_url`` None: the embedded store; ``admin_token`` None: admin on loopback only."""

    service: str
    server: ServerConfig
    store_url: SecretStr | None
    admin_token: SecretStr | None
    upstreams: dict[str, Upstream]
    models: dict[str, ModelRoute]
    tenants: TenantDirectory

    @property
    def bound_limits(self) -> list[tuple[str, BoundLimit]]:
        """Every limit once, with its tenant's id; those that all tenants share with an empty one."""
        found = {bound.key: (tenant.id, bound) for tenant in self.tenants for bound in tenant.limits}
        return [("" if bound.owner == SERVICE else tenant, bound) for tenant, bound in found.values()]


def load_config(path: Path, lookup: Lookup) -> GatewayConfig:
    """Read and check a YAML or JSON file; ``lookup`` gives environment variables. Raises ConfigError with every problem."""
    document = _read(path)
    context = Context(lookup, path.parent)
    try:
        root = RootSchema.model_validate(document, context=context)
    except ValidationError as error:
        raise _refusal(path, [describe(problem) for problem in error.errors(include_input=False)]) from None
    problems = list(_unrelated(root))
    upstreams = {}
    for name, schema in root.upstreams.items():
        upstreams[name] = _upstream(name, schema, path.parent, problems)
    if problems:
        raise _refusal(path, problems)
    return _assemble(root, upstreams)


def _refusal(path: Path, problems: list[str]) -> ConfigError:
    """One line per problem. No line shows a value, but it may show a name in whose place a key was pasted: hence the mask."""
    return ConfigError([f"{path}: {mask(problem)}" for problem in problems])


# reading -----------------------------------------------------------------------------------------------------------------


_NAME_TAGS = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge")
_MOST_ALIASED = 200_000  # entries that aliases stand for: ten thousand tenants that share their limits


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses a name given twice (the second would silently win), other names than text, and alias bombs."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag not in _NAME_TAGS:
                raise yaml.MarkedYAMLError(problem="expected a name in quotes", problem_mark=key.start_mark)
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"{path_of((key.value,))} stands here twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return node

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None:
            _written_out(node, {})
        return node


def _written_out(node: yaml.Node, sizes: dict[int, float]) -> float:
    """How many entries ``node`` has with every alias written out; ``sizes`` has one member per entry that is written."""
    if id(node) not in sizes:
        sizes[id(node)] = math.inf  # what an alias inside the very node that it stands for finds
        children = chain.from_iterable(node.value) if isinstance(node, yaml.MappingNode) else node.value
        size = 0 if isinstance(node, yaml.ScalarNode) else sum(_written_out(child, sizes) for child in children)
        if size > _MOST_ALIASED + len(sizes):
            problem = f"expected aliases (*) that stand for at most {_MOST_ALIASED:,} entries"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        sizes[id(node)] = size + 1
    return sizes[id(node)]


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for name, value in pairs:
        if name in members:
            raise ValueError(f"{path_of((name,))} stands twice in one object")
        members[name] = value
    return members


def _read(path: Path) -> Any:
    try:
        text = path.read_text("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError([f"{path}: there is no such file; expected a YAML or JSON configuration"]) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError([f"{path}: can't be read: {reason}; expected a YAML or JSON configuration"]) from None
    try:
        if path.suffix == ".json":
            return json.loads(text, object_pairs_hook=_once)
        return yaml.load(text, Loader=_Loader)  # noqa: S506  (a SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        reason = ", ".join(filter(None, (error.context, error.problem))) or "expected YAML"
        raise _refusal(path, [place + reason]) from None
    except RecursionError:
        raise _refusal(path, ["is nested too deeply; expected YAML or JSON"]) from None
    except (yaml.YAMLError, ValueError) as error:
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise _refusal(path, [f"{first_line}; expected YAML or JSON"]) from None


# relations between options ---------------------------------------------------------------------------------------------


def _unrelated(root: RootSchema) -> Iterator[str]:
    """A line for each name that is none, that refers to nothing, or that stands twice."""
    for section, names in (("upstreams", root.upstreams), ("models", root.models), ("tenants", root.tenants)):
        yield from _unusable(section, names)
    for name, model in root.models.items():
        if model.upstream not in root.upstreams:
            known = ", ".join(root.upstreams)
            yield f"{path_of(('models', name, 'upstream'))}: there is no such upstream; expected one of {known}"
    for name, upstream in root.upstreams.items():
        yield from _repeated(("upstreams", name, "keys"), [key.id for key in upstream.keys], "id")
    yield from _unrelated_limits(("defaults", "tenant", "limits"), root.defaults.tenant.limits, root)
    yield from _unrelated_limits(("service_limits",), root.service_limits, root)
    owners: dict[str, str] = {}
    for name, tenant in root.tenants.items():
        at = ("tenants", name)
        yield from _unmatched((*at, "models"), tenant.models, root)
        yield from _unrelated_limits((*at, "limits"), tenant.limits or [], root)
        for number, key_hash in enumerate(tenant.keys):
            here = path_of((*at, "keys", number))
            if key_hash in owners:
                yield f"{here}: the same key stands at {owners[key_hash]}; expected each key once"
            owners[key_hash] = here


def _unrelated_limits(at: tuple[str | int, ...], limits: list[LimitSchema], root: RootSchema) -> Iterator[str]:
    yield from _repeated(at, [limit.name for limit in limits], "name")
    for number, limit in enumerate(limits):
        yield from _unmatched((*at, number, "models"), limit.models, root)


def _unusable(section: str, names: Iterable[str]) -> Iterator[str]:
    for name in names:
        if not name or len(name) > 200 or not name.isprintable():
            yield f"{path_of((section, name))}: expected a name of 1 to 200 printable characters"


def _repeated(at: tuple[str | int, ...], names: list[str], field: str) -> Iterator[str]:
    for number, name in enumerate(names):
        if name in names[:number]:
            first = path_of((*at, names.index(name), field))
            yield f"{path_of((*at, number, field))}: the same {field} stands at {first}; expected each {field} once"


def _unmatched(at: tuple[str | int, ...], patterns: list[str] | None, root: RootSchema) -> Iterator[str]:
    for number, pattern in enumerate(patterns or ()):
        if not any(fnmatchcase(model, pattern) for model in root.models):
            known = ", ".join(root.models)
            yield f"{path_of((*at, number))}: matches none of the configured models; expected one of {known}"


# assembling --------------------------------------------------------------------------------------------------------------


def _upstream(name: str, schema: UpstreamSchema, folder: Path, problems: list[str]) -> Upstream:
    keys = []
    for number, key in enumerate(schema.keys):
        try:
            keys.append(UpstreamKey(key.id, key.secret or _secret_from_file(key, folder), key.weight))
        except ValueError as error:
            problems.append(f"{path_of(('upstreams', name, 'keys', number, 'secret_file'))}: {error}")
    url = urlsplit(schema.base_url)
    return Upstream(name, urlunsplit((url.scheme, url.netloc, url.path.rstrip("/"), "", "")), url.query, tuple(keys))


def _secret_from_file(key: KeySchema, folder: Path) -> SecretStr:
    path = folder / str(key.secret_file)
    try:
        text = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        raise ValueError("can't be read; expected the path of a file that holds the key") from None
    secret = checked_secret(text, source=str(path))
    refuse_own_key(secret)
    return secret


def _assemble(root: RootSchema, upstreams: dict[str, Upstream]) -> GatewayConfig:
    server = root.server
    return GatewayConfig(
        service=root.service,
        server=ServerConfig(
            host=server.host,
            port=server.port,
            control_port=server.control_port,
            workers=server.workers,
            drain_timeout=server.drain_timeout,
            max_body_bytes=server.max_body,
        ),
        store_url=SecretStr(root.store.url) if root.store.url else None,
        admin_token=root.admin.token,
        upstreams=upstreams,
        models={name: ModelRoute(name, model.upstream, model.upstream_model or name) for name, model in root.models.items()},
        tenants=TenantDirectory(
            Tenant(
                id=name,
                key_hashes=tuple(tenant.keys),
                models=tuple(tenant.models) if tenant.models else None,
                limits=(
                    *_bound(f"tenant:{name}", _limits_of(tenant, root), _usable(tenant, root)),
                    *_bound(SERVICE, root.service_limits, list(root.models)),
                ),
            )
            for name, tenant in root.tenants.items()
        ),
    )


def _limits_of(tenant: TenantSchema, root: RootSchema) -> list[LimitSchema]:
    """A tenant's own limits; where it names none, not even an empty list, the defaults."""
    return root.defaults.tenant.limits if tenant.limits is None else tenant.limits


def _usable(tenant: TenantSchema, root: RootSchema) -> list[str]:
    return [model for model in root.models if tenant.models is None or any(fnmatchcase(model, known) for known in tenant.models)]


def _bound(owner: str, limits: list[LimitSchema], models: list[str]) -> Iterator[BoundLimit]:
    """Each limit with its store key; one that counts per model becomes a limit for each model that it matches."""
    for schema in limits:
        limit = _limit(schema)
        if schema.per_model:
            yield from (bind(owner, replace(limit, models=(escape(model),))) for model in models if limit.is_for(model))
        else:
            yield bind(owner, limit)


def _limit(schema: LimitSchema) -> Limit:
    return Limit(
        name=schema.name,
        unit=schema.unit,
        rate=schema.rate,
        algorithm=schema.chosen_algorithm,
        burst=schema.burst,
        models=tuple(schema.models) if schema.models else None,
        is_shadow=schema.mode == "shadow",
        maximum=schema.max or 0,
    )
