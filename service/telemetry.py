"""What bidgate tells about its requests and decisions: Prometheus series, one log line a request.

The registry is our own. What is counted here is what happens to requests; the state of everything
else is read at each scrape (state_series.py), so a worker that left leaves no series. Labels are
bounded: workers, resources, reasons, status codes and the tenants of the settings, never anything a
client chose.
"""

from __future__ import annotations

from typing import Final

import structlog
from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.exposition import choose_encoder

from service.errors import NO_REQUEST, Answer
from service.request_record import RequestRecord, as_line
from service.state_series import Sources, StateCollector

LATENCY_BUCKETS_S: Final = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0),
    *(10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
OVERHEAD_BUCKETS_S: Final = (
    *(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05),
    *(0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0),
)


class Telemetry:
    """Histograms of requests and ticks, and the page of everything."""

    def __init__(self, log: structlog.typing.FilteringBoundLogger, *, log_requests: bool) -> None:
        self.registry = CollectorRegistry()
        # Memory, CPU time and open files of this process, by their usual names.
        ProcessCollector(registry=self.registry)
        self._log = log
        self._log_requests = log_requests
        self._ttft_s = self._histogram("ttft", "Time to first token of streams", LATENCY_BUCKETS_S)
        self._e2e_s = self._histogram("e2e", "Time from arrival to end", LATENCY_BUCKETS_S)
        self._queued_s = self._histogram("queue_wait", "Wait for a start", OVERHEAD_BUCKETS_S)
        self._tick_s = self._histogram("tick", "Duration of a decision", OVERHEAD_BUCKETS_S)
        self._overhead_s = self._histogram(
            "overhead", "Time in bidgate before the worker, without the wait", OVERHEAD_BUCKETS_S
        )
        self._light_s = self._histogram(
            "light", "Time from arrival to end, of requests that skip the queue", LATENCY_BUCKETS_S
        )
        self._responses = Counter(
            "bidgate_responses", "Answers of proxied routes", ["code"], registry=self.registry
        )
        self._no_requests = Counter(
            "bidgate_connections_refused",
            "Connections closed because what came was no request, too long or too slow",
            ["reason"],
            registry=self.registry,
        )
        for answer in NO_REQUEST:
            self._no_requests.labels(reason=answer.code)

    def observe_tick(self, duration_s: float) -> None:
        """Count one decision."""
        self._tick_s.observe(duration_s)

    def observe_request(self, record: RequestRecord) -> None:
        """Count one request and write its line."""
        self._responses.labels(code=record.status).inc()
        (self._light_s if record.light else self._e2e_s).observe(record.e2e_s)
        for histogram, value in (
            (self._ttft_s, record.ttft_s),
            (self._queued_s, record.queued_s),
            (self._overhead_s, record.overhead_s),
        ):
            if value is not None:
                histogram.observe(value)
        self._write(record)

    def observe_refusal(self, record: RequestRecord) -> None:
        """Count a request that was turned away at the door, and write its line."""
        self._responses.labels(code=record.status).inc()
        self._write(record)

    def observe_no_request(self, answer: Answer, why: str, client: str) -> None:
        """Count what never became a request, and write its line."""
        self._no_requests.labels(reason=answer.code).inc()
        if self._log_requests:
            self._log.info(
                "connection_refused",
                client=client,
                status=answer.status,
                reason=answer.code,
                detail=why,
            )

    def _write(self, record: RequestRecord) -> None:
        if self._log_requests:
            self._log.info("request", **as_line(record))

    def reconfigure(self, *, log_requests: bool) -> None:
        """Write a line for each request from now on, or none."""
        self._log_requests = log_requests

    def watch(self, sources: Sources) -> None:
        """Add the state of queue, router and fleet to the page."""
        self.registry.register(StateCollector(sources))

    def page(self, accept: str) -> tuple[bytes, str]:
        """Write the page and its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def _histogram(self, name: str, text: str, buckets_s: tuple[float, ...]) -> Histogram:
        return Histogram(f"bidgate_{name}_seconds", text, buckets=buckets_s, registry=self.registry)
