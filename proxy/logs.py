"""Structured logs: JSON lines on standard error, or readable ones for a terminal. What is said is decided by who says it.

No secret may be logged in the first place; as a last line of defence, whatever looks like a key is masked here.
"""

from __future__ import annotations

import logging
import math
import re
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any, cast

import structlog

_KEY = re.compile(r"(?:\b|(?<=\\[nrt]))(?:sk|sg)-[A-Za-z0-9_\-]{6,}|(?i:bearer)\s+[^\s\"']+")


def mask(text: str) -> str:
    """``text`` without what looks like a key."""
    return _KEY.sub("[masked]", text)


def logger(component: str) -> structlog.stdlib.BoundLogger:
    """A logger whose lines carry ``component``."""
    return cast("structlog.stdlib.BoundLogger", structlog.get_logger(component=component))


def configure(level: str, log_format: str, **bound: str | int) -> None:
    """Send structlog's and the standard library's records to standard error.

    ``log_format`` is json, text, or auto (text when standard error is a terminal); ``bound`` goes on every line.
    """
    is_text = log_format == "text" or (log_format == "auto" and sys.stderr.isatty())
    renderer: Any = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()) if is_text else structlog.processors.JSONRenderer()
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _render_exception,
        _mask,
    ]
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(**bound)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer]
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # Every request has a line of our own, an answer that is cut on purpose is no error, and bugs are caught before uvicorn.
    for name in ("uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    logging.getLogger("asyncio").setLevel(max(logging.WARNING, root.level))


def _render_exception(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    if event.get("exc_info"):
        return structlog.processors.format_exc_info(_logger, _method, event)
    return event


def _mask(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for name, value in event.items():
        if not name.startswith("_"):  # structlog's own
            event[name] = _masked(value)
    return event


def _masked(value: Any) -> Any:
    """``value`` in JSON's types, masked however deep a key lies in it."""
    if isinstance(value, str):
        return mask(value)
    if value is None or isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, Mapping):
        return {mask(str(name)): _masked(member) for name, member in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_masked(member) for member in value]
    return mask(repr(value))
