"""The forwarder with workers mocked by respx: refused, reset before and after the first byte."""

from __future__ import annotations

import httpx
import pytest
import respx

from tests.clock import run_virtual
from tests.service.stage import DONE, Stage, TimedStream, completion, event

URL = "/v1/completions"
SSE = {"content-type": "text/event-stream"}


def play(router: respx.MockRouter, *, streams: bool) -> tuple[int, bytes, bool, dict[str, int]]:
    """Send one request to a stage of workers a and b that respx answers for."""

    async def scenario() -> tuple[int, bytes, bool, dict[str, int]]:
        transport = httpx.MockTransport(router.async_handler)
        async with Stage({"a": transport, "b": transport}).open() as stage:
            exchange = await stage.post(completion(stream=streams))
        return exchange.status, exchange.body, exchange.complete, stage.ends()

    return run_virtual(scenario())


@pytest.fixture
def workers() -> respx.MockRouter:
    """Workers that respx answers for; every call must have been expected."""
    return respx.MockRouter(assert_all_called=False)


@pytest.mark.parametrize("error", [httpx.ConnectError, httpx.ConnectTimeout])
def test_connect_refused_goes_to_the_other_worker(
    workers: respx.MockRouter, error: type[httpx.TransportError]
) -> None:
    refused = workers.post(f"http://a{URL}").mock(side_effect=error)
    served = workers.post(f"http://b{URL}").respond(json={"usage": {"completion_tokens": 2}})
    status, _, complete, ends = play(workers, streams=False)
    assert (status, complete, ends) == (200, True, {"completed": 1})
    assert refused.call_count <= 1
    assert served.call_count == 1


@pytest.mark.parametrize("error", [httpx.ReadError, httpx.RemoteProtocolError])
@pytest.mark.parametrize("streams", [False, True])
def test_reset_before_the_first_byte_is_a_502_and_no_second_try(
    workers: respx.MockRouter, error: type[httpx.TransportError], streams: bool
) -> None:
    both = workers.post(path=URL).mock(side_effect=error)
    status, body, _, ends = play(workers, streams=streams)
    assert (status, ends) == (502, {"failed": 1})
    assert b"worker_broke" in body
    assert both.call_count == 1


def test_reset_after_the_first_byte_ends_the_stream_with_an_error_event(
    workers: respx.MockRouter,
) -> None:
    parts = TimedStream([(0.0, event("a")), (0.0, httpx.ReadError("reset"))])
    both = workers.post(path=URL).mock(return_value=httpx.Response(200, headers=SSE, stream=parts))
    status, body, complete, ends = play(workers, streams=True)
    assert (status, complete, ends) == (200, True, {"failed": 1})
    assert body.startswith(event("a") + b'data: {"error":')
    assert DONE not in body
    assert both.call_count == 1


def test_reset_within_a_plain_answer_cuts_it(workers: respx.MockRouter) -> None:
    parts = TimedStream([(0.0, b"{"), (0.0, httpx.ReadError("reset"))])
    workers.post(path=URL).mock(return_value=httpx.Response(200, stream=parts))
    status, body, complete, ends = play(workers, streams=False)
    assert (status, body, complete, ends) == (200, b"{", False, {"failed": 1})
