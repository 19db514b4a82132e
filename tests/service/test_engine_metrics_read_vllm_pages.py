"""The targeted scan against prometheus_client's own parser, and against pages written by hand."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from service.control.events import Role
from service.engine_metrics import (
    ENGINES_MAX,
    WANTED_SERIES,
    EngineSample,
    parse_engine_page,
)
from service.engine_reports import EngineReports
from service.worker_config import WorkerConfig

NEW_PAGE = b"""\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 7.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 3.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="deferred"} 1.0
vllm:engine_sleep_state{engine="0",model_name="tiny",sleep_state="awake"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.5
vllm:cache_config_info{block_size="128",cache_dtype="auto",engine="0",\
kv_cache_size_tokens="524288",num_gpu_blocks="4096",sliding_window="None"} 1.0
vllm:num_preemptions_total{engine="0",model_name="tiny"} 5.0
vllm:num_preemptions_created{engine="0",model_name="tiny"} 1.7644e+09
vllm:generation_tokens_total{engine="0",model_name="tiny"} 1.2e+03
vllm:request_success_total{engine="0",finished_reason="stop",model_name="tiny"} 4.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny"} 6.0
vllm:inter_token_latency_seconds_bucket{engine="0",le="0.01",model_name="tiny"} 900.0
vllm:inter_token_latency_seconds_bucket{engine="0",le="+Inf",model_name="tiny"} 1000.0
vllm:inter_token_latency_seconds_count{engine="0",model_name="tiny"} 1000.0
vllm:inter_token_latency_seconds_sum{engine="0",model_name="tiny"} 9.5
vllm:request_queue_time_seconds_count{engine="0",model_name="tiny"} 10.0
vllm:request_queue_time_seconds_sum{engine="0",model_name="tiny"} 0.25
process_start_time_seconds 1.76441234567e+09
"""

OLD_PAGE = b"""\
vllm:num_requests_running{model_name="old"} 7.0
vllm:num_requests_waiting{model_name="old"} 3.0
vllm:gpu_cache_usage_perc{model_name="old"} 0.5
vllm:cpu_cache_usage_perc{model_name="old"} 0.9
vllm:cache_config_info{block_size="16",num_gpu_blocks="1001",cache_dtype="auto"} 1.0
vllm:time_per_output_token_seconds_sum{model_name="old"} 9.5
vllm:time_per_output_token_seconds_count{model_name="old"} 1000.0
"""


def test_a_page_in_the_new_naming() -> None:
    page = parse_engine_page(NEW_PAGE)
    assert page.total == EngineSample(
        running=7,
        waiting=3,
        deferred=1,
        kv_use=0.5,
        block_tokens=128,
        kv_capacity_tokens=4095 * 128,
        token_latency_sum_s=9.5,
        token_latency_count=1000,
        preemptions_total=5,
        generation_tokens_total=1200,
        requests_succeeded_total=10,
        queue_time_sum_s=0.25,
        queue_time_count=10,
    )
    assert page.total.kv_tokens_used == 262_080
    assert page.process_start_s == 1.76441234567e9
    assert page.malformed_lines == 0


@pytest.mark.parametrize(("role", "waiting"), [(Role.DECODE, 2), (Role.BOTH, 3), (Role.PREFILL, 3)])
def test_a_decode_workers_requests_that_fetch_their_prompt_are_no_queue(
    role: Role, waiting: int
) -> None:
    worker = WorkerConfig(worker_id="w", url="http://w", batch_limit=8, role=role)
    assert EngineReports(worker).report(parse_engine_page(NEW_PAGE)).waiting == waiting
    assert EngineReports(worker).report(parse_engine_page(OLD_PAGE)).waiting == 3


def test_a_page_in_the_old_naming_reads_the_same() -> None:
    page = parse_engine_page(OLD_PAGE)
    assert (page.total.running, page.total.waiting, page.total.kv_use) == (7, 3, 0.5)
    assert (page.total.token_latency_sum_s, page.total.token_latency_count) == (9.5, 1000)
    assert page.total.kv_capacity_tokens == 16_000
    assert page.total.kv_tokens_used == 8_000
    assert list(page.engines) == [""]


def test_with_both_namings_on_one_page_the_new_one_counts_once() -> None:
    page = parse_engine_page(
        b'vllm:kv_cache_usage_perc{engine="0"} 0.25\n'
        b'vllm:gpu_cache_usage_perc{engine="0"} 0.25\n'
        b'vllm:inter_token_latency_seconds_sum{engine="0"} 2\n'
        b'vllm:inter_token_latency_seconds_count{engine="0"} 100\n'
        b'vllm:time_per_output_token_seconds_sum{engine="0"} 3\n'
        b'vllm:time_per_output_token_seconds_count{engine="0"} 110\n'
    )
    assert page.total.kv_use == 0.25
    assert (page.total.token_latency_sum_s, page.total.token_latency_count) == (2, 100)


def test_a_histogram_without_its_count_gives_way_to_one_that_is_whole() -> None:
    page = parse_engine_page(
        b"vllm:inter_token_latency_seconds_sum 2\n"
        b"vllm:time_per_output_token_seconds_sum 3\n"
        b"vllm:time_per_output_token_seconds_count 110\n"
    )
    assert (page.total.token_latency_sum_s, page.total.token_latency_count) == (3, 110)


def test_what_a_page_does_not_tell_is_unknown_and_not_zero() -> None:
    page = parse_engine_page(b"vllm:num_requests_running 0\n")
    assert page.total == EngineSample(running=0)
    assert page.total.kv_tokens_used is None
    assert not page.total.is_empty
    for empty in (b"", b"\n\n", b"python_gc_objects_collected_total 12\n", b"<html>no</html>"):
        assert parse_engine_page(empty).total.is_empty
        assert parse_engine_page(empty).malformed_lines == 0


def test_engines_are_added_up_and_the_last_one_does_not_win() -> None:
    lines = []
    for rank, (running, waiting, share) in enumerate([(8, 5, 0.9), (1, 0, 0.1), (2, 0, 0.2)]):
        labels = f'{{engine="{rank}",model_name="m"}}'
        lines += [
            f"vllm:num_requests_running{labels} {running}",
            f"vllm:num_requests_waiting{labels} {waiting}",
            f"vllm:kv_cache_usage_perc{labels} {share}",
            f'vllm:cache_config_info{{engine="{rank}",block_size="10",num_gpu_blocks="101"}} 1',
        ]
    page = parse_engine_page("\n".join(lines).encode())
    assert (page.total.running, page.total.waiting) == (11, 5)
    assert page.total.kv_capacity_tokens == 3000
    assert page.total.kv_tokens_used == 1200
    assert page.engines["1"].running == 1
    assert page.engines["0"].kv_tokens_used == 900


def test_without_capacities_the_fullest_cache_speaks_for_all() -> None:
    page = parse_engine_page(
        b'vllm:kv_cache_usage_perc{engine="0"} 0.2\nvllm:kv_cache_usage_perc{engine="1"} 0.8\n'
    )
    assert page.total.kv_use == 0.8
    assert page.total.kv_tokens_used is None


def test_a_cache_that_has_not_been_sized_yet_has_no_capacity() -> None:
    page = parse_engine_page(b'vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1\n')
    assert page.total.kv_capacity_tokens is None
    assert page.total.block_tokens == 16


def test_broken_lines_are_skipped_and_counted() -> None:
    page = parse_engine_page(
        b'vllm:num_requests_running{engine="0"} seven\n'
        b'vllm:num_requests_running{engine="0" 7\n'
        b'vllm:num_requests_running{engine="0"}\n'
        b"vllm:num_requests_running\n"
        b'vllm:num_requests_waiting{engine="0"} NaN\n'
        b'vllm:num_requests_waiting{engine="0"} +Inf\n'
        b'vllm:num_requests_waiting{engine="0"} -1\n'
        b'vllm:cache_config_info{engine="0"} 1\n'
        b'vllm:kv_cache_usage_perc{engine="0"} 0.5\r\n'
        b"vllm:num_requests_wai"
    )
    assert page.malformed_lines == 8
    assert page.total == EngineSample(kv_use=0.5)


def test_label_values_may_hold_anything_the_format_allows() -> None:
    page = parse_engine_page(
        b"vllm:num_requests_running"
        b'{model_name="a } \\"b\\" , engine=\\"9\\" # {",engine="0"} 3 17644\n'
    )
    assert page.engines["0"].running == 3
    assert page.malformed_lines == 0


def test_a_hostile_number_of_engines_is_cut_off() -> None:
    page = parse_engine_page(
        b"\n".join(b'vllm:num_requests_running{engine="%d"} 1' % i for i in range(ENGINES_MAX + 9))
    )
    assert len(page.engines) == ENGINES_MAX
    assert page.malformed_lines == 9


counts = st.integers(min_value=0, max_value=10**9)
label_values = st.text(max_size=8).filter(lambda text: "\r" not in text)


@st.composite
def registries(draw: st.DrawFn) -> CollectorRegistry:
    """A registry that holds some of vLLM's series for some engines, and others."""
    registry = CollectorRegistry()
    model = draw(label_values)
    engines = draw(st.lists(label_values, min_size=1, max_size=4, unique=True))
    kv_name = draw(st.sampled_from(["vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"]))
    latency_name = draw(
        st.sampled_from(["vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"])
    )
    labels = ["model_name", "engine"]
    running = Gauge("vllm:num_requests_running", "r", labels, registry=registry)
    waiting = Gauge("vllm:num_requests_waiting", "w", labels, registry=registry)
    kv_use = Gauge(kv_name, "k", labels, registry=registry)
    success = Counter("vllm:request_success", "s", [*labels, "finished_reason"], registry=registry)
    latency = Histogram(latency_name, "l", labels, registry=registry)
    Gauge("vllm:lora_requests_info", "x", registry=registry).set(draw(counts))
    for engine in engines:
        running.labels(model, engine).set(draw(counts))
        if draw(st.booleans()):
            waiting.labels(model, engine).set(draw(counts))
        kv_use.labels(model, engine).set(draw(st.floats(0, 1)))
        for reason in draw(st.sets(label_values, max_size=3)):
            success.labels(model, engine, reason).inc(draw(counts))
        for gap_s in draw(st.lists(st.floats(0, 10), max_size=5)):
            latency.labels(model, engine).observe(gap_s)
    return registry


def read_by_the_oracle(page: bytes) -> dict[str, dict[str, float]]:
    """Every sample of the page, summed over all labels but `engine`."""
    sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            sums[sample.labels.get("engine", "")][sample.name] += sample.value
    return sums


@given(registries())
def test_the_scan_agrees_with_the_general_parser(registry: CollectorRegistry) -> None:
    page = generate_latest(registry)
    parsed = parse_engine_page(page)
    truth = read_by_the_oracle(page)
    assert parsed.malformed_lines == 0
    engines = {label for label, series in truth.items() if "vllm:num_requests_running" in series}
    assert set(parsed.engines) == engines
    for label in engines:
        series, sample = truth[label], parsed.engines[label]
        assert sample.running == series["vllm:num_requests_running"]
        assert sample.waiting == series.get("vllm:num_requests_waiting")
        assert sample.requests_succeeded_total == series.get("vllm:request_success_total")
        for name in ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"):
            if name + "_count" in series:
                assert sample.token_latency_count == series[name + "_count"]
                assert sample.token_latency_sum_s is not None
                assert math.isclose(sample.token_latency_sum_s, series[name + "_sum"])
        assert sample.kv_use in (
            series.get("vllm:kv_cache_usage_perc"),
            series.get("vllm:gpu_cache_usage_perc"),
        )
    assert parsed.total.running == sum(truth[e]["vllm:num_requests_running"] for e in engines)


@given(st.binary(max_size=400))
def test_no_bytes_make_it_raise(noise: bytes) -> None:
    parse_engine_page(noise)
    for name in WANTED_SERIES:
        parse_engine_page(name.encode() + noise)
        parse_engine_page(name.encode() + b"{" + noise)


@settings(max_examples=200)
@given(st.integers(0, len(NEW_PAGE)), st.binary(max_size=4))
def test_damage_to_one_line_costs_that_line_only(position: int, noise: bytes) -> None:
    damaged = NEW_PAGE[:position] + noise.replace(b"\n", b"") + NEW_PAGE[position:]
    whole, read = parse_engine_page(NEW_PAGE).total, parse_engine_page(damaged).total
    differing = [
        name for name in EngineSample.__slots__ if getattr(whole, name) != getattr(read, name)
    ]
    # One line feeds at most the two fields of a cache's layout, or the two of a histogram.
    assert len(differing) <= 2


def test_a_long_line_without_an_end_takes_one_pass() -> None:
    # Quadratic or exponential matching of this line would run into the suite's timeout.
    parse_engine_page(b"vllm:num_requests_running{" + b'a="b" ' * 200_000 + b"!")


def test_absurd_numbers_are_malformed_and_cannot_overflow_a_sum() -> None:
    line = b'vllm:num_requests_running{engine="0"} 1e308\n'
    page = parse_engine_page(line * 3 + b'vllm:num_requests_running{engine="0"} 2\n')
    assert (page.total.running, page.malformed_lines) == (2, 3)
    assert parse_engine_page(b"process_start_time_seconds 1e300\n").process_start_s is None
