"""How log lines look and where they go: structlog for ours, the standard library's for others'."""

from __future__ import annotations

import io
import logging
import sys
from enum import StrEnum
from typing import TextIO

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
        _without_controls,
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


def printable(text: str) -> str:
    """Write what is no printable character as an escape.

    Names that clients choose reach logs; a line break in one must not begin a line of its own, nor
    an escape sequence reach a terminal. Lone surrogates could not even be written.
    """
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in text
    )


def _without_controls(
    _: object, __: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Make every text of a line printable, whoever it came from."""
    return {key: _clean(value) for key, value in event.items()}


def _clean(value: object) -> object:
    return printable(value) if isinstance(value, str) else value


def _plain_traceback(out: TextIO, exc_info: structlog.typing.ExcInfo) -> None:
    """Write a traceback whose lines are its own: messages in it may hold what clients sent."""
    text = io.StringIO()
    structlog.dev.plain_traceback(text, exc_info)
    out.write("\n".join(map(printable, text.getvalue().split("\n"))))


def _dump(event: object, **_: object) -> str:
    return orjson.dumps(event, default=str).decode()


def _console() -> structlog.dev.ConsoleRenderer:
    return structlog.dev.ConsoleRenderer(
        colors=sys.stdout.isatty(), exception_formatter=_plain_traceback
    )
