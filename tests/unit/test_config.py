"""Reading the configuration: what is refused, in which words, what the objects hold. Command and exit codes: ``test_cli.py``."""

from __future__ import annotations

import copy
import json
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import SecretStr

from proxy import cli
from proxy.config import GatewayConfig, load_config
from proxy.config_schema import RootSchema, Schema
from proxy.errors import ConfigError, StartupError
from proxy.limits.model import Algorithm, Unit
from proxy.settings import read_settings
from proxy.tenants import hash_key

STORE_URL_FORMS = (
    "expected redis://, rediss:// or unix:// and an address, redis+sentinel://host:port,host:port/service "
    "or redis+cluster://host:port,host:port"
)

ROOT = Path(__file__).parents[2]
INVALID = sorted((ROOT / "config/invalid").iterdir())
VARIABLES = {
    "OPENAI_KEY": "sk-upstream-secret-1",
    "TEAM_KEY": "team-secret-2",
    "OTHER_KEY": "other-secret-3",
    "ADMIN_TOKEN": "admin-secret-4",
    "STORE_PASSWORD": "store-secret-5",
    "OWN_KEY": "sg-own-secret-6",
    "EMPTY": " ",
    "TWO_LINES": "two\nlines-secret-7",
}
PLANTED = "hunter2planted"  # a secret that does not look like one

VALID: dict[str, Any] = {
    "service": "gateway",
    "server": {"host": "127.0.0.1", "port": 0, "control_port": 0, "workers": 2, "drain_timeout": "500ms", "max_body": "2KiB"},
    "store": {"url": "redis://:${STORE_PASSWORD}@127.0.0.1:6379/0"},
    "admin": {"token": "${ADMIN_TOKEN}"},
    "upstreams": {
        "openai": {"base_url": "https://api.test/v1/?tag=a", "keys": [{"id": "k", "secret": "${OPENAI_KEY}", "weight": 3}]}
    },
    "models": {"gpt-4o": {"upstream": "openai"}, "fast": {"upstream": "openai", "upstream_model": "gpt-4o-mini"}},
    "tenants": {
        "team": {
            "keys": ["${TEAM_KEY}", "sha256:" + hash_key("kept as a hash")],
            "models": ["gpt-*"],
            "limits": [
                {"name": "rpm", "unit": "requests", "rate": "10/min", "models": ["gpt-4o"]},
                {"name": "tpm", "unit": "tokens", "rate": "100/hour", "algorithm": "token_bucket", "burst": 5},
            ],
        },
        "other": {"keys": ["${OTHER_KEY}"]},
    },
}


def write(folder: Path, text: str | dict[str, Any], name: str = "gateway.yaml") -> Path:
    path = folder / name
    path.write_text(text if isinstance(text, str) else json.dumps(text), "utf-8")
    return path


def load(path: Path) -> GatewayConfig:
    return load_config(path, VARIABLES.get)


def problems_of(path: Path) -> list[str]:
    """What load_config says, each line without the file's name that must open it."""
    with pytest.raises(ConfigError) as caught:
        load(path)
    lines = str(caught.value).split("\n")
    assert lines == caught.value.problems
    assert all(line.startswith(f"{path}: ") and line.isprintable() for line in lines)
    return [line.removeprefix(f"{path}: ") for line in lines]


def minimal_text(extra: str = "", tenant: str = "team") -> str:
    return (
        'upstreams: {openai: {base_url: "https://api.test/v1", keys: [{id: k, secret: "${OPENAI_KEY}"}]}}\n'
        f'models: {{gpt-4o: {{upstream: openai}}}}\ntenants: {{{tenant}: {{keys: ["${{TEAM_KEY}}"]}}}}\n{extra}'
    )


# refused files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", INVALID, ids=[path.stem for path in INVALID])
def test_each_invalid_file_is_refused_in_its_own_words(path):
    """An invalid file says in its first lines what must be said of it, and nothing else is said."""
    assert path.suffix == ".yaml"
    expected = re.findall(r"^# expect: (.+)$", path.read_text("utf-8"), re.MULTILINE)
    assert expected
    assert problems_of(path) == expected


def test_no_message_shows_a_value_of_an_invalid_file():
    """What the invalid files hold in place of secrets, and what the variables hold, is in no message."""
    for path in INVALID:
        text = "\n".join(problems_of(path))
        assert "planted" not in text
        assert "pasted" not in text
        assert not [value for value in VARIABLES.values() if value.strip() and value in text]


def test_every_option_that_is_not_built_has_an_invalid_file():
    """Each option that the design names and this version lacks is refused by a file of its own."""
    texts = [re.search(r"# expect: (\S+): is not built yet", path.read_text("utf-8")) for path in INVALID]
    refused = {re.sub(r"\[\d+\]", "", match[1]) for match in texts if match}
    assert refused == {".".join(at) for schema, at in schemas() for at in [(*at, name) for name in schema.not_built]}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"\xff\xfe\x00", "can't be read: it is not UTF-8; expected a YAML or JSON configuration"),
        (b"service: \x00\n", "unacceptable character #x0000: special characters are not allowed; expected YAML or JSON"),
    ],
)
def test_file_that_is_no_text_is_refused(tmp_path, content, expected):
    """Bytes that are no UTF-8 text are one line."""
    path = tmp_path / "gateway.yaml"
    path.write_bytes(content)
    assert problems_of(path) == [expected]


def test_missing_file_and_directory_are_refused(tmp_path):
    """A file that is not there and a directory are one line each."""
    assert problems_of(tmp_path / "none.yaml") == ["there is no such file; expected a YAML or JSON configuration"]
    assert problems_of(tmp_path) == ["can't be read: Is a directory; expected a YAML or JSON configuration"]


@pytest.mark.parametrize(
    "key", ["~", "null", "yes", "5", "1.5", "2024-01-02", "[a, b]", "{a: b}", "? [x]\n", "!!binary aGk=", "&a [*a]", '!x "y"', "="]
)
@pytest.mark.parametrize("where", ["{key}: 1", "server: {{{key}: 1}}", "server: {{x: {{{key}: 1}}}}"])
def test_mapping_key_that_is_no_name_is_one_line(tmp_path, key, where):
    """Whatever YAML allows as a mapping's key but text is refused with its place."""
    (line,) = problems_of(write(tmp_path, minimal_text(where.format(key=key))))
    assert re.match(r"line [4-6], column \d+: ", line)


def test_quoted_number_is_a_name(tmp_path):
    """A tenant whose id is a number in quotes is a tenant like others."""
    assert [tenant.id for tenant in load(write(tmp_path, minimal_text(tenant='"2024"'))).tenants] == ["2024"]


@pytest.mark.parametrize("depth", [150, 3000])
@pytest.mark.parametrize("name", ["gateway.yaml", "gateway.json"])
def test_deep_nesting_is_one_line(tmp_path, depth, name):
    """However deep a file is nested, it is refused in one line."""
    text = "[" * depth + "]" * depth if name.endswith("yaml") else '{"a":' * depth * 10 + "1" + "}" * depth * 10
    assert len(problems_of(write(tmp_path, text, name))) == 1


@given(st.text(st.sampled_from("{}[]:,-&*!|>'\"%@`?#~ \n\tab<=.0_é\x85\u2028"), max_size=40))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_text_makes_a_traceback(tmp_path, text):
    """Any text is refused with lines that name the file, never with another exception."""
    for name in ("gateway.yaml", "gateway.json"):
        assert problems_of(write(tmp_path, text, name))


def test_merge_keys_work_and_do_not_count_as_repeated(tmp_path):
    """A mapping merged into others (<<) may be overridden there, in whatever order YAML builds them."""
    limits = (
        "[&base {name: base, unit: requests, rate: 1/s}, &slow {<<: *base, name: slow, rate: 2/s}, "
        "{<<: *slow, name: last}, {<<: [*slow, *base], name: both}]"
    )
    text = minimal_text().replace('["${TEAM_KEY}"]', f'["${{TEAM_KEY}}"], limits: {limits}')
    config = load(write(tmp_path, text))
    read = [(bound.limit.name, bound.limit.rate.amount) for _, bound in config.bound_limits]
    assert read == [("base", 1), ("slow", 2), ("last", 2), ("both", 2)]


def test_merging_a_mapping_before_it_is_built_does_not_repeat_its_names(tmp_path):
    """A deeper mapping that overrides a merged name may itself be merged into one that is built earlier."""
    text = "a: {b: {c: &x {<<: &y {port: 1}, port: 2}}}\nserver: {<<: *x}\n"
    (line,) = problems_of(write(tmp_path, minimal_text(text)))
    assert line.startswith("a: is not an option")


# the variables and secrets -----------------------------------------------------------------------------------------------


def leaves(value: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The path of each value in a document, containers included."""
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, member in members:
        yield (*at, name)
        yield from leaves(member, (*at, name))


def with_value(at: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    document = copy.deepcopy(VALID)
    holder: Any = document
    for part in at[:-1]:
        holder = holder[part]
    holder[at[-1]] = value
    return document


def messages_for(path: Path) -> str:
    """Everything that load_config lets out: messages, traceback, and nothing where it loads."""
    try:
        load(path)
    except ConfigError as error:
        return f"{error} {error!r} {''.join(traceback.format_exception(error))}"
    return ""


@pytest.mark.parametrize("value", [PLANTED, [PLANTED], {"secret": PLANTED}, f"sha256:{PLANTED}", f"${{{PLANTED.upper()}}}x"])
@pytest.mark.parametrize("at", list(leaves(VALID)), ids=lambda at: "-".join(map(str, at)))
def test_no_message_shows_a_value_that_stands_in_a_wrong_place(tmp_path, at, value):
    """A secret in place of any option is not repeated by the messages about it."""
    assert PLANTED not in messages_for(write(tmp_path, with_value(at, value)))


@pytest.mark.parametrize("at", [at for at in leaves(VALID) if isinstance(at[-1], str)], ids=lambda at: "-".join(map(str, at)))
def test_no_message_shows_a_key_that_stands_in_place_of_a_name(tmp_path, at):
    """What looks like a key is masked where it stands as an option's or an entry's name."""
    key = "sk-proj-Ab12_Cd34-planted"
    text = json.dumps(with_value(at, 0)).replace(f'"{at[-1]}": 0', f'"{key}": 0')
    assert key in text
    messages = messages_for(write(tmp_path, text))
    assert "[masked]" in messages
    assert "planted" not in messages


@pytest.mark.parametrize("text", ["a: !sk-planted-0001 x", "a: *sk-planted-0001", "sk-planted-0001: 1\nsk-planted-0001: 2"])
def test_no_message_about_broken_yaml_shows_a_key(tmp_path, text):
    """The YAML reader's own words are masked too."""
    messages = messages_for(write(tmp_path, text))
    assert messages
    assert "planted" not in messages


def test_repr_shows_no_secret(tmp_path):
    """Neither the configuration nor any object in it shows a secret when printed."""
    config = load(write(tmp_path, VALID))
    shown = f"{config!r} {config} {config.upstreams} {list(config.tenants)} {config.bound_limits}"
    assert not [value for value in VARIABLES.values() if value.strip() and value in shown]
    assert config.upstreams["openai"].keys[0].secret.get_secret_value() == VARIABLES["OPENAI_KEY"]
    assert config.admin_token is not None
    assert config.admin_token.get_secret_value() == VARIABLES["ADMIN_TOKEN"]
    assert config.store_url is not None
    assert config.store_url.get_secret_value() == "redis://:store-secret-5@127.0.0.1:6379/0"


READ = {
    ("store", "url"),
    ("admin", "token"),
    ("upstreams", "openai", "base_url"),
    ("upstreams", "openai", "keys", 0, "secret"),
    ("tenants", "team", "keys", 0),
    ("tenants", "team", "keys", 1),
    ("tenants", "other", "keys", 0),
}


@pytest.mark.parametrize("at", list(leaves(VALID)), ids=lambda at: "-".join(map(str, at)))
def test_variables_are_read_only_where_they_are_allowed(tmp_path, at):
    """A variable in a place that reads none is refused instead of being taken as it stands, and is never looked up."""
    asked: list[str] = []

    def lookup(name: str) -> str | None:
        asked.append(name)
        return VARIABLES.get(name, "https://from-variable")

    document = with_value(at, "${PROBED}")
    path = write(tmp_path, document)
    if at in READ - {("store", "url")}:
        load_config(path, lookup)
    else:
        with pytest.raises(ConfigError):
            load_config(path, lookup)
    assert ("PROBED" in asked) == (at in READ)


def test_secret_file_is_read_from_the_files_folder(tmp_path):
    """A secret file's path starts from the configuration's folder; space around the key is ignored."""
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets/k").write_text("sk-from-file\n")
    text = minimal_text().replace('secret: "${OPENAI_KEY}"', "secret_file: secrets/k")
    config = load(write(tmp_path, text))
    assert config.upstreams["openai"].keys[0].secret.get_secret_value() == "sk-from-file"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "holds characters that can't stand in a header; expected printable ASCII without spaces"),
        ("planted secret", "holds characters that can't stand in a header; expected printable ASCII without spaces"),
        ("sg-planted-0001", "not one of the upstream; expected the upstream's own key"),
    ],
)
def test_unusable_secret_file_is_refused(tmp_path, content, expected):
    """A secret file must hold one key, of the upstream's, and no message shows what it holds."""
    (tmp_path / "k").write_text(content)
    text = minimal_text().replace('secret: "${OPENAI_KEY}"', "secret_file: k")
    (line,) = problems_of(write(tmp_path, text))
    assert line.startswith("upstreams.openai.keys[0].secret_file: ")
    assert line.endswith(expected)
    assert "planted" not in line


# what the objects hold ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gateway.yaml", "gateway.json"])
def test_yaml_and_json_give_the_same_objects(tmp_path, name):
    """Every option arrives where it belongs, from either format."""
    config = load(write(tmp_path, "\ufeff" + json.dumps(VALID), name))
    upstream, server = config.upstreams["openai"], config.server
    assert (config.service, server.port, server.workers, server.drain_timeout, server.max_body_bytes) == (
        "gateway",
        0,
        2,
        0.5,
        2048,
    )
    assert (upstream.base_url, upstream.base_query, upstream.keys[0].weight) == ("https://api.test/v1", "tag=a", 3)
    assert config.models["gpt-4o"].upstream_model == "gpt-4o"
    assert config.models["fast"].upstream_model == "gpt-4o-mini"
    team, other = config.tenants
    assert config.tenants.find("team-secret-2") is team
    assert config.tenants.find("kept as a hash") is team
    assert config.tenants.find("other-secret-3") is other
    assert (team.models, other.models, other.limits) == (("gpt-*",), None, ())
    rpm, tpm = (bound.limit for _, bound in config.bound_limits)
    assert (rpm.unit, rpm.algorithm, rpm.capacity, rpm.models) == (Unit.REQUESTS, Algorithm.SLIDING_WINDOW, 10, ("gpt-4o",))
    assert (tpm.unit, tpm.algorithm, tpm.capacity, tpm.rate.period_s) == (Unit.TOKENS, Algorithm.TOKEN_BUCKET, 5, 3600)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"service": "a", "service": "b"}', "service stands twice in one object; expected YAML or JSON"),
        ('{"server": {"port": 1, "host": "h", "port": 2}}', "port stands twice in one object; expected YAML or JSON"),
        ('{"service": ', "Expecting value: line 1 column 13 (char 12); expected YAML or JSON"),
        ("[]", "the file: expected a mapping"),
        ("null", "the file: expected a mapping"),
    ],
)
def test_json_that_repeats_a_name_or_is_broken_is_refused(tmp_path, text, expected):
    """JSON is held to the same rules as YAML."""
    assert problems_of(write(tmp_path, text, "gateway.json")) == [expected]


@pytest.mark.parametrize("name", ["\ud800", "a\u2028b", "a\x7fb", "x" * 201])
def test_unprintable_name_in_json_is_one_line(tmp_path, name):
    """A name that can't be printed is refused, and shown with escapes."""
    document = with_value(("tenants", "team"), {"keys": ["${TEAM_KEY}"]})
    document["tenants"][name] = {"keys": ["sha256:" + "0" * 64]}
    (line,) = problems_of(write(tmp_path, document, "gateway.json"))
    assert "printable characters" in line


@pytest.mark.parametrize(
    ("text", "seconds"), [("0s", 0), ("500ms", 0.5), ("1.5s", 1.5), ("2m", 120), ("2min", 120), ("1h", 3600), ("1hour", 3600)]
)
def test_durations(tmp_path, text, seconds):
    """A duration is read in its unit and kept in seconds."""
    assert load(write(tmp_path, with_value(("server", "drain_timeout"), text))).server.drain_timeout == seconds


@pytest.mark.parametrize(("text", "size"), [("1B", 1), ("1KB", 1000), ("1KiB", 1024), ("3MB", 3 * 10**6), ("1GiB", 2**30)])
def test_sizes(tmp_path, text, size):
    """A size is read in its unit and kept in bytes."""
    assert load(write(tmp_path, with_value(("server", "max_body"), text))).server.max_body_bytes == size


# the files that come with the project ------------------------------------------------------------------------------------


class _EveryVariable(dict):
    def __missing__(self, name: str) -> str:
        return "http://127.0.0.1:1/v1" if name.endswith("_UPSTREAM") else f"value-of-{name}"


def schemas(schema: type[Schema] = RootSchema, at: tuple[str, ...] = ()) -> Iterator[tuple[type[Schema], tuple[str, ...]]]:
    """Every schema class with the options that lead to it; names of entries are taken from the invalid files' base."""
    yield schema, at
    for name, field in schema.model_fields.items():
        kind, below = field.annotation, (*at, name)
        while get_origin(kind) in (Annotated, list, dict) or type(None) in get_args(kind):
            if get_origin(kind) is dict:
                below = (*below, {"upstreams": "openai", "models": "gpt-4o", "tenants": "team"}[name])
                kind = get_args(kind)[1]
            else:
                kind = get_args(kind)[0]
        if isinstance(kind, type) and issubclass(kind, Schema):
            yield from schemas(kind, below)


def options() -> set[str]:
    return {f"{schema.__name__}.{name}" for schema, _ in schemas() for name in schema.model_fields}


def shown_options(text: str) -> set[str]:
    """The options that a file uses, by the schema that reads them; found by validating it."""
    found: set[str] = set()

    def walk(schema: Schema) -> None:
        found.update(f"{type(schema).__name__}.{name}" for name in schema.model_fields_set)
        for name in schema.model_fields_set:
            value = getattr(schema, name)
            for member in value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]:
                if isinstance(member, Schema):
                    walk(member)

    from proxy.config_schema import Context  # noqa: PLC0415

    walk(RootSchema.model_validate(yaml.safe_load(text), context=Context(_EveryVariable().__getitem__, ROOT)))
    return found


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """config/example.yaml with the secret file that it names."""
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets/local.key").write_text("local-secret\n")
    return write(tmp_path, (ROOT / "config/example.yaml").read_text("utf-8"), "example.yaml")


def test_example_loads(example):
    """The example is a configuration that runs."""
    config = load_config(example, _EveryVariable().__getitem__)
    assert config.upstreams["local"].keys[0].secret.get_secret_value() == "local-secret"
    assert [bound.limit.name for owner, bound in config.bound_limits if owner == "tenant-b"] == ["rpm"]
    assert [bound.limit.name for owner, bound in config.bound_limits if not owner] == ["service-tpm"]
    per_model = [bound for _, bound in config.bound_limits if bound.limit.name == "output-per-model"]
    assert [bound.models_label for bound in per_model] == ["gpt-4-turbo", "gpt-3.5-turbo", "fast"]
    assert len({bound.key for bound in per_model}) == 3


def test_example_shows_every_option(example):
    """Whatever can be configured stands in the example, at least as a comment that can be uncommented."""
    text = re.sub(r"^store: \{\}.*\n#(  url:)", r"store:\n\1", example.read_text("utf-8"), flags=re.MULTILINE)
    assert options() - shown_options(text) == set()
    assert len(options()) > 25


def test_defaults_are_those_the_example_shows(example):
    """The server's values in the example are the defaults, as its first line says."""
    assert load_config(example, _EveryVariable().__getitem__).server == load(write(example.parent, minimal_text())).server


@pytest.mark.parametrize("name", ["config/gateway.yaml", "proxy/demo.yaml"])
def test_shipped_files_load(name):
    """The smallest configuration and the demo's are usable."""
    config = load_config(ROOT / name, _EveryVariable().__getitem__)
    (tenant,) = config.tenants
    assert config.tenants.find("value-of-SLUICEGATE_TENANT_KEY") is tenant
    assert tenant.may_use("gpt-4o")
    assert len(tenant.limits) >= 2


# environment and options -------------------------------------------------------------------------------------------------


def test_environment_beats_the_file_and_an_option_beats_both(tmp_path, monkeypatch):
    """Settings replace the file's store and admin token; options replace what the file says of sockets."""
    config = load(write(tmp_path, VALID))
    monkeypatch.setenv("SLUICEGATE_STORE_URL", "redis://elsewhere/1")
    monkeypatch.setenv("SLUICEGATE_ADMIN_TOKEN", "from-environment")
    overridden = cli._with_settings(config, read_settings(), {"host": "::1", "port": 0, "control_port": None, "workers": 5})
    assert overridden.store_url == SecretStr("redis://elsewhere/1")
    assert overridden.admin_token == SecretStr("from-environment")
    server = overridden.server
    assert (server.host, server.port, server.control_port, server.workers) == ("::1", 0, config.server.control_port, 5)


def test_empty_environment_leaves_the_file_alone(tmp_path, monkeypatch):
    """A variable that is set to nothing counts as not set."""
    monkeypatch.setenv("SLUICEGATE_STORE_URL", "")
    monkeypatch.setenv("SLUICEGATE_ADMIN_TOKEN", "")
    config = load(write(tmp_path, VALID))
    assert cli._with_settings(config, read_settings(), {}) == config


@pytest.mark.parametrize(
    "url", ["redis://h", "rediss://u:p@h:6380/2?ssl_cert_reqs=none", "unix:///tmp/s?db=1", "redis://[::1]:1/0"]
)
def test_usable_store_addresses(monkeypatch, url):
    """Every form of address that the store's client knows is taken as it stands."""
    monkeypatch.setenv("SLUICEGATE_STORE_URL", url)
    assert read_settings().store_url == SecretStr(url)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("LOG_LEVEL", "planted", "SLUICEGATE_LOG_LEVEL: expected 'debug', 'info', 'warning' or 'error'"),
        ("LOG_FORMAT", "planted", "SLUICEGATE_LOG_FORMAT: expected 'auto', 'json' or 'text'"),
        ("STORE_URL", "http://planted", f"SLUICEGATE_STORE_URL: {STORE_URL_FORMS}"),
        ("STORE_URL", "redis://h:planted", f"SLUICEGATE_STORE_URL: {STORE_URL_FORMS}"),
        ("STORE_URL", "redis://h/0?db=planted", f"SLUICEGATE_STORE_URL: {STORE_URL_FORMS}"),
        ("STORE_URL", "redis://h/0?planted=1", f"SLUICEGATE_STORE_URL: {STORE_URL_FORMS}"),
        ("STORE_URL", "redis://", f"SLUICEGATE_STORE_URL: {STORE_URL_FORMS}"),
        (
            "ADMIN_TOKEN",
            "planted token",
            "SLUICEGATE_ADMIN_TOKEN: it holds characters that can't stand in a header; expected printable ASCII without spaces",
        ),
    ],
)
def test_unusable_setting_is_one_line_without_its_value(monkeypatch, name, value, expected):
    """A setting that can't be used is refused by its variable's name, and its value is not shown."""
    monkeypatch.setenv(f"SLUICEGATE_{name}", value)
    with pytest.raises(StartupError) as caught:
        read_settings()
    assert str(caught.value) == expected


def test_defaults_hold_where_a_tenant_names_no_limits(tmp_path):
    """A tenant without limits gets the defaults under its own name; one with an empty list gets none; both share the service's."""
    text = minimal_text("defaults: {tenant: {limits: [{name: rpm, unit: requests, rate: 5/min}]}}\n")
    text = text.replace('["${TEAM_KEY}"]}}', '["${TEAM_KEY}"]}, free: {keys: ["${OPENAI_KEY}"], limits: []}}')
    path = tmp_path / "gateway.yaml"
    path.write_text(text + "service_limits: [{name: all, unit: requests, rate: 9/min}]\n")
    tenants = {tenant.id: [(bound.owner, bound.limit.name) for bound in tenant.limits] for tenant in load(path).tenants}
    assert tenants == {"team": [("tenant:team", "rpm"), ("service", "all")], "free": [("service", "all")]}
