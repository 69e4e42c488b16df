"""Settings from the environment only, prefix ``SLUICEGATE_``; they beat the configuration file. Rules are in ``config.py``.

It decides too what a store's address may look like, wherever that comes from; connecting to it is ``limits/nodes.py``'s affair.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, cast
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from pydantic import AfterValidator, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from proxy.errors import StartupError


def checked_secret(text: str, *, source: str) -> SecretStr:
    """A secret fit for a header. Raises ValueError, naming only where it came from."""
    if not re.fullmatch(r"[\x21-\x7e]+", text):
        raise ValueError(f"{source} holds characters that can't stand in a header; expected printable ASCII without spaces")
    return SecretStr(text)


_STORE_URL = (
    "expected redis://, rediss:// or unix:// and an address, redis+sentinel://host:port,host:port/service "
    "or redis+cluster://host:port,host:port"
)
_SEVERAL_HOSTS = re.compile(r"(rediss?)\+(sentinel|cluster)://(?:([^/?#]*)@)?([^/?#@]*)(?:/([^?#]*))?(?:\?([^#]*))?")
_HOST = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::([0-9]{1,5}))?")

_Kind = Literal["server", "sentinel", "cluster"]


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """A store URL, taken apart: a server at ``url``, or ``hosts`` that are sentinels or some of a cluster's nodes."""

    url: str = field(repr=False)
    kind: _Kind = "server"
    hosts: tuple[tuple[str, int], ...] = ()
    service: str = ""  # what the sentinels call the master
    database: int = 0
    scheme: str = "redis"
    credentials: str = field(default="", repr=False)  # of the servers, as they stand in the URL, the "@" included
    sentinel_credentials: str = field(default="", repr=False)
    options: str = field(default="", repr=False)  # those of redis://

    def server_url(self, host: str, port: int) -> str:
        """The redis:// or rediss:// address of a node of the cluster, or of the master that a sentinel named."""
        return f"{self.scheme}://{self.credentials}{_bracketed(host)}:{port}/{self.database}?{self.options}"

    def sentinel_url(self, host: str, port: int) -> str:
        """The redis:// or rediss:// address of a sentinel: they have credentials of their own, and no databases."""
        return f"{self.scheme}://{self.sentinel_credentials}{_bracketed(host)}:{port}?{self.options}"


def store_address(text: str) -> StoreAddress:
    """Take a store URL apart. Raises ValueError with what was expected, without the address: it may hold a password."""
    found = _SEVERAL_HOSTS.fullmatch(text)
    if found is None:
        _check_server_url(text, _STORE_URL)
        return StoreAddress(text)
    scheme, kind, credentials, hosts, path, query = (part or "" for part in found.groups())
    prefix = f"{scheme}+{kind}://"
    if kind == "cluster" and path:
        raise ValueError(f"expected nothing behind the hosts of {prefix}, for a cluster has database 0 only")
    service, database = _service_and_database(path, prefix) if kind == "sentinel" else ("", 0)
    options, sentinel_credentials = _options(query, prefix)
    address = StoreAddress(
        url=text,
        kind=cast("_Kind", kind),
        hosts=_hosts(hosts, prefix, 26379 if kind == "sentinel" else 6379),
        service=service,
        database=database,
        scheme=scheme,
        credentials=f"{credentials}@" if credentials else "",
        sentinel_credentials=sentinel_credentials,
        options=options,
    )
    _check_server_url(address.server_url(*address.hosts[0]), f"expected options of redis:// behind the '?' of {prefix}")
    return address


def checked_store_url(text: str) -> str:
    """The store's address as it stands. Raises ValueError, without the address: it may hold a password."""
    return store_address(text).url


def _check_server_url(text: str, expected: str) -> None:
    from redis.asyncio.connection import ConnectionPool  # noqa: PLC0415  (slow to import, and needed only here)

    try:
        url = urlsplit(text)
        is_address = url.scheme in ("redis", "rediss", "unix") and bool(url.netloc or url.path) and url.port != 0
        # It connects to nothing yet, but reads the options behind the "?".
        ConnectionPool.from_url(text).make_connection()  # type: ignore[no-untyped-call]  # redis annotates it in part
    except (ValueError, TypeError):
        is_address = False
    if not is_address:
        raise ValueError(expected)


def _hosts(text: str, prefix: str, default_port: int) -> tuple[tuple[str, int], ...]:
    hosts = []
    for part in text.split(","):
        found = _HOST.fullmatch(part)
        port = int(found[2] or default_port) if found else 0
        if found is None or not 0 < port < 65536:
            raise ValueError(f"expected host:port, or several with commas between, behind {prefix}; ports are 1 to 65535")
        hosts.append((found[1].strip("[]"), port))
    return tuple(hosts)


def _service_and_database(path: str, prefix: str) -> tuple[str, int]:
    service, *rest = path.split("/")
    if not service:
        raise ValueError(f"expected {prefix}host:port/service: the name that the sentinels know the master by")
    if rest and not (len(rest) == 1 and rest[0].isascii() and rest[0].isdigit()):
        raise ValueError(f"expected {prefix}host:port/service/database, the database a number")
    return unquote(service), int(rest[0]) if rest else 0


def _options(query: str, prefix: str) -> tuple[str, str]:
    """The servers' options, and the sentinels' credentials that stand among them."""
    options = dict(parse_qsl(query, keep_blank_values=True))
    if not options.keys().isdisjoint({"db", "host", "port", "path"}):
        raise ValueError(f"expected no db, host, port or path behind the '?' of {prefix}")
    user, password = "", ""
    if "sentinel" in prefix:
        user, password = options.pop("sentinel_username", ""), options.pop("sentinel_password", "")
    return urlencode(options), f"{quote(user, safe='')}:{quote(password, safe='')}@" if user or password else ""


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _store_url(url: SecretStr) -> SecretStr:
    return SecretStr(checked_store_url(url.get_secret_value()))


def _token(token: SecretStr) -> SecretStr:
    return checked_secret(token.get_secret_value(), source="it")


class Settings(BaseSettings):
    """One field per variable: ``data_dir`` is ``SLUICEGATE_DATA_DIR``."""

    model_config = SettingsConfigDict(env_prefix="SLUICEGATE_", frozen=True, env_ignore_empty=True)

    config: Path = Path("config/gateway.yaml")
    data_dir: Path = Path(".sluicegate")
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["auto", "json", "text"] = "auto"
    store_url: Annotated[SecretStr, AfterValidator(_store_url)] | None = None  # may hold a password
    admin_token: Annotated[SecretStr, AfterValidator(_token)] | None = None


def read_settings() -> Settings:
    """Settings of this process. Raises StartupError, a line per unusable variable."""
    try:
        return Settings()
    except ValidationError as error:
        lines = []
        for problem in error.errors(include_input=False):
            reason = problem["msg"].replace("Input should be", "expected").removeprefix("Value error, ")
            lines.append(f"SLUICEGATE_{str(problem['loc'][0]).upper()}: {reason}")
        raise StartupError("\n".join(lines)) from None
