"""What a client of a chaos run writes: one request of each kind, head and body."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import orjson

from loadgen.chaos_keys import Key, secret
from loadgen.chaos_plan import ID_BATCH_LENGTHS, SEQUENCES, STORED, Kind

if TYPE_CHECKING:
    from loadgen.chaos_plan import PlannedRequest

MODEL: Final = "mock"
IMPATIENT_MS: Final = 300
DEADLINE_MS: Final = 1500
ID_PROMPT_TOKENS: Final = 40
TOO_LARGE_TOKENS: Final = 600_000
LARGE_BYTES: Final = 1024 * 1024
AUDIO_BYTES: Final = 200_000
TENANTS: Final = 3
PRIORITIES: Final = 5
BOUNDARY: Final = "chaos"
PATHS: Final[dict[Kind, tuple[str, str]]] = {
    Kind.MODELS: ("GET", "/v1/models"),
    Kind.METRICS: ("GET", "/metrics"),
    Kind.NO_SUCH_ROUTE: ("POST", "/no/such/route"),
    Kind.CHAT: ("POST", "/v1/chat/completions"),
    Kind.CHAT_STREAM: ("POST", "/v1/chat/completions"),
    Kind.RESPONSE: ("POST", "/v1/responses"),
    Kind.RESPONSE_STREAM: ("POST", "/v1/responses"),
    Kind.MESSAGE: ("POST", "/v1/messages"),
    Kind.MESSAGE_STREAM: ("POST", "/v1/messages"),
    Kind.SHOWN: ("GET", "/v1/responses/"),
    Kind.DELETED: ("DELETE", "/v1/responses/"),
    Kind.EMBEDDING: ("POST", "/v1/embeddings"),
    Kind.RERANK: ("POST", "/v1/rerank"),
    Kind.TOKENIZE: ("POST", "/tokenize"),
    Kind.AUDIO: ("POST", "/v1/audio/transcriptions"),
    Kind.NEWER_ROUTE: ("POST", "/v1/chaos/newer"),
}
STREAMS: Final = frozenset(
    {
        *(Kind.STREAM, Kind.CHAT_STREAM, Kind.PARALLEL, Kind.LONG, Kind.IMPATIENT, Kind.TOKEN_IDS),
        *(Kind.RESPONSE_STREAM, Kind.MESSAGE_STREAM, Kind.TENANT, Kind.DEADLINE, Kind.LARGE_BODY),
    }
)
CHATS: Final = frozenset({Kind.CHAT, Kind.CHAT_STREAM, Kind.MESSAGE, Kind.MESSAGE_STREAM})
MESSAGES: Final = frozenset({Kind.MESSAGE, Kind.MESSAGE_STREAM})
RESPONSES: Final = frozenset({Kind.RESPONSE, Kind.RESPONSE_STREAM})


def proxied(kind: Kind) -> bool:
    """Whether the request goes to a route that bidgate counts as a request."""
    return kind not in (Kind.MODELS, Kind.METRICS, Kind.NO_SUCH_ROUTE)


def request_bytes(request: PlannedRequest, name: str) -> bytes:
    """Write the request out, head and body; name is its x-request-id."""
    method, path = PATHS.get(request.kind, ("POST", "/v1/completions"))
    if request.kind in STORED:
        path += response_id(request.about)
    form = request.kind is Kind.AUDIO
    media = f"multipart/form-data; boundary={BOUNDARY}" if form else "application/json"
    body = _body(request) if method == "POST" else b""
    lines = {
        "host": "chaos",
        "connection": "close",
        "x-request-id": name,
        "content-type": media,
        **_credentials(request),
        **_hints(request),
        "content-length": str(len(body)),
    }
    head = "".join(f"{key}: {value}\r\n" for key, value in lines.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body


def _credentials(request: PlannedRequest) -> dict[str, str]:
    """The client's key, as clients of its API send it."""
    if request.key is Key.NONE:
        return {}
    if request.kind in MESSAGES:
        return {"x-api-key": secret(request.key)}
    return {"authorization": f"Bearer {secret(request.key)}"}


def response_id(index: int) -> str:
    """Name that the client of a request gives to its stored response."""
    return f"resp_chaos_{index}"


def _hints(request: PlannedRequest) -> dict[str, str]:
    """Headers that say what the request is worth and until when."""
    match request.kind:
        case Kind.IMPATIENT:
            return {"x-bidgate-max-wait-ms": str(IMPATIENT_MS)}
        case Kind.DEADLINE:
            return {"x-bidgate-deadline-ms": str(DEADLINE_MS)}
        case Kind.TENANT:
            return {
                "x-bidgate-tenant": f"tenant-{request.index % TENANTS}",
                "x-bidgate-priority": str(request.index % PRIORITIES - PRIORITIES // 2),
                "x-session-id": f"session-{request.index % TENANTS}",
            }
        case _:
            return {}


def _body(request: PlannedRequest) -> bytes:
    match request.kind:
        case Kind.NOT_JSON:
            return f'{{"model": "{MODEL}", "prompt": '.encode()
        case Kind.AUDIO:
            return _form(request.index)
        case Kind.EMBEDDING:
            light: dict[str, object] = {"input": [f"request {request.index}", "another text"]}
        case Kind.RERANK:
            light = {"query": "red fox", "documents": ["blue fox", "red fox", "none"]}
        case Kind.TOKENIZE:
            light = {"prompt": f"request {request.index}"}
        case Kind.NEWER_ROUTE:
            light = {"anything": request.index}
        case _:
            return orjson.dumps(generating_body(request))
    return orjson.dumps({"model": MODEL, **light})


def generating_body(request: PlannedRequest) -> dict[str, object]:
    """The body of a request that generates, before it is written out."""
    kind = request.kind
    tokens = -1 if kind is Kind.WRONG_FIELD else request.decode_tokens
    body: dict[str, object] = {
        "model": "no-such-model" if kind is Kind.UNKNOWN_MODEL else MODEL,
        "max_output_tokens" if kind in RESPONSES else "max_tokens": tokens,
        "ignore_eos": True,
        "stream": kind in STREAMS,
    }
    if kind in CHATS:
        body["messages"] = [{"role": "user", "content": f"request {request.index}"}]
    elif kind in RESPONSES:
        body |= {"input": f"request {request.index}", "request_id": response_id(request.index)}
    else:
        body["prompt"] = _prompt(request)
    if kind is Kind.PARALLEL:
        body["n"] = SEQUENCES[kind]
    if kind is Kind.LARGE_BODY:
        body["user"] = "x" * LARGE_BYTES
    return body


def _prompt(request: PlannedRequest) -> object:
    match request.kind:
        case Kind.BATCH:
            return ["a text"] * SEQUENCES[request.kind]
        case Kind.ID_BATCH:
            return [list(range(length)) for length in ID_BATCH_LENGTHS]
        case Kind.TOKEN_IDS:
            return list(range(ID_PROMPT_TOKENS))
        case Kind.TOO_LARGE:
            return [7] * TOO_LARGE_TOKENS
        case _:
            return f"request {request.index}"


def _form(index: int) -> bytes:
    """A sound with its model before it or, of every second one, behind it."""
    part = f"--{BOUNDARY}\r\ncontent-disposition: form-data; name=".encode()
    model = part + f'"model"\r\n\r\n{MODEL}\r\n'.encode()
    sound = part + b'"file"; filename="a.wav"\r\n\r\n' + b"\0\1" * (AUDIO_BYTES // 2) + b"\r\n"
    parts = model + sound if index % 2 else sound + model
    return parts + f"--{BOUNDARY}--\r\n".encode()
