"""Prompts computed by one mock worker and fetched by another, as with vLLM's NIXL connector.

A worker that is asked to (`do_remote_decode`) keeps the KV memory of a prompt after its answer,
for one fetch and for a lease. Whoever comes later, twice or with another prompt gets what real
engines give: a good answer with wrong text. Where NIXL moves memory by itself, here the decode
worker asks the prefill worker over HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, TypeAlias

import httpx
import orjson

if TYPE_CHECKING:
    from collections.abc import Callable

    from service.mock.protocol import Asked

FETCH_ROOT: Final = "/mock/kv/"
FETCH_PATH: Final = FETCH_ROOT + "{request_id}"
ENGINE: Final = "engine_id"
"""Query of a fetch: which engine is meant."""
OTHER_ENGINE: Final = 409
FETCH_TIMEOUT_S: Final = 60.0
WRONG_TEXT: Final = 1
"""Moves a text to another place in the list of words."""

Params: TypeAlias = dict[str, object]


class UnusableParamsError(Exception):
    """Parameters that name no source; a real engine dies of them."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """What came of a fetch.

    Attributes:
        prefilled: whether the prompt need not be computed here.
        sound: whether the memory was this prompt's; else the text is wrong, and nobody says so.
    """

    prefilled: bool
    sound: bool


NOTHING: Final = Fetched(prefilled=False, sound=True)


@dataclass(slots=True)
class _Kept:
    tokens: int
    prompt_key: int
    lease: asyncio.TimerHandle


class KvStore:
    """KV memory kept for others.

    Attributes:
        engine_id: of this life of the engine; a restarted one has another.
        expired: how often a lease ended before anybody came.
        silent: keeps nothing and tells nothing, as an engine without a connector.

    Args:
        lease_s: how long it is kept, on the loop's clock.
        pin: takes memory of so many tokens out of the engine.
        unpin: gives it back.
    """

    def __init__(
        self, lease_s: float, pin: Callable[[int], None], unpin: Callable[[int], None]
    ) -> None:
        self.engine_id = str(uuid.uuid4())
        self.expired = 0
        self.silent = False
        self._lease_s = lease_s
        self._pin = pin
        self._unpin = unpin
        self._kept: dict[str, _Kept] = {}
        self._count = itertools.count()

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, request_id: str, tokens: int, prompt_key: int) -> None:
        """Keep a prompt's memory from now on; it must be free in the engine."""
        self._pin(tokens)
        lease = asyncio.get_running_loop().call_later(self._lease_s, self._expire, request_id)
        self._kept[request_id] = _Kept(tokens, prompt_key, lease)

    def take(self, request_id: str) -> int | None:
        """Give the memory away: which prompt's it was, or None when it is not kept (any more)."""
        kept = self._kept.pop(request_id, None)
        if kept is None:
            return None
        kept.lease.cancel()
        self._unpin(kept.tokens)
        return kept.prompt_key

    def ask_to_keep(self, asked: Asked, reply_id: str, server: tuple[str, int]) -> Params | None:
        """Mark a request's first prompt to be kept, if it says so; returns how to fetch it."""
        if self.silent or not (asked.kv_transfer or {}).get("do_remote_decode"):
            return None
        decode = asked.decodes[0]
        request_id = decode.keep_as = f"{reply_id}-{next(self._count)}"
        decode.prompt_key = asked.prompt_key
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[1]],
            "remote_engine_id": self.engine_id,
            "remote_request_id": request_id,
            "remote_host": server[0],
            "remote_port": server[1],
            "tp_size": 1,
            "remote_num_tokens": decode.prompt_tokens,
        }

    def _expire(self, request_id: str) -> None:
        self.expired += 1
        self.take(request_id)


async def fetch(params: Params, prompt_key: int) -> Fetched:
    """Fetch a prompt's memory from the worker that the parameters name.

    A worker that cannot be reached, or was restarted since, costs a prefill here
    (kv_load_failure_policy=recompute).

    Raises:
        UnusableParamsError: they name none.
    """
    host, port, request_id = (
        params.get(f"remote_{name}") for name in ("host", "port", "request_id")
    )
    if not (isinstance(host, str) and isinstance(port, int) and isinstance(request_id, str)):
        raise UnusableParamsError
    url = f"http://{host}:{port}{FETCH_PATH.format(request_id=request_id)}"
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=FETCH_TIMEOUT_S) as client:
            response = await client.post(url, params={ENGINE: str(params.get("remote_engine_id"))})
    except httpx.HTTPError:
        return NOTHING
    if response.status_code == OTHER_ENGINE:
        return NOTHING
    if response.status_code != 200:
        return Fetched(prefilled=True, sound=False)
    try:
        kept_key = orjson.loads(response.content)["prompt_key"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        # It talks nonsense: as good as gone.
        return NOTHING
    return Fetched(prefilled=True, sound=kept_key == prompt_key)


async def with_prompt_from_elsewhere(asked: Asked) -> Asked:
    """Fetch the prompt that another worker computed, if the request says so.

    Raises:
        UnusableParamsError: it says so and does not say where.
    """
    params = asked.kv_transfer or {}
    if not params.get("do_remote_prefill"):
        return asked
    fetched = await fetch(params, asked.prompt_key)
    asked.decodes[0].prefilled = fetched.prefilled
    if fetched.sound:
        return asked
    return replace(asked, text_keys=tuple(key + WRONG_TEXT for key in asked.text_keys))
