"""The ASGI ends of one POST to a mock worker: its body in, its answer out, the client's leaving."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Final

import orjson
from starlette.datastructures import Headers

from service.mock.bodies import ApiError

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

RANK_CHARS_MAX: Final = 18
BODY_BYTES_MAX: Final = 64 * 1024 * 1024
JSON: Final = b"application/json"
EVENTS: Final = b"text/event-stream; charset=utf-8"


class ClientLeftError(Exception):
    """The client closed its connection before its request was read."""


class Exchange:
    """One request and its response.

    Args:
        scope: of the request.
        receive: its body and its end.
        send: the response.
        id_headers: whether x-request-id is answered.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, *, id_headers: bool) -> None:
        self._headers = Headers(scope=scope)
        self._server = scope.get("server")
        self._receive = receive
        self._send = send
        self._id_headers = id_headers
        self._anthropic = scope["path"].startswith("/v1/messages")
        self._request_id = self._headers.get("x-request-id") or uuid.uuid4().hex

    @property
    def server(self) -> tuple[str, int]:
        """Address the request came to."""
        host, port = self._server or ("127.0.0.1", 0)
        return host, port or 0

    async def body(self) -> bytes:
        """Read the body, once the headers are found acceptable.

        Raises:
            ApiError: the headers or the size will not do.
            ClientLeftError: the connection was closed first.
        """
        self._check_headers()
        return await self.any_body()

    async def any_body(self) -> bytes:
        """Read the body, whatever it is.

        Raises:
            ApiError: it is too large.
            ClientLeftError: the connection was closed first.
        """
        body = bytearray()
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientLeftError
            body += message.get("body", b"")
            if len(body) > BODY_BYTES_MAX:
                raise ApiError(413, f"The body is longer than {BODY_BYTES_MAX} bytes.")
            if not message.get("more_body", False):
                return bytes(body)

    def name(self, request_id: str | None) -> str:
        """Settle the request's id: the header's, else the body's, else a random one."""
        if request_id and "x-request-id" not in self._headers:
            self._request_id = request_id
        return self._request_id

    async def client_leaves(self) -> None:
        """Return when the client has closed its connection."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def start(self, status: int, content_type: bytes, length: int | None = None) -> None:
        """Send status and headers; without a length the body comes in chunks."""
        headers = [(b"content-type", content_type)]
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        if self._id_headers:
            headers.append((b"x-request-id", self._request_id.encode("latin-1", "replace")))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, part: bytes) -> None:
        """Send a part of the body."""
        await self._send({"type": "http.response.body", "body": part, "more_body": True})

    async def end(self, part: bytes) -> None:
        """Send the last part of the body."""
        await self._send({"type": "http.response.body", "body": part, "more_body": False})

    async def answer(self, status: int, body: bytes) -> None:
        """Send a JSON response in one piece."""
        await self.start(status, JSON, len(body))
        await self.end(body)

    async def refuse(self, error: ApiError) -> None:
        """Send an error object."""
        body = error.body()
        # Anthropic's clients look for a type beside it.
        await self.answer(
            error.status, orjson.dumps({"type": "error", **body} if self._anthropic else body)
        )

    def rank(self, size: int) -> int | None:
        """The engine that the request is pinned to, or None; what is no number is ignored.

        Raises:
            ApiError: the server has no such rank.
        """
        told = self._headers.get("x-data-parallel-rank", "")
        if not told.removeprefix("-").isdecimal():
            return None
        if len(told) > RANK_CHARS_MAX or not 0 <= int(told) < size:
            raise ApiError(400, f"data_parallel_rank {told} is out of range [0, {size}).")
        return int(told)

    def _check_headers(self) -> None:
        """Refuse other media types."""
        media_type = self._headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json":
            message = "Unsupported Media Type: Only 'application/json' is allowed"
            raise ApiError(400, message, kind="Bad Request")
