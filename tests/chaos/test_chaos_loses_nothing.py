"""Workers that fail in every way, clients that leave: every request ends once, nothing is left."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import httptools
import orjson
import pytest

from loadgen.chaos import run_chaos
from loadgen.chaos_faults import plan_faults
from loadgen.chaos_judge import Answer, End, judge
from loadgen.chaos_keys import KEY_WEIGHTS, LIMITED, STRANGE, Key, let_in_most, per_minute
from loadgen.chaos_plan import STORED, ChaosSpec, Kind, PlannedRequest, plan_requests
from loadgen.chaos_requests import request_bytes
from loadgen.chaos_texts import CHECKED, expected_text, wrong_text
from loadgen.chaos_verdict import (
    MEMORY_GROWTH_MAX_MIB,
    MEMORY_SAMPLES_MIN,
    Books,
    memory_growth_max_mib,
    memory_growth_mib,
    read_page,
)
from loadgen.soak_command import PREFILL_WORKERS
from service.auth import Limit
from service.mock.faults import NONSENSE, OF_PREFILL, Fault

SECONDS = 8.0
FAULTS_PER_S = 2.0
SERVED_AT_LEAST = 20
PAIR_SECONDS = 6.0
PAIR_FAULTS_PER_S = 3.0


@pytest.mark.timeout(300)  # slow machines: three processes share what there is
async def test_a_short_run_with_every_fault_and_every_kind_of_request_loses_nothing(
    tmp_path: Path,
) -> None:
    report = await run_chaos(
        ChaosSpec(duration_s=SECONDS, seed=1, faults_per_s=FAULTS_PER_S), tmp_path
    )
    assert report.troubles == []
    assert report.wrong == []
    assert orjson.loads(orjson.dumps(report.figures()))["requests"] == report.requests
    # It was chaos: every fault was done, and clients ended in all ways; how many is the machine's.
    assert set(report.faults) == set(Fault) - OF_PREFILL
    ends = {End.COMPLETED, End.REFUSED, End.LEFT, End.LIMITED, End.LOCKED_OUT}
    assert ends <= set(report.ends) <= ends | {End.FAILED}
    assert report.ends[End.COMPLETED] > SERVED_AT_LEAST
    assert {Limit.REQUESTS_MAX, Limit.REQUESTS_PER_MINUTE} <= set(report.after.limited_by)


@pytest.mark.timeout(300)
async def test_a_short_run_of_prefill_and_decode_workers_loses_nothing(tmp_path: Path) -> None:
    report = await run_chaos(
        ChaosSpec(
            duration_s=PAIR_SECONDS,
            seed=1,
            faults_per_s=PAIR_FAULTS_PER_S,
            prefill_workers=PREFILL_WORKERS,
        ),
        tmp_path,
    )
    assert report.troubles == []
    assert report.wrong == []
    assert Fault.SILENCE in report.faults
    assert report.ends[End.COMPLETED] > SERVED_AT_LEAST
    # Prompts were passed on, and not all of them could be.
    assert report.after.handoffs > SERVED_AT_LEAST
    assert report.after.handoffs_failed


def test_the_same_seed_is_the_same_plan_and_another_seed_is_not() -> None:
    spec = ChaosSpec(duration_s=30.0, seed=3)
    assert plan_requests(spec) == plan_requests(spec)
    assert plan_faults(spec) == plan_faults(spec)
    other = replace(spec, seed=4)
    assert plan_requests(other) != plan_requests(spec)
    assert plan_faults(other) != plan_faults(spec)


def test_a_plan_offers_the_load_that_was_asked_for_and_everything_that_can_go_wrong() -> None:
    spec = ChaosSpec(duration_s=120.0, load=1.2)
    requests, faults = plan_requests(spec), plan_faults(spec)
    work = sum(
        request.sequences * (request.decode_tokens + 1)
        for request in requests
        if request.key is Key.OPEN
    )
    assert work == pytest.approx(1.2 * 120.0 * spec.capacity_per_s, rel=0.01)
    assert {request.kind for request in requests} == set(Kind)
    assert {request.key for request in requests} == set(KEY_WEIGHTS) == set(Key)
    assert {fault.fault for fault in faults} == set(Fault) - OF_PREFILL
    assert len(requests) > 5000
    blackout = [fault for fault in faults if fault.at_s == 60.0]
    assert {fault.worker for fault in blackout} == set(range(spec.workers))


def test_prefill_workers_have_faults_of_their_own_and_are_all_away_once() -> None:
    spec = ChaosSpec(duration_s=120.0, prefill_workers=PREFILL_WORKERS)
    faults = plan_faults(spec)
    assert {fault.fault for fault in faults} == set(Fault)
    silent = [fault.worker for fault in faults if fault.fault in OF_PREFILL]
    assert silent
    assert max(silent) < PREFILL_WORKERS
    away = {fault.worker for fault in faults if fault.at_s == 40.0}
    assert away == set(range(PREFILL_WORKERS))
    assert plan_requests(spec) != plan_requests(replace(spec, prefill_workers=0))


def test_about_half_of_what_comes_with_a_slow_key_is_let_in_however_long_the_run() -> None:
    for seconds in (6.0, 60.0, 600.0):
        assert let_in_most(per_minute(1000, seconds), seconds) == pytest.approx(501.0)


EVENTS = {b"content-type": b"text/event-stream"}


@pytest.mark.parametrize(
    ("answer", "end"),
    [
        (Answer(200, EVENTS, bytearray(b"data: {}\n\ndata: [DONE]\n\n"), True), End.COMPLETED),
        (Answer(200, EVENTS, bytearray(b"data: {}\n\n"), True), End.WRONG),
        (Answer(200, EVENTS, bytearray(b"data: {}\n\ndata: [DONE]\n\n"), False), End.WRONG),
        (Answer(200, EVENTS, bytearray(b'data: {"error":{"code":"x"}}\n\n'), True), End.FAILED),
        (Answer(200, {}, bytearray(b"{}"), True), End.COMPLETED),
        (Answer(200, {}, bytearray(b"{"), False), End.FAILED),
        (Answer(200, {}, bytearray(NONSENSE), True), End.FAILED),
        (Answer(500, {}, bytearray(b'{"error":{"type":"server_error"}}'), True), End.WRONG),
        (Answer(502, {}, bytearray(b"bad gateway"), True), End.WRONG),
        (Answer(404, {}, bytearray(b"{}"), True), End.WRONG),
        (Answer(), End.WRONG),
    ],
)
def test_a_client_takes_nothing_for_a_success_that_is_none(answer: Answer, end: End) -> None:
    assert judge(Kind.STREAM, answer)[0] is end


RESPONSE_END = b'event: response.completed\ndata: {"type":"response.completed"}\n\n'
MESSAGE_END = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
ERROR_EVENT = b'event: error\ndata: {"error":{"code":"x"}}\n\n'
GONE = bytearray(b'{"error":{"type":"invalid_request_error"}}')


@pytest.mark.parametrize(
    ("kind", "answer", "end"),
    [
        (Kind.RESPONSE_STREAM, Answer(200, EVENTS, bytearray(RESPONSE_END), True), End.COMPLETED),
        (Kind.RESPONSE_STREAM, Answer(200, EVENTS, bytearray(MESSAGE_END), True), End.WRONG),
        (Kind.MESSAGE_STREAM, Answer(200, EVENTS, bytearray(MESSAGE_END), True), End.COMPLETED),
        (Kind.MESSAGE_STREAM, Answer(200, EVENTS, bytearray(MESSAGE_END), False), End.WRONG),
        (Kind.MESSAGE_STREAM, Answer(200, EVENTS, bytearray(ERROR_EVENT), True), End.FAILED),
        (Kind.SHOWN, Answer(404, {}, GONE, True), End.REFUSED),
        (Kind.DELETED, Answer(405, {}, GONE, True), End.REFUSED),
        (Kind.SHOWN, Answer(405, {}, GONE, True), End.WRONG),
        (Kind.NEWER_ROUTE, Answer(200, {}, bytearray(b"{}"), True), End.WRONG),
        (Kind.EMBEDDING, Answer(404, {}, GONE, True), End.WRONG),
        (Kind.AUDIO, Answer(200, {}, bytearray(b"{"), False), End.FAILED),
    ],
)
def test_every_format_is_judged_by_its_own_end(kind: Kind, answer: Answer, end: End) -> None:
    assert judge(kind, answer)[0] is end


def at_door(status: int, reason: str, again_s: str = "1") -> Answer:
    """What a client that is kept out reads."""
    headers = {b"x-bidgate-reason": reason.encode(), b"retry-after": again_s.encode()}
    body = bytearray(b'{"error":{"type":"rate_limit_error"}}')
    return Answer(status, headers, body, complete=True)


OVER = at_door(429, "rate_limit_exceeded")
UNKNOWN = at_door(401, "invalid_api_key")
SERVED = Answer(200, {}, bytearray(b"{}"), True)


@pytest.mark.parametrize(
    ("key", "answer", "end"),
    [
        *((key, OVER, End.LIMITED) for key in Key if key in LIMITED),
        *((key, SERVED, End.COMPLETED) for key in Key if key in LIMITED),
        *((key, UNKNOWN, End.LOCKED_OUT) for key in Key if key in STRANGE),
        *((key, SERVED, End.WRONG) for key in Key if key in STRANGE),
        *((key, UNKNOWN, End.WRONG) for key in Key if key not in STRANGE),
        (Key.OPEN, OVER, End.WRONG),
        (Key.OPEN, at_door(429, "queue_full"), End.REFUSED),
        (Key.FEW, at_door(429, "queue_full"), End.REFUSED),
        (Key.FEW, at_door(429, "rate_limit_exceeded", again_s="0"), End.WRONG),
        (Key.FEW, replace(OVER, complete=False), End.WRONG),
    ],
)
def test_a_key_is_kept_out_by_its_own_limits_alone(key: Key, answer: Answer, end: End) -> None:
    assert judge(Kind.WHOLE, answer, key)[0] is end


def test_the_text_of_another_prompt_is_a_wrong_answer() -> None:
    for kind in CHECKED:
        mine, other = (PlannedRequest(0.0, index, kind, 5, None, 0.0) for index in (1, 2))
        body = orjson.dumps({"choices": [{"text": expected_text(mine)}]})
        assert not wrong_text(mine, body)
        assert wrong_text(replace(mine, decode_tokens=6), body)
        # Every prompt of token ids is the same.
        assert wrong_text(other, body) is (kind is not Kind.TOKEN_IDS)


def test_the_text_of_a_stream_is_that_of_all_its_events() -> None:
    request = PlannedRequest(0.0, 1, Kind.CHAT_STREAM, 5, None, 0.0)
    parts = [{"choices": [{"delta": {"content": part}}]} for part in expected_text(request)]
    events = b"".join(b"data: %b\n\n" % orjson.dumps(part) for part in parts)
    assert not wrong_text(request, events + b"data: [DONE]\n\n")


def test_stored_responses_are_asked_for_once_there_is_one() -> None:
    plan = plan_requests(ChaosSpec(duration_s=30.0))
    kinds = {request.index: request.kind for request in plan}
    about = [request for request in plan if request.kind in STORED]
    assert all(kinds[one.about] is Kind.RESPONSE for one in about if one.about != one.index)
    assert sum(one.about != one.index for one in about) > len(about) / 2


@pytest.mark.parametrize("kind", list(Kind))
def test_what_is_sent_is_http_that_says_its_own_length(kind: Kind) -> None:
    seen = bytearray()

    class Reader:
        """What a server would see of it."""

        complete = False

        def on_body(self, part: bytes) -> None:
            seen.extend(part)

        def on_message_complete(self) -> None:
            self.complete = True

    reader = Reader()
    data = request_bytes(PlannedRequest(0.0, 1, kind, 3, None, 0.0, about=0), "chaos-1")
    httptools.HttpRequestParser(reader).feed_data(data)
    assert reader.complete
    assert data.endswith(bytes(seen))


PAGE = """\
# TYPE bidgate_queue_waiting gauge
bidgate_queue_waiting 0
# TYPE bidgate_worker_active gauge
bidgate_worker_active{worker="a"} 0
bidgate_worker_active{worker="b"} 2
# TYPE bidgate_responses counter
bidgate_responses_total{code="200"} 5
bidgate_responses_total{code="429"} 1
# TYPE process_resident_memory_bytes gauge
process_resident_memory_bytes 104857600
"""


def test_the_books_are_read_from_the_routers_own_page() -> None:
    books = read_page(PAGE)
    assert (books.active, books.answered, books.codes, books.workers) == (2, 6, 2, 2)
    assert books.memory_mib == 100.0
    assert not books.is_empty


def test_memory_that_grows_through_a_run_is_seen_and_a_peak_at_its_start_is_none() -> None:
    books = read_page(PAGE)

    def samples(memory_mib: list[float]) -> list[Books]:
        return [replace(books, memory_mib=each) for each in memory_mib]

    grows = samples([100.0 + number for number in range(50)])
    assert memory_growth_mib(grows) == 30.0
    assert memory_growth_mib(grows[:MEMORY_SAMPLES_MIN]) == 24.0
    assert memory_growth_mib(grows[: MEMORY_SAMPLES_MIN - 1]) == 0.0
    peak = samples([100.0] * 5 + [180.0] * 15 + [150.0] * 30)
    assert memory_growth_mib(peak) == -30.0
    # A queue that fills later than that may take memory.
    assert memory_growth_max_mib(grows) == MEMORY_GROWTH_MAX_MIB
    filled = [*grows[:-1], replace(grows[-1], waiting=200)]
    assert memory_growth_max_mib(filled) == MEMORY_GROWTH_MAX_MIB + 25.0
