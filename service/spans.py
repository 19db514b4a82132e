"""1 edge: OpenTelemetry spans of a request: edge, queue, decide, prefill, relay, connect.

Imported only where tracing is on. Spans are batched and sent in a thread of their own; what the
collector does with them, or does not, reaches no request. Attributes follow the GenAI conventions
where there is one, and hold neither keys nor prompts nor answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from types import MappingProxyType
from typing import Final

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from service.control.events import Command, Outcome, Prefill, Refuse, Start
from service.headers import RawHeaders
from service.request_record import RequestRecord
from service.settings_text import SettingsError
from service.surface import LIGHT, OPERATORS, QUEUED, STORED_PREFIX, Api, Route
from service.trace import TRACEPARENT, TRACESTATE, Trace
from service.tracing_config import TracingConfig

METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"})
PATH_CHARS_MAX: Final = 256
OPERATIONS: Final = MappingProxyType(
    {
        Api.CHAT: "chat",
        Api.CHAT_BATCH: "chat",
        Api.RESPONSES: "chat",
        Api.MESSAGES: "chat",
        Api.TEXT: "text_completion",
        Api.TOKENS: "text_completion",
    }
)
"""GenAI's names of what is asked for."""
EMBEDDING_PATHS: Final = frozenset({"/v1/embeddings", "/v2/embed"})
ATTRIBUTES: Final = MappingProxyType(
    {
        "model": "gen_ai.request.model",
        "decode_tokens": "gen_ai.usage.output_tokens",
        "ttft_s": "gen_ai.response.time_to_first_chunk",
        "status": "http.response.status_code",
        "request_id": "bidgate.request_id",
        "outcome": "bidgate.outcome",
        "reason": "error.type",
        "worker": "bidgate.worker",
        "prefill_worker": "bidgate.prefill_worker",
        "starts": "bidgate.starts",
        "queued_s": "bidgate.queue_wait_s",
        "overhead_s": "bidgate.overhead_s",
        "upload_s": "bidgate.upload_s",
        "prompt_tokens": "bidgate.prompt_tokens_estimated",
        "price": "bidgate.price",
        "price_batch": "bidgate.price_batch",
        "price_kv": "bidgate.price_kv",
        "light": "bidgate.light",
    }
)
"""What of a request's record stands in its first span. The tenant does not: it may be a key's."""


class SpanTracer:
    """Makes spans.

    Args:
        processor: takes those that ended.
        counts: of what became of them.
        stop_s: how long the last ones may take.
    """

    def __init__(
        self, processor: SpanProcessor, counts: Counter[str] | None = None, stop_s: float = 2.0
    ) -> None:
        resource = Resource.create({SERVICE_VERSION: version("bidgate")})
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "bidgate"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("bidgate", version("bidgate"))
        self._propagator = TraceContextTextMapPropagator()
        self._counts: Counter[str] = Counter() if counts is None else counts
        self._stop_s = stop_s

    def begin(self, method: str, route: Route, headers: RawHeaders) -> Trace:
        """Open the first span, a child of the client's if it sent a right `traceparent`."""
        method = method if method in METHODS else "_OTHER"
        name = route_name(route)
        attributes: dict[str, str] = {
            "http.request.method": method,
            "http.route": name,
            "url.path": route.path[:PATH_CHARS_MAX],
        }
        operation = OPERATIONS.get(route.api)
        if route.path in EMBEDDING_PATHS:
            operation = "embeddings"
        if operation is not None and route.path in QUEUED.keys() | EMBEDDING_PATHS:
            attributes["gen_ai.operation.name"] = operation
        span = self._tracer.start_span(
            f"{method} {name}", self._parent(headers), SpanKind.SERVER, attributes
        )
        return SpanTrace(self, span)

    def child(self, name: str, of: Span, kind: SpanKind = SpanKind.INTERNAL) -> Span:
        """Open a span within another."""
        return self._tracer.start_span(name, set_span_in_context(of, Context()), kind)

    def decision(self, of: Span, took_s: float) -> Span:
        """Open a span that began some time ago."""
        began_ns = time.time_ns() - int(took_s * 1e9)
        context = set_span_in_context(of, Context())
        return self._tracer.start_span("decide", context, start_time=began_ns)

    def headers_of(self, span: Span) -> RawHeaders:
        """What tells a worker that its own spans are children of this one."""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(span, Context()))
        return [(name.encode(), value.encode("latin-1")) for name, value in carrier.items()]

    def count_end(self) -> None:
        """Count a span that ended."""
        self._counts["ended"] += 1

    def spans(self) -> dict[str, int]:
        """How many ended, were exported, could not be; the rest waits or was dropped."""
        return {name: self._counts[name] for name in ("ended", "exported", "failed")}

    async def aclose(self) -> None:
        """Send what is left; a collector that does not answer is not waited for long."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def shut_down() -> None:
            self._provider.shutdown()
            with contextlib.suppress(RuntimeError):
                # The loop is closed where this came too late.
                loop.call_soon_threadsafe(done.set)

        threading.Thread(target=shut_down, daemon=True, name="last-spans").start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._stop_s):
                await done.wait()

    def _parent(self, headers: RawHeaders) -> Context:
        """The client's span; several of them are none, as the standard wants."""
        parents = [value for name, value in headers if name == TRACEPARENT]
        if len(parents) != 1:
            return Context()
        states = [value.decode("latin-1") for name, value in headers if name == TRACESTATE]
        carrier = {"traceparent": parents[0].decode("latin-1"), "tracestate": ",".join(states)}
        return self._propagator.extract(carrier, Context())


class SpanTrace:
    """The spans of one request; at most one wait and one leg to a worker are open at once.

    Attributes:
        trace_id: 32 hex digits.
    """

    def __init__(self, tracer: SpanTracer, edge: Span) -> None:
        self.trace_id = f"{edge.get_span_context().trace_id:032x}"
        self._tracer = tracer
        self._edge = edge
        self._wait: Span | None = None
        self._leg: Span | None = None
        self._connect: Span | None = None

    def waits(self) -> None:
        """Open the span of the wait."""
        self._close_leg()
        self._wait = self._tracer.child("queue", self._edge)

    def decided(self, command: Command, took_s: float, price: float) -> None:
        """Tell the decision, from its beginning to now."""
        span = self._tracer.decision(self._wait or self._edge, took_s)
        match command:
            case Start(worker_id=worker_id, prefill_id=prefill_id):
                span.set_attribute("bidgate.decision", "start")
                span.set_attribute("bidgate.worker", worker_id)
                span.set_attribute("bidgate.price", price)
                if prefill_id:
                    span.set_attribute("bidgate.prefill_worker", prefill_id)
            case Prefill(worker_id=prefill_id):
                span.set_attribute("bidgate.decision", "prefill")
                span.set_attribute("bidgate.prefill_worker", prefill_id)
            case Refuse(reason=reason):
                span.set_attribute("bidgate.decision", "refuse")
                span.set_attribute("bidgate.reason", reason.value)
        self._end(span)

    def waited(self) -> None:
        """Close the span of the wait."""
        wait, self._wait = self._wait, None
        self._end(wait)

    def sent(self, headers: RawHeaders, worker_id: str, leg: str) -> RawHeaders:
        """Open the span of a leg; the worker's spans become its children."""
        self._close_leg()
        self._leg = self._tracer.child(leg, self._edge, SpanKind.CLIENT)
        self._leg.set_attribute("bidgate.worker", worker_id)
        self._connect = self._tracer.child("connect", self._leg)
        kept = [pair for pair in headers if pair[0] not in (TRACEPARENT, TRACESTATE)]
        return kept + self._tracer.headers_of(self._leg)

    def answered(self, status: int) -> None:
        """Close the span of reaching the worker."""
        if self._leg is not None:
            self._leg.set_attribute("http.response.status_code", status)
            if status >= 500:
                self._leg.set_status(Status(StatusCode.ERROR))
        connect, self._connect = self._connect, None
        self._end(connect)

    def unanswered(self, error: Exception) -> None:
        """Close it with an error; the text of an error may hold anything, its type does not."""
        for span in (self._connect, self._leg):
            if span is not None:
                span.set_attribute("error.type", type(error).__name__)
                span.set_status(Status(StatusCode.ERROR))
        self._close_leg()

    def end(self, record: RequestRecord) -> None:
        """Close what is open, the first span with all that is known at last."""
        failed = record.outcome == Outcome.FAILED and record.status >= 500
        failed |= record.outcome == Outcome.FAILED and record.starts > 0
        if failed and self._leg is not None:
            self._leg.set_status(Status(StatusCode.ERROR))
        if record.outcome == Outcome.CANCELLED and self._leg is not None:
            self._leg.set_attribute("bidgate.outcome", Outcome.CANCELLED.value)
        self._close_leg()
        self.waited()
        for name, attribute in ATTRIBUTES.items():
            value = getattr(record, name)
            if value is not None and value != "":
                self._edge.set_attribute(attribute, value)
        if failed or record.status >= 500:
            self._edge.set_status(Status(StatusCode.ERROR))
        self._end(self._edge)

    def _close_leg(self) -> None:
        connect, leg = self._connect, self._leg
        self._connect = self._leg = None
        self._end(connect)
        self._end(leg)

    def _end(self, span: Span | None) -> None:
        if span is not None:
            span.end()
            if span.get_span_context().trace_flags.sampled:
                self._tracer.count_end()


class CountingExporter(SpanExporter):
    """Counts what became of spans; no failure leaves it."""

    def __init__(self, inner: SpanExporter, counts: Counter[str]) -> None:
        self._inner = inner
        self._counts = counts

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch."""
        try:
            result = self._inner.export(spans)
        except Exception:
            self._counts["failed"] += len(spans)
            raise
        name = "exported" if result is SpanExportResult.SUCCESS else "failed"
        self._counts[name] += len(spans)
        return result

    def shutdown(self) -> None:
        """Stop."""
        self._inner.shutdown()


def make_tracer(config: TracingConfig) -> SpanTracer:
    """Build the tracer that sends to a collector.

    Raises:
        SettingsError: a standard OTEL_* variable makes no sense.
    """
    counts: Counter[str] = Counter()
    endpoint = None if config.endpoint is None else config.endpoint.rstrip("/") + "/v1/traces"
    try:
        exporter = CountingExporter(OTLPSpanExporter(endpoint=endpoint), counts)
        processor = BatchSpanProcessor(exporter, max_queue_size=config.spans_max)
    except (ValueError, OSError) as error:
        raise SettingsError(f"tracing: an OTEL_* variable cannot be used: {error}") from error
    return SpanTracer(processor, counts, config.stop_s)


def route_name(route: Route) -> str:
    """The route without what clients choose in it."""
    if route.response_id:
        return f"{STORED_PREFIX}{{response_id}}"
    if route.path in QUEUED or route.path in LIGHT or route.path in OPERATORS:
        return route.path
    return "/v1/*"
