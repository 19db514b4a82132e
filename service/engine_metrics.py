"""Read what a router needs from a vLLM Prometheus page; everything else is skipped unread.

A targeted scan: a general parser builds every series and costs many times more (docs/decisions.md).
Unknown stays None, because an absent series is not a zero. No I/O here: worker_probe.py fetches the
pages, engine_reports.py compares them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Final, TypeVar

from service.worker_config import RANKS_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_Number = TypeVar("_Number", int, float)

_KV_USE: Final = (b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc")
_TOKEN_LATENCY: Final = (
    b"vllm:inter_token_latency_seconds",
    b"vllm:time_per_output_token_seconds",
)
_QUEUE_TIME: Final = (b"vllm:request_queue_time_seconds",)
_RUNNING: Final = b"vllm:num_requests_running"
_WAITING: Final = b"vllm:num_requests_waiting"
_WAITING_BY_REASON: Final = b"vllm:num_requests_waiting_by_reason"
_PREEMPTIONS: Final = b"vllm:num_preemptions_total"
_GENERATION_TOKENS: Final = b"vllm:generation_tokens_total"
_REQUEST_SUCCESS: Final = b"vllm:request_success_total"
_PREFIX_QUERIES: Final = (
    b"vllm:prefix_cache_queries_total",
    b"vllm:gpu_prefix_cache_queries_total",
)
_PREFIX_HITS: Final = (b"vllm:prefix_cache_hits_total", b"vllm:gpu_prefix_cache_hits_total")
_CACHE_CONFIG: Final = b"vllm:cache_config_info"
_PROCESS_START: Final = b"process_start_time_seconds"

_CHEAP: Final = frozenset(
    {
        *_KV_USE,
        _RUNNING,
        _WAITING,
        _WAITING_BY_REASON,
        _PREEMPTIONS,
        _GENERATION_TOKENS,
        _CACHE_CONFIG,
        _PROCESS_START,
    }
)
_WANTED: Final = _CHEAP | {
    *(name + end for name in (*_TOKEN_LATENCY, *_QUEUE_TIME) for end in (b"_sum", b"_count")),
    _REQUEST_SUCCESS,
    *_PREFIX_QUERIES,
    *_PREFIX_HITS,
}
# What to ask of a page that can be filtered with `name[]=`: everything, and what costs an engine
# little. To render a histogram takes it as long as many gauges.
WANTED_SERIES: Final = tuple(sorted(name.decode() for name in _WANTED))
CHEAP_SERIES: Final = tuple(sorted(name.decode() for name in _CHEAP))

# More `engine` labels than any deployment has ranks: the memory a hostile page can claim.
ENGINES_MAX: Final = RANKS_MAX
VALUE_MAX: Final = 2.0**62
"""No counter of an engine is larger; without a bound sums of absurd values would overflow."""

# Possessive quantifiers, so that a malformed line fails in one pass.
_LABEL: Final = rb'\s*+([a-zA-Z_]\w*+)\s*+=\s*+"((?:[^"\\\n]|\\.)*+)"\s*+,?+'
_LABELS: Final = re.compile(_LABEL)
_LINE: Final = re.compile(
    rb"([a-zA-Z_:][\w:]*+)\s*+(?:\{((?:" + _LABEL + rb")*+)\s*+\})?+"
    rb"\s*+([^\s{}]++)(?:\s++-?[\d.]++)?+\s*+(?:#.*+)?+\Z"
)
_ESCAPE: Final = re.compile(r'\\([\\n"])')


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSample:
    """What one page says about one engine, or about all engines of a server together.

    Attributes:
        running: requests in the batch.
        waiting: requests in the engine's own queue.
        deferred: of these, what could not start yet whatever room there is: mostly it waits for KV
            memory from a prefill worker.
        kv_use: used share of the KV cache, 0..1; of several engines the share of their total,
            or the largest when their capacities are not told.
        block_tokens: KV block size.
        kv_capacity_tokens: tokens the KV cache can hold.
        token_latency_sum_s: seconds between output tokens, summed since the engine's start.
        token_latency_count: how many such gaps; d(sum)/d(count) is one decode iteration.
        preemptions_total: requests thrown out of the batch since the start.
        generation_tokens_total: output tokens since the start.
        requests_succeeded_total: requests ended well since the start, for any finish reason.
        queue_time_sum_s: seconds spent in the engine's own queue, summed since the start.
        queue_time_count: requests counted in it.
        prefix_queries_total: prompt tokens looked up in the prefix cache since the start.
        prefix_hits_total: of these, found there.
    """

    running: int | None = None
    waiting: int | None = None
    deferred: int | None = None
    kv_use: float | None = None
    block_tokens: int | None = None
    kv_capacity_tokens: int | None = None
    token_latency_sum_s: float | None = None
    token_latency_count: int | None = None
    preemptions_total: int | None = None
    generation_tokens_total: int | None = None
    requests_succeeded_total: int | None = None
    queue_time_sum_s: float | None = None
    queue_time_count: int | None = None
    prefix_queries_total: int | None = None
    prefix_hits_total: int | None = None

    @property
    def kv_tokens_used(self) -> int | None:
        """Tokens in allocated KV blocks."""
        if self.kv_use is None or self.kv_capacity_tokens is None:
            return None
        return round(self.kv_use * self.kv_capacity_tokens)

    def filled_from(self, earlier: EngineSample) -> EngineSample:
        """The same, and what it does not tell as an earlier page told it."""
        untold = (spec.name for spec in fields(self) if getattr(self, spec.name) is None)
        return replace(self, **{name: getattr(earlier, name) for name in untold})

    @property
    def is_empty(self) -> bool:
        """Whether the page said nothing at all."""
        return all(getattr(self, spec.name) is None for spec in fields(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePage:
    """A parsed page.

    Attributes:
        total: all engines together.
        engines: by `engine` label; "" where a page has no such label.
        process_start_s: Unix time at which the server process started.
        malformed_lines: lines of wanted series that could not be read.
    """

    total: EngineSample
    engines: Mapping[str, EngineSample]
    process_start_s: float | None = None
    malformed_lines: int = 0


@dataclass(slots=True)
class _Engine:
    """Values of one `engine` label while the page is read."""

    values: dict[bytes, float] = field(default_factory=dict)
    block_tokens: int | None = None
    kv_capacity_tokens: int | None = None

    def add(self, name: bytes, value: float) -> None:
        """Count a value; shares of a cache are not additive."""
        if name in _KV_USE:
            self.values[name] = max(value, self.values.get(name, 0.0))
        else:
            self.values[name] = value + self.values.get(name, 0.0)

    def sample(self) -> EngineSample:
        """Freeze what was read; new series names win over old ones."""
        token_latency = _pair(self.values, _TOKEN_LATENCY)
        queue_time = _pair(self.values, _QUEUE_TIME)
        shares = [self.values[name] for name in _KV_USE if name in self.values]
        return EngineSample(
            running=_whole(self.values.get(_RUNNING)),
            waiting=_whole(self.values.get(_WAITING)),
            deferred=_whole(self.values.get(_WAITING_BY_REASON)),
            kv_use=shares[0] if shares else None,
            block_tokens=self.block_tokens,
            kv_capacity_tokens=self.kv_capacity_tokens,
            token_latency_sum_s=token_latency[0],
            token_latency_count=_whole(token_latency[1]),
            preemptions_total=_whole(self.values.get(_PREEMPTIONS)),
            generation_tokens_total=_whole(self.values.get(_GENERATION_TOKENS)),
            requests_succeeded_total=_whole(self.values.get(_REQUEST_SUCCESS)),
            queue_time_sum_s=queue_time[0],
            queue_time_count=_whole(queue_time[1]),
            prefix_queries_total=_whole(_first(self.values, _PREFIX_QUERIES)),
            prefix_hits_total=_whole(_first(self.values, _PREFIX_HITS)),
        )


class _Page:
    """A page while it is read, one wanted line at a time."""

    def __init__(self) -> None:
        self.engines: dict[str, _Engine] = {}
        self.process_start_s: float | None = None
        self.malformed_lines = 0

    def add(self, name: bytes, line: bytes) -> None:
        """Read a line of a wanted series, or count it as malformed."""
        read = _read(line)
        if read is None:
            self.malformed_lines += 1
            return
        labels, value = read
        if name == _PROCESS_START:
            self.process_start_s = value
            return
        label = _text(labels.get(b"engine", b""))
        if label not in self.engines and len(self.engines) >= ENGINES_MAX:
            self.malformed_lines += 1
            return
        engine = self.engines.setdefault(label, _Engine())
        if name == _WAITING_BY_REASON and labels.get(b"reason") != b"deferred":
            return
        if name != _CACHE_CONFIG:
            engine.add(name, value)
        elif not _read_cache_config(engine, labels):
            self.malformed_lines += 1

    def freeze(self) -> EnginePage:
        """Return what was read."""
        samples = {label: engine.sample() for label, engine in self.engines.items()}
        return EnginePage(
            total=_total(tuple(samples.values())),
            engines=samples,
            process_start_s=self.process_start_s,
            malformed_lines=self.malformed_lines,
        )


def parse_engine_page(page: bytes) -> EnginePage:
    """Read a Prometheus text page as vLLM serves it, of any size and however broken.

    Lines of wanted series that cannot be read (bad syntax, not a number from 0 to VALUE_MAX) are
    skipped and counted; nothing raises.
    """
    reading = _Page()
    for line in page.split(b"\n"):
        # The value of a line without labels stands behind a blank.
        name = line.partition(b"{")[0].partition(b" ")[0]
        if name in _WANTED:
            reading.add(name, line)
    return reading.freeze()


def _read(line: bytes) -> tuple[dict[bytes, bytes], float] | None:
    """Labels and value of a sample line; None when it is not one, or not from 0 to VALUE_MAX."""
    match = _LINE.match(line)
    if match is None:
        return None
    try:
        value = float(match[5])
    except ValueError:
        return None
    if not 0 <= value <= VALUE_MAX:
        return None
    return dict(_LABELS.findall(match[2] or b"")), value


def _read_cache_config(engine: _Engine, labels: Mapping[bytes, bytes]) -> bool:
    """Learn block size and capacity from the labels of the info series; False if they are absent.

    vLLM keeps one block for itself: the usage gauge is a share of num_gpu_blocks - 1, and so is
    what requests can get. Its own kv_cache_size_tokens counts that block (and knows about layers
    that share blocks), so it is scaled down. With data parallelism num_gpu_blocks is the sum over
    all engines, kv_cache_size_tokens that of one.
    """
    block_tokens = _positive(labels.get(b"block_size"))
    blocks = _positive(labels.get(b"num_gpu_blocks"))
    told_tokens = _positive(labels.get(b"kv_cache_size_tokens"))
    engine.block_tokens = block_tokens
    if blocks is not None and blocks > 1 and (told_tokens or block_tokens):
        tokens = told_tokens if told_tokens is not None else blocks * (block_tokens or 0)
        own = tokens // block_tokens if block_tokens else blocks
        if own == 0 or blocks % own:
            own = blocks
        engine.kv_capacity_tokens = tokens * (own - 1) // own or None
    else:
        engine.kv_capacity_tokens = told_tokens
    return block_tokens is not None or engine.kv_capacity_tokens is not None


def _text(label: bytes) -> str:
    """A label's value with its escapes undone."""
    text = label.decode(errors="replace")
    return _ESCAPE.sub(lambda escape: "\n" if escape[1] == "n" else escape[1], text)


def _positive(label: bytes | None) -> int | None:
    """A label that holds a whole number >= 1 (vLLM writes "None" before it has sized its cache)."""
    if label is None or not (label.isdigit() and len(label) <= 18):
        return None
    return int(label) or None


def _pair(
    values: Mapping[bytes, float], names: Iterable[bytes]
) -> tuple[float, float] | tuple[None, None]:
    """Sum and count of the first histogram that has both; never a mixture of two."""
    for name in names:
        total, count = values.get(name + b"_sum"), values.get(name + b"_count")
        if total is not None and count is not None:
            return total, count
    return None, None


def _first(values: Mapping[bytes, float], names: Iterable[bytes]) -> float | None:
    """The value of the first series that is there."""
    return next((values[name] for name in names if name in values), None)


def _whole(value: float | None) -> int | None:
    """A count, kept unknown when it is unknown."""
    return None if value is None else round(value)


def _total(samples: tuple[EngineSample, ...]) -> EngineSample:
    """Engines together: everything adds up except shares and the block size.

    A value that some engines tell and others do not is the sum of those that do.
    """
    block_sizes = [s.block_tokens for s in samples if s.block_tokens is not None]
    return EngineSample(
        running=_sum(s.running for s in samples),
        waiting=_sum(s.waiting for s in samples),
        deferred=_sum(s.deferred for s in samples),
        kv_use=_total_share(samples),
        block_tokens=max(block_sizes) if block_sizes else None,
        kv_capacity_tokens=_sum(s.kv_capacity_tokens for s in samples),
        token_latency_sum_s=_sum(s.token_latency_sum_s for s in samples),
        token_latency_count=_sum(s.token_latency_count for s in samples),
        preemptions_total=_sum(s.preemptions_total for s in samples),
        generation_tokens_total=_sum(s.generation_tokens_total for s in samples),
        requests_succeeded_total=_sum(s.requests_succeeded_total for s in samples),
        queue_time_sum_s=_sum(s.queue_time_sum_s for s in samples),
        queue_time_count=_sum(s.queue_time_count for s in samples),
        prefix_queries_total=_sum(s.prefix_queries_total for s in samples),
        prefix_hits_total=_sum(s.prefix_hits_total for s in samples),
    )


def _sum(values: Iterable[_Number | None]) -> _Number | None:
    """Sum of the known values; None when none is known."""
    known = [value for value in values if value is not None]
    return sum(known[1:], start=known[0]) if known else None


def _total_share(samples: tuple[EngineSample, ...]) -> float | None:
    """Used share of the summed cache; the largest share when a capacity is missing."""
    shares = [s.kv_use for s in samples if s.kv_use is not None]
    if not shares:
        return None
    known = [s for s in samples if s.kv_tokens_used is not None]
    if len(known) < len(samples):
        return max(shares)
    capacity = sum(s.kv_capacity_tokens or 0 for s in known)
    return sum((s.kv_use or 0.0) * (s.kv_capacity_tokens or 0) for s in known) / capacity
