"""1 edge, the OpenAPI document: bidgate's own routes as FastAPI knows them, and the proxied ones.

FastAPI cannot see the proxied routes, as they pass by it (edge.py). Paths below /v1/ that are not
here go to a worker all the same; what a body means is the engine's business, so it is told loosely.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Final, TypeAlias

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from service.auth import ADMIN_PREFIX, OPEN_PATHS
from service.surface import LIGHT, QUEUED, STORED_PREFIX, Api

Json: TypeAlias = dict[str, object]

OWN: Final = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
THEIRS: Final = {"application/json": {"schema": {"$ref": "#/components/schemas/AnyError"}}}
PAGE: Final = {"schema": {"type": "string"}}
SCHEMAS: Final[Json] = {
    "Error": {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type"],
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": {"type": ["string", "null"]},
                    "code": {"type": ["string", "integer", "null"]},
                },
            }
        },
    },
    "AnyError": {
        "anyOf": [
            {"$ref": "#/components/schemas/Error"},
            {"type": "object", "required": ["detail"]},
        ]
    },
}
MEANING: Final = {
    200: "The worker's answer, byte for byte",
    400: "A body or header that makes no sense, or a request that can never fit",
    401: "The key is missing or wrong",
    404: "No worker serves the model, or nobody knows the response",
    405: "Not with this method",
    408: "The body did not arrive in time",
    409: "The id or the URL is another worker's",
    413: "The body is too long",
    415: "The body is compressed, or not of a sort that the worker reads",
    422: "The worker cannot read the body",
    429: "Busy, or a limit of the key: Retry-After says when to come again",
    502: "The worker broke, or cannot be reached",
    503: "No worker is up, or bidgate shuts down",
    504: "The worker or the deadline was too late",
}
PROXIED: Final = (400, 401, 404, 408, 413, 415, 422, 429, 502, 503, 504)
COUNT: Final = {"type": "integer", "minimum": 1}
FIELDS: Final[Json] = {
    "model": {"type": "string"},
    "max_tokens": COUNT,
    "stream": {"type": "boolean"},
    "n": {"type": "integer", "minimum": 1, "maximum": 4},
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "ignore_eos": {"type": "boolean"},
}
TEXTS: Final[Json] = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
MESSAGES: Final[Json] = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {"role": {"enum": ["system", "user"]}, "content": {"type": "string"}},
    },
}
PROMPTS: Final[dict[Api, tuple[str, Json]]] = {
    Api.CHAT: ("messages", MESSAGES),
    Api.MESSAGES: ("messages", MESSAGES),
    Api.CHAT_BATCH: ("messages", {"type": "array", "minItems": 1, "items": MESSAGES}),
    Api.TEXT: ("prompt", TEXTS),
    Api.RESPONSES: ("input", TEXTS),
    Api.TOKENS: ("token_ids", {"type": "array", "items": {"type": "integer", "minimum": 0}}),
}
"""Which field holds the prompt."""
ENTRY: Final[Json] = {
    "type": "object",
    "required": ["url"],
    "properties": {
        "url": {"type": "string", "pattern": "^https?://[a-z0-9.-]+(:[0-9]{1,5})?$"},
        "batch_limit": COUNT,
        "models": {"type": "array", "items": {"type": "string"}},
    },
}


def document_of(app: FastAPI) -> Callable[[], Json]:
    """What an application's `openapi` becomes: written at the first question, then kept."""
    kept: list[Json] = []

    def document() -> Json:
        if not kept:
            kept.append(_write(app))
        return kept[0]

    return document


def _write(app: FastAPI) -> Json:
    document: Json = get_openapi(title=app.title, version=app.version, routes=app.routes)
    paths = document["paths"]
    assert isinstance(paths, dict), "a document has paths"
    for path, item in paths.items():
        for operation in item.values():
            _complete_own(path, operation)
    paths["/metrics"]["get"]["responses"]["200"]["content"] = {
        "text/plain": PAGE,
        "application/openmetrics-text": PAGE,
    }
    paths[f"{ADMIN_PREFIX}v1/workers"]["post"] |= {
        "requestBody": _body({"application/json": {"schema": ENTRY}})
    }
    for path in (*QUEUED, *sorted(LIGHT)):
        paths[path] = {"post": _proxied(path)}
    paths |= _stored()
    document["components"] = {"schemas": deepcopy(SCHEMAS)}
    return document


def _complete_own(path: str, operation: Json) -> None:
    """Add the errors of a route of bidgate's own; its parameters are text, so there is no 422."""
    responses = operation["responses"]
    assert isinstance(responses, dict), "FastAPI writes responses"
    responses.pop("422", None)
    statuses: list[int] = [] if path in OPEN_PATHS else [401]
    if path == "/ready":
        responses["503"] = {"description": "Not ready, and why"}
    if "{" in path or path.startswith(ADMIN_PREFIX):
        statuses.append(404)
    if path == f"{ADMIN_PREFIX}v1/workers" and "post" in str(operation["operationId"]):
        responses["201"] = {"description": "It was added"}
        statuses += [400, 408, 409, 413]
    if "delete" in str(operation["operationId"]):
        responses["202"] = responses.pop("200")
    responses |= _errors(statuses, OWN)


def _proxied(path: str) -> Json:
    api = QUEUED.get(path)
    form = path.startswith("/v1/audio/")
    schema: Json = {"type": "object", "properties": dict(FIELDS)}
    if api is not None:
        name, prompt = PROMPTS[api]
        schema = {
            "type": "object",
            "required": ["model", name],
            "properties": {**FIELDS, name: prompt},
        }
    media = "multipart/form-data" if form else "application/json"
    if form:
        schema = {
            "type": "object",
            "required": ["model", "file"],
            "properties": {
                "model": {"type": "string"},
                "file": {"type": "string", "format": "binary"},
            },
        }
    return {
        "summary": path,
        "description": "Waits in the queue." if api is not None else "Straight to a worker.",
        "operationId": "post" + path.replace("/", "_"),
        "tags": ["workers"],
        "requestBody": _body({media: {"schema": schema}}),
        "responses": _answers(),
    }


def _stored() -> Json:
    """The routes of stored responses."""
    response_id = {
        "name": "response_id",
        "in": "path",
        "required": True,
        "schema": {"type": "string", "minLength": 1, "pattern": "^[A-Za-z0-9_-]+$"},
    }
    routes: Json = {}
    for tail, methods in (("", ("get", "delete")), ("/cancel", ("post",))):
        routes[f"{STORED_PREFIX}{{response_id}}{tail}"] = {
            method: {
                "summary": f"{method} a stored response{tail}",
                "operationId": f"{method}_response{tail.replace('/', '_')}",
                "tags": ["workers"],
                "parameters": [response_id],
                "responses": _answers(),
            }
            for method in methods
        }
    return routes


def _answers() -> Json:
    whole: Json = {"application/json": {"schema": {}}, "text/event-stream": {}}
    return {"200": {"description": MEANING[200], "content": whole}} | _errors(PROXIED, THEIRS)


def _errors(statuses: Iterable[int], content: object) -> Json:
    return {
        str(status): {"description": MEANING[status], "content": content} for status in statuses
    }


def _body(content: Json) -> Json:
    return {"required": True, "content": content}
