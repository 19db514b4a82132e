"""OpenTelemetry tracing, in the settings."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Final

from cyclopts import Parameter

from service.settings_text import SettingsError

BATCH_SPANS: Final = 512
"""The library's own size of a batch; the queue must hold one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingConfig:
    """Spans of requests, for OpenTelemetry.

    The rest is set by the standard variables: OTEL_EXPORTER_OTLP_HEADERS, OTEL_TRACES_SAMPLER,
    OTEL_RESOURCE_ATTRIBUTES, OTEL_BSP_SCHEDULE_DELAY and so on.

    Attributes:
        enabled: make spans and send them by OTLP over HTTP; needs the extra `otel`.
        endpoint: of the collector: http://collector:4318; left out, OTEL_EXPORTER_OTLP_ENDPOINT
            says it, else http://localhost:4318.
        spans_max: spans that may wait to be sent; the oldest beyond are dropped.
        stop_s: at the end, how many seconds sending the last ones may take.
    """

    enabled: Annotated[bool, Parameter(name="--tracing")] = False
    endpoint: Annotated[str | None, Parameter(name="--tracing-endpoint")] = None
    spans_max: Annotated[int, Parameter(name="--tracing-spans-max")] = 8192
    stop_s: Annotated[float, Parameter(name="--tracing-stop-s")] = 2.0

    def __post_init__(self) -> None:
        """Refuse bounds and addresses that are none."""
        if self.spans_max < BATCH_SPANS:
            raise ValueError(f"spans_max must be at least {BATCH_SPANS}, got {self.spans_max}")
        if not self.stop_s >= 0:
            raise ValueError(f"stop_s must not be negative, got {self.stop_s}")
        if self.endpoint is not None and not self.endpoint.startswith(("http://", "https://")):
            raise ValueError(f"endpoint must begin with http:// or https://, got {self.endpoint}")


def require_otel() -> None:
    """Look for the library that only tracing needs.

    Raises:
        SettingsError: says how to install it.
    """
    wanted = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
    if find_spec("opentelemetry") is None or any(not _is_there(name) for name in wanted):
        raise SettingsError(
            "tracing needs the OpenTelemetry SDK and its OTLP exporter; install them with: "
            "pip install 'bidgate[otel]'"
        )


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False
