"""Pages recorded from real vLLM versions (tests/vllm/pages) tell everything that we ask for."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from service.engine_metrics import EngineSample, parse_engine_page

PAGES = sorted((Path(__file__).parents[1] / "vllm" / "pages").glob("*.txt"))
# What record_page.py sent to every version before it read the page.
REQUESTS = 12
DECODE_TOKENS = 40
# Their pages come from a registry that several processes share, which does not tell it.
WITHOUT_START_TIME = ("0.8.5.post2",)

# They do not say why requests wait.
WITHOUT_DEFERRED = ("0.8.5.post2", "0.11.1.post2")
WITHOUT_PREFIXES = ("0.8.5.post2",)


def by_the_general_parser(page: str) -> dict[str, float]:
    """Every sample summed over its labels, by prometheus_client's own parser."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


def test_at_least_three_versions_were_recorded() -> None:
    assert len(PAGES) >= 3


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_recorded_page_tells_all_that_a_report_needs(path: Path) -> None:
    page = parse_engine_page(path.read_bytes())
    told = page.total
    assert page.malformed_lines == 0
    assert (page.process_start_s is None) == (path.stem in WITHOUT_START_TIME)
    untold = ["deferred"] if path.stem in WITHOUT_DEFERRED else []
    untold += ["prefix_queries_total", "prefix_hits_total"] * (path.stem in WITHOUT_PREFIXES)
    assert [name for name in EngineSample.__slots__ if getattr(told, name) is None] == untold


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_recorded_page_counts_the_requests_that_were_sent(path: Path) -> None:
    told = parse_engine_page(path.read_bytes()).total
    assert told.requests_succeeded_total == REQUESTS
    assert told.generation_tokens_total == REQUESTS * DECODE_TOKENS
    assert told.queue_time_count == REQUESTS
    # The first token of a request ends no gap.
    assert told.token_latency_count == REQUESTS * (DECODE_TOKENS - 1)
    assert told.running == told.waiting == 0
    assert told.kv_tokens_used == 0


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_the_scan_agrees_with_the_general_parser_on_a_recorded_page(path: Path) -> None:
    told = parse_engine_page(path.read_bytes()).total
    sums = by_the_general_parser(path.read_text())
    assert told.generation_tokens_total == sums["vllm:generation_tokens_total"]
    assert told.queue_time_sum_s == pytest.approx(sums["vllm:request_queue_time_seconds_sum"])
    latency = next(
        sums[name]
        for name in (
            "vllm:inter_token_latency_seconds_sum",
            "vllm:time_per_output_token_seconds_sum",
        )
        if name in sums
    )
    assert told.token_latency_sum_s == pytest.approx(latency)
