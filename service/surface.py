"""1 edge, the map: which path is answered here, waits in the queue, or goes straight to a worker.

The routes are vLLM's. Paths below /v1/ that nobody here knows go to a worker as they are, so that
a newer engine's routes work at once; what changes an engine's state for everybody does not. What
is nearly a known route is a slip and gets a 404 that names the route.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from types import MappingProxyType
from typing import Final


class Way(StrEnum):
    """How a path is served.

    HERE by bidgate itself; QUEUED through the central queue; LIGHT straight to a worker; STORED to
    the one worker that holds the response; OPERATORS not at all, as it acts on one engine only;
    MISSPELT not at all, as it is nearly a known path.
    """

    HERE = "here"
    QUEUED = "queued"
    LIGHT = "light"
    STORED = "stored"
    OPERATORS = "operators"
    MISSPELT = "misspelt"


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

TOKENIZERS: Final = frozenset(
    {"/tokenize", "/detokenize", "/tokenizer_info", "/v1/messages/count_tokens"}
)
"""Light routes that run no model."""
RENDERERS: Final = ("/render", "/derender")
"""Ends of other paths that run none."""

OPERATORS: Final = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
"""Routes that change one engine: through a router they would change whichever came first."""

ALIVE_PATHS: Final = ("/health", "/healthz", "/live", "/livez", "/liveness", "/ping")
READY_PATHS: Final = ("/ready", "/readyz", "/readiness")
"""Routes that probes ask: bidgate's own answers, without a key."""

STORED_PREFIX: Final = "/v1/responses/"
HERE_PREFIX: Final = "/v1/models"
PATHS: Final = (*QUEUED, *sorted(LIGHT), HERE_PREFIX)
"""Every route for clients that has a name."""
SLIP_LIKENESS: Final = 0.88
"""How alike an unknown and a known path are, of 0 to 1, where the unknown one is a slip. New routes
are less: `/v1/chat/completions/render` beside `/v1/chat/completions/batch` is 0.83."""
HINT_LIKENESS: Final = 0.6
"""The same, to name a known path to who asks for one that nobody serves."""
COMPARED_CHARS_MAX: Final = 128
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

    @property
    def runs_a_model(self) -> bool:
        """Whether a worker computes something with a model for it, as far as is known."""
        if self.way is Way.LIGHT:
            return self.path not in TOKENIZERS and not self.path.endswith(RENDERERS)
        return self.way is Way.QUEUED


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
    if len(path) <= COMPARED_CHARS_MAX and _is_slip(path):
        return Route(Way.MISSPELT, path)
    return Route(Way.LIGHT, path, _api_of(path))


def no_such_path(path: str) -> str:
    """Say that nobody serves a path, and which one it may have been."""
    near = _nearest(path, HINT_LIKENESS)
    return f"{path}: Not Found" + (f"; did you mean {near}?" if near else "")


@lru_cache(maxsize=1024)
def _is_slip(path: str) -> bool:
    """Whether a path must be a known one, misspelt, or a known one below /v1/ twice."""
    near = _nearest(path, SLIP_LIKENESS)
    return bool(near) and (path == f"/v1{near}" or path.count("/") == near.count("/"))


def _nearest(path: str, likeness: float) -> str:
    """The known path most like another, or nothing."""
    if path.startswith("/v1/v1/"):
        path = path.removeprefix("/v1")
    if len(path) > COMPARED_CHARS_MAX:
        return ""
    return next(iter(difflib.get_close_matches(path.lower(), PATHS, n=1, cutoff=likeness)), "")


def _api_of(path: str) -> Api:
    """Only the shape of errors hangs on it."""
    return Api.MESSAGES if path.startswith("/v1/messages/") else Api.OTHER
