"""Doors with keys, alone and in front of one worker."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import httpx
from pydantic import SecretStr

from service.auth import Door
from service.auth_settings import AuthConfig, ClientKey
from service.errors import ClientError
from tests.clock import run_virtual
from tests.service.stage import HandlerTransport, Stage, answer


def a_key(text: str, **limits: Any) -> ClientKey:
    return ClientKey(key=SecretStr(text), **limits)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def run_stage(
    keys: tuple[ClientKey, ...],
    scenario: Callable[[Stage, HandlerTransport], Awaitable[None]],
    reply: Callable[[], httpx.Response] = answer,
    **options: Any,
) -> None:
    """Play a scenario in front of one worker."""

    async def handle(_: httpx.Request) -> httpx.Response:
        return reply()

    async def play() -> None:
        worker = HandlerTransport(handle)
        async with Stage({"w": worker}, keys=keys, **options).open() as stage:
            await scenario(stage, worker)

    run_virtual(play())


def a_door(*keys: ClientKey, **config: Any) -> Door:
    door = Door()
    door.configure(AuthConfig(**config), keys)
    return door


def knock(door: Door, path: str, key: str | None, method: str = "POST") -> int:
    """The status that the door answers; 200 when it lets in."""
    headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
    try:
        with door.admit(path, headers, 0.0, limited=method == "POST"):
            return 200
    except ClientError as error:
        return error.status
