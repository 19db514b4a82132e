"""Summaries count every request, compare with round robin, and reports are rebuilt from records."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from loadgen.comparison import comparison_rows, seconds_text
from loadgen.outcomes import OUTCOMES_FILE, End, OutcomeRecord, write_outcomes
from loadgen.replay_command import exit_status
from loadgen.report import PAGE_FILE, PICTURE_FILE, rebuild, warnings, write_report
from loadgen.summary import SUMMARY_FILE, RunContext, summarize

if TYPE_CHECKING:
    from pathlib import Path


def record(policy: str, index: int, **changes: object) -> OutcomeRecord:
    base: dict[str, object] = {
        "policy": policy,
        "index": index,
        "arrival_s": index * 1.0,
        "sent_s": index * 1.0,
        "prompt_tokens": 8,
        "decode_tokens": 10,
        "outcome": End.COMPLETED,
        "status": 200,
        "ttft_s": 0.5,
        "e2e_s": 2.0,
        "output_tokens": 10,
    }
    return OutcomeRecord(**(base | changes))  # type: ignore[arg-type]


def two_policies() -> list[OutcomeRecord]:
    return [
        *(
            record("round_robin", index, ttft_s=2.0 + index, e2e_s=4.0 + index)
            for index in range(4)
        ),
        record("online_lp", 0, ttft_s=0.2),
        record("online_lp", 1, ttft_s=3.0),
        record("online_lp", 2, outcome=End.REFUSED, ttft_s=None, output_tokens=0, detail="full"),
        record("online_lp", 3, outcome=End.FAILED, ttft_s=0.1, output_tokens=4, detail="died"),
    ]


def test_every_end_is_counted_once_and_a_missing_one_shows() -> None:
    context = RunContext(sent={"round_robin": 4, "online_lp": 5})
    policies: Any = summarize(two_policies(), context)["policies"]
    lp = policies["online_lp"]
    assert (lp["completed"], lp["refused"], lp["cancelled"], lp["failed"]) == (2, 1, 0, 1)
    assert lp["entered"] == 5
    assert lp["accounted"] is False
    assert policies["round_robin"]["accounted"] is True
    assert lp["reasons"] == {"full": 1, "died": 1}
    assert "accounted" in " ".join(warnings(summarize(two_policies(), context)))


def test_latencies_are_of_completed_requests_and_the_bound_counts_all() -> None:
    summary: Any = summarize(two_policies(), RunContext(ttft_bound_s=1.0))
    lp = summary["policies"]["online_lp"]
    assert lp["ttft_s"]["mean"] == pytest.approx(1.6)
    assert lp["ttft_s"]["p50"] == pytest.approx(1.6)
    assert lp["share_ttft_within_bound"] == pytest.approx(1 / 4)
    assert lp["output_tokens_per_s"] == pytest.approx(24 / 5.0)
    ratio = summary["ratio_to_round_robin"]
    assert ratio["online_lp"]["ttft_s"]["mean"] == pytest.approx(1.6 / 3.5)
    assert ratio["round_robin"]["e2e_s"]["p99"] == 1.0


def test_a_requests_own_bound_goes_before_the_common_one() -> None:
    records = [record("p", 0, ttft_s=0.5, ttft_bound_s=0.4), record("p", 1, ttft_s=0.5)]
    summary: Any = summarize(records, RunContext(ttft_bound_s=1.0))
    assert summary["policies"]["p"]["share_ttft_within_bound"] == 0.5


def test_a_policy_without_one_success_has_nulls_not_zeros() -> None:
    records = [record("round_robin", 0, outcome=End.CANCELLED, ttft_s=None, output_tokens=0)]
    summary: Any = summarize(records, RunContext())
    assert summary["policies"]["round_robin"]["ttft_s"]["mean"] is None
    assert next(row.pairs[0][0] for row in comparison_rows(summary)) == "-"


class _Links(HTMLParser):
    """Collects what a page would fetch, and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [value or "" for name, value in attrs if name in {"src", "href"}]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_stands_alone_and_says_what_came_out(tmp_path: Path) -> None:
    context = RunContext(command="make demo", setting={"workers": 4, "note": "<b>&"})
    write_report(two_policies(), context, tmp_path)
    page = _Links()
    page.feed((tmp_path / PAGE_FILE).read_text())
    assert all(link.startswith("data:image/png;base64,") for link in page.fetched)
    assert "make demo" in page.text
    assert "<b>&" in page.text
    assert "0.46 times round robin's" in page.text
    assert (tmp_path / PICTURE_FILE).read_bytes().startswith(b"\x89PNG")


def test_a_report_is_rebuilt_from_its_records_alone(tmp_path: Path) -> None:
    write_outcomes(two_policies(), tmp_path / OUTCOMES_FILE)
    context = RunContext(
        command="make demo", ttft_bound_s=0.7, sent={"round_robin": 4, "online_lp": 4}
    )
    write_report(two_policies(), context, tmp_path)
    before = (tmp_path / SUMMARY_FILE).read_bytes()
    (tmp_path / PAGE_FILE).unlink()
    rebuild(tmp_path)
    assert (tmp_path / SUMMARY_FILE).read_bytes() == before
    assert (tmp_path / PAGE_FILE).is_file()
    (tmp_path / SUMMARY_FILE).unlink()
    assert orjson.dumps(rebuild(tmp_path)["policies"])


def test_a_folder_without_records_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no outcomes.jsonl"):
        rebuild(tmp_path)
    write_outcomes(two_policies(), tmp_path / OUTCOMES_FILE)
    (tmp_path / SUMMARY_FILE).write_text("[]")
    with pytest.raises(ValueError, match="not a summary"):
        rebuild(tmp_path)


def test_durations_are_written_with_their_unit() -> None:
    assert [seconds_text(value) for value in (0.00012, 0.0123, 1.234, 250.0)] == [
        "120 µs",
        "12.3 ms",
        "1.23 s",
        "250 s",
    ]


def test_what_should_make_a_reader_doubt_is_said() -> None:
    late = [record("p", index, sent_s=index + 0.2, output_tokens=9) for index in range(3)]
    died = [record("p", 3, outcome=End.FAILED, ttft_s=None, detail="died")]
    context = RunContext(setting={"share_of_processors_used": {"p": 0.95, "q": 0.2}})
    said = warnings(summarize([*late, *died], context))
    assert any("sent late" in sentence for sentence in said)
    assert any("1 requests failed" in sentence for sentence in said)
    assert any("another length" in sentence for sentence in said)
    assert any("95%" in sentence for sentence in said)
    clean = summarize([record("p", index) for index in range(3)], RunContext())
    assert warnings(clean) == []


def test_a_replay_of_which_nothing_was_answered_fails() -> None:
    refused = [record("x", index, outcome=End.REFUSED) for index in range(3)]
    assert exit_status(refused, 3) == 1
    assert exit_status([*refused, record("x", 3)], 4) == 0
    assert exit_status([record("x", 0)], 2) == 1
    assert exit_status([], 0) == 1
