"""1 edge, the map: which path is answered here, waits in the queue, or goes straight to a worker.

The routes are vLLM's. Paths below /v1/ that nobody here knows go to a worker as they are, so that
a newer engine's routes work at once; what changes an engine's state for everybody does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final


class Way(StrEnum):
    """How a path is served.

    HERE by bidgate itself; QUEUED through the central queue; LIGHT straight to a worker; STORED to
    the one worker that holds the response; OPERATORS not at all, as it acts on one engine only.
    """

    HERE = "here"
    QUEUED = "queued"
    LIGHT = "light"
    STORED = "stored"
    OPERATORS = "operators"


class Api(StrEnum):
    """Whose request format it is; of the queued routes, and of the light ones that share it."""

    CHAT = "chat"
    TEXT = "text"
    RESPONSES = "responses"
    MESSAGES = "messages"
    CHAT_BATCH = "chat_batch"
    TOKENS = "tokens"
    OTHER = "other"


QUEUED: Final = MappingProxyType(
    {
        "/v1/chat/completions": Api.CHAT,
        "/v1/completions": Api.TEXT,
        "/v1/responses": Api.RESPONSES,
        "/v1/messages": Api.MESSAGES,
        "/v1/chat/completions/batch": Api.CHAT_BATCH,
        "/inference/v1/generate": Api.TOKENS,
        "/cohere/v2/chat": Api.CHAT,
    }
)
"""Routes that generate: each request holds batch slots and KV memory while it runs."""

LIGHT: Final = frozenset(
    {
        "/v1/embeddings",
        "/v2/embed",
        "/score",
        "/v1/score",
        "/rerank",
        "/v1/rerank",
        "/v2/rerank",
        "/classify",
        "/pooling",
        "/generative_scoring",
        "/tokenize",
        "/detokenize",
        "/tokenizer_info",
        "/v1/messages/count_tokens",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/v1/systemone",
        "/cohere/v2/chat/render",
    }
)
"""Routes that hold no decode slot for long; also every unknown path below /v1/."""

OPERATORS: Final = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
"""Routes that change one engine: through a router they would change whichever came first."""

ALIVE_PATHS: Final = ("/health", "/healthz", "/live", "/livez", "/liveness", "/ping")
READY_PATHS: Final = ("/ready", "/readyz", "/readiness")
"""Routes that probes ask: bidgate's own answers, without a key."""

STORED_PREFIX: Final = "/v1/responses/"
HERE_PREFIX: Final = "/v1/models"
SEGMENTS_THAT_CLIMB: Final = frozenset({"", ".", ".."})


@dataclass(frozen=True, slots=True)
class Route:
    """Where a path leads.

    Attributes:
        way: how it is served.
        path: the path without a slash at its end, as tables and workers know it.
        api: format of the request.
        response_id: of STORED routes.
    """

    way: Way
    path: str
    api: Api = Api.OTHER
    response_id: str = ""


def find_route(path: str) -> Route:
    """Find where a decoded path leads."""
    if path in QUEUED:
        return Route(Way.QUEUED, path, QUEUED[path])
    path = path.removesuffix("/") or "/"
    if path in QUEUED:
        return Route(Way.QUEUED, path, QUEUED[path])
    if path in OPERATORS:
        return Route(Way.OPERATORS, path)
    if path in LIGHT:
        return Route(Way.LIGHT, path, _api_of(path))
    if not path.startswith("/v1/") or path == HERE_PREFIX or path.startswith(f"{HERE_PREFIX}/"):
        return Route(Way.HERE, path)
    segments = path[1:].split("/")
    # What a client library or the worker may shorten could lead anywhere, past every check here.
    if not SEGMENTS_THAT_CLIMB.isdisjoint(segments) or "\\" in path:
        return Route(Way.HERE, path)
    if path.startswith(STORED_PREFIX) and path != f"{STORED_PREFIX}render":
        return Route(Way.STORED, path, Api.RESPONSES, response_id=segments[2])
    return Route(Way.LIGHT, path, _api_of(path))


def _api_of(path: str) -> Api:
    """Only the shape of errors hangs on it."""
    return Api.MESSAGES if path.startswith("/v1/messages/") else Api.OTHER
