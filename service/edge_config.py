"""1 edge, its settings: bounds and secrets of the front, and how bodies are read under them."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Annotated

import orjson
from pydantic import BeforeValidator

from service.intake import Rules
from service.queued_route import ReadingConfig
from service.secrets import Secret
from service.uploads import BodyBounds


def _as_mapping(value: object) -> object:
    """Read the JSON that an environment variable holds; anything else is judged as it is."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        with contextlib.suppress(orjson.JSONDecodeError):
            return orjson.loads(value)
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeConfig:
    """Bounds and secrets of the front.

    Attributes:
        api_key: clients must send it as a bearer token; auth.keys is for several, with limits.
        body_bytes_max: longest request body; longer is a 413.
        held_bytes_max: bytes of request bodies in memory, over all requests that arrive, wait or
            run; a request over it is a 429. Of a body that flows through, what came before its
            model was known counts until the worker has it.
        queue_comment_s: a client that waits in the queue for a stream gets a comment this often,
            so that proxies between do not give it up; its answer is then a 200 whatever comes, and
            refusals are error events; 0 switches it off.
        body_timeout_s: longest time a body may take to arrive.
        parse_off_loop_bytes: bodies this long are parsed in a thread, so that others do not wait.
        log_requests: write one line per proxied request.
        response_headers: tell the worker, the wait, bidgate's own time and the price in headers.
        model_aliases: other names of models: the name that clients use, then the served one.
        forward_priority: send the body's `priority` on; engines that do not schedule by priority
            may refuse it.
        clients_pin: let a client name the one worker it wants, in the header x-bidgate-worker.
        session_headers: headers in which a client names its conversation, with commas between; its
            next request finds the worker again where its prompt cannot be known by its text
            (images, sounds, stored responses). Left empty, none.
    """

    api_key: Secret | None = None
    body_bytes_max: int = 64 * 1024 * 1024
    held_bytes_max: int = 1024 * 1024 * 1024
    queue_comment_s: float = 0.0
    body_timeout_s: float = 60.0
    parse_off_loop_bytes: int = 1024 * 1024
    log_requests: bool = True
    response_headers: bool = True
    model_aliases: Annotated[dict[str, str], BeforeValidator(_as_mapping)] = field(
        default_factory=dict
    )
    forward_priority: bool = True
    clients_pin: bool = False
    session_headers: str = "x-session-id,x-session-token,x-smg-routing-key,x-dynamo-session-id"

    def __post_init__(self) -> None:
        """Refuse bounds that are none."""
        if self.body_bytes_max < 1 or self.parse_off_loop_bytes < 1 or not self.body_timeout_s > 0:
            raise ValueError(
                "body_bytes_max, parse_off_loop_bytes, body_timeout_s must be positive"
            )
        if not self.queue_comment_s >= 0:
            raise ValueError("queue_comment_s must not be negative")
        if self.held_bytes_max < self.body_bytes_max:
            raise ValueError("held_bytes_max must be at least body_bytes_max")


def reading(config: EdgeConfig, *, keeps_keys: bool) -> ReadingConfig:
    """How the proxied routes read bodies.

    Args:
        config: of the front.
        keeps_keys: whether clients' keys are for bidgate, and so stay here.
    """
    return ReadingConfig(
        bounds=BodyBounds(bytes_max=config.body_bytes_max, timeout_s=config.body_timeout_s),
        off_loop_bytes=config.parse_off_loop_bytes,
        rules=Rules(aliases=config.model_aliases, forward_priority=config.forward_priority),
        keeps_authorization=not keeps_keys,
        clients_pin=config.clients_pin,
        comment_s=config.queue_comment_s,
        session_headers=tuple(
            name.strip().lower().encode() for name in config.session_headers.split(",")
        ),
    )
