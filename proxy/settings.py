"""Settings from the environment only, prefix ``SLUICEGATE_``; they beat the configuration file. Rules are in ``config.py``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from proxy.errors import StartupError


def checked_secret(text: str, *, source: str) -> SecretStr:
    """A secret fit for a header. Raises ValueError, naming only where it came from."""
    if not re.fullmatch(r"[\x21-\x7e]+", text):
        raise ValueError(f"{source} holds characters that can't stand in a header; expected printable ASCII without spaces")
    return SecretStr(text)


def checked_store_url(text: str) -> str:
    """The store's address. Raises ValueError, without the address: it may hold a password."""
    from redis.asyncio.connection import ConnectionPool  # noqa: PLC0415  (slow to import, and needed only here)

    try:
        url = urlsplit(text)
        is_address = url.scheme in ("redis", "rediss", "unix") and bool(url.netloc or url.path) and url.port != 0
        # It connects to nothing yet, but reads the options behind the "?".
        ConnectionPool.from_url(text).make_connection()  # type: ignore[no-untyped-call]  # redis annotates it in part
    except (ValueError, TypeError):
        is_address = False
    if not is_address:
        raise ValueError("expected redis://, rediss:// or unix:// and an address")
    return text


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
