"""Settings from the environment only, prefix ``SLUICEGATE_``; they beat the configuration file. Rules are in ``config.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from proxy.errors import StartupError


class Settings(BaseSettings):
    """One field per variable: ``data_dir`` is ``SLUICEGATE_DATA_DIR``."""

    model_config = SettingsConfigDict(env_prefix="SLUICEGATE_", frozen=True, env_ignore_empty=True)

    config: Path = Path("config/gateway.yaml")
    data_dir: Path = Path(".sluicegate")
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["auto", "json", "text"] = "auto"
    store_url: SecretStr | None = None  # may hold a password
    admin_token: SecretStr | None = None


def read_settings() -> Settings:
    """Settings of this process. Raises StartupError, a line per unusable variable."""
    try:
        return Settings()
    except ValidationError as error:
        lines = [f"SLUICEGATE_{str(problem['loc'][0]).upper()}: {problem['msg']}" for problem in error.errors()]
        raise StartupError("\n".join(lines)) from None
