"""How log lines look and where they go: structlog for ours, the standard library's for others'."""

from __future__ import annotations

import logging
import sys
from enum import StrEnum

import orjson
import structlog


class LogFormat(StrEnum):
    """How log lines look."""

    TEXT = "text"
    JSON = "json"


class LogLevel(StrEnum):
    """The least severe lines that are written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def configure_logging(form: LogFormat, level: LogLevel) -> None:
    """Send structlog and the standard library's log to stdout, one line an event."""
    severity = logging.getLevelNamesMapping()[level.upper()]
    shared: list[structlog.typing.Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    last: list[structlog.typing.Processor]
    if form is LogFormat.JSON:
        last = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(_dump)]
    else:
        last = [_console()]
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(severity),
        logger_factory=structlog.WriteLoggerFactory(sys.stdout),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
            foreign_pre_chain=shared,
        )
    )
    # uvicorn's own lines (started, stopped) are for its developers; its warnings are for us.
    logging.basicConfig(handlers=[handler], level=max(severity, logging.WARNING), force=True)


def _dump(event: object, **_: object) -> str:
    return orjson.dumps(event, default=str).decode()


def _console() -> structlog.dev.ConsoleRenderer:
    return structlog.dev.ConsoleRenderer(
        colors=sys.stdout.isatty(), exception_formatter=structlog.dev.plain_traceback
    )
