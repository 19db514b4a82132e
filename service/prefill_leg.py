"""4 forwarder, first leg: a prefill worker computes the prompt and says how to fetch the result.

What it tells is one JSON object that the second leg carries to the decode worker, once and at once:
a stale or repeated one is answered with wrong text and no error (docs/disaggregation.md). Nothing
of the first leg reaches the client, so it may be tried again; the second never is.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final, TypeAlias

import httpx
import orjson

from service.call import Call
from service.errors import HandoffMissingError, WorkerBrokeError
from service.placement import Placement
from service.trace import PREFILL
from service.worker_link import BROKEN

REPLY_BYTES_MAX: Final = 16 * 1024 * 1024
OFF_LOOP_BYTES: Final = 1024 * 1024
"""Bodies this long are rewritten in a thread, so that others do not wait."""
WANTED: Final = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What asks an engine to keep the KV memory for another one and to tell where it is."""
NOT_FOR_ONE_TOKEN: Final = ("stream_options", "min_tokens", "stop", "stop_token_ids", "logprobs")
"""Fields that make no sense for a single token, or would end it early, without parameters."""

Params: TypeAlias = dict[str, object]


def prefill_body(body: bytes) -> bytes:
    """The same request for one token, not streamed, with its KV memory kept."""
    try:
        payload = orjson.loads(body)
    except orjson.JSONDecodeError:
        # Engines accept more than orjson does: NaN, huge numbers, lone surrogates.
        payload = json.loads(body)
    for name in (*NOT_FOR_ONE_TOKEN, "top_logprobs"):
        payload.pop(name, None)
    payload |= {
        "stream": False,
        "max_tokens": 1,
        "ignore_eos": True,
        "kv_transfer_params": WANTED,
    }
    if "messages" in payload:
        payload["max_completion_tokens"] = 1
    return _as_json(payload)


def decode_body(body: bytes, params: Params) -> bytes:
    """The client's own bytes, with the parameters as one more field."""
    head = body.rstrip()[:-1].rstrip()
    comma = b"" if head.endswith(b"{") else b","
    return b'%b%b"kv_transfer_params":%b}' % (head, comma, _as_json(params))


def with_params(call: Call, params: Params) -> Call:
    """The second leg of a call."""
    assert isinstance(call.body, bytes), "requests whose body comes in parts are not split"
    return replace(call, body=decode_body(call.body, params))


class PrefillLeg:
    """Runs first legs.

    Args:
        send: to a worker by id; raises as the forwarder's own sending does.
    """

    def __init__(self, send: Callable[[Call, str], Awaitable[httpx.Response]]) -> None:
        self._send = send

    async def run(self, call: Call, placement: Placement) -> Params | httpx.Response:
        """Have the prompt of a placed request computed.

        Returns:
            The parameters for the second leg, or the worker's answer where that is an error; it is
            the caller's to close.

        Raises:
            WorkerUnreachableError: nothing was sent.
            WorkerBrokeError: the worker may have computed the prompt, and keep its memory.
            HandoffMissingError: the worker answered without parameters.
        """
        worker_id = placement.prefill_id
        response = await self._send(await _first(call), worker_id)
        if response.status_code >= 400:
            return response
        try:
            answer = await _read(response)
        except BROKEN as error:
            raise WorkerBrokeError(f"worker {worker_id} broke off its prefill") from error
        finally:
            await response.aclose()
        params = answer.get("kv_transfer_params") if isinstance(answer, dict) else None
        if not isinstance(params, dict) or not params:
            raise HandoffMissingError(
                f"prefill worker {worker_id} gave no kv_transfer_params: is it started with a KV"
                " connector (--kv-transfer-config)?"
            )
        return params


async def _first(call: Call) -> Call:
    """The first leg of a call; its answer is read here, so it must not be compressed."""
    assert isinstance(call.body, bytes), "requests whose body comes in parts are not split"
    if len(call.body) < OFF_LOOP_BYTES:
        body = prefill_body(call.body)
    else:
        body = await asyncio.to_thread(prefill_body, call.body)
    headers = [pair for pair in call.headers if pair[0] != b"accept-encoding"]
    return replace(
        call, headers=[*headers, (b"accept-encoding", b"identity")], body=body, leg=PREFILL
    )


async def _read(response: httpx.Response) -> object:
    """The JSON of an answer; None where it is none, or too long to be one."""
    parts: list[bytes] = []
    size = 0
    assert isinstance(response.stream, httpx.AsyncByteStream)
    async for chunk in response.stream:
        parts.append(chunk)
        size += len(chunk)
        if size > REPLY_BYTES_MAX:
            return None
    try:
        answer: object = orjson.loads(b"".join(parts))
    except orjson.JSONDecodeError:
        return None
    return answer


def _as_json(value: object) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value).encode()
