"""The HTTP connections to one worker: a pool of its own, no proxy, no cookies, nothing added.

One pool per worker, as a shared pool is scanned in full at every request.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, ItemsView
from functools import partial
from typing import TYPE_CHECKING, Final

import aiohttp
import httpx
from aiohttp.client_proto import ResponseHandler
from httpx_aiohttp import AiohttpTransport
from httpx_aiohttp.transport import AiohttpResponseStream, map_aiohttp_exceptions
from multidict import CIMultiDict

from service.address_guard import GuardedResolver

if TYPE_CHECKING:
    from aiohttp.connector import Connection

BROKEN: Final = (httpx.HTTPError, httpx.StreamError, aiohttp.ClientError, OSError)
"""What a transport may raise while a response is read."""

STATUSES: Final = range(200, 600)
"""Of an answer: what comes before 200 is none, and no server sends one from 600 on."""
AUTO_HEADERS: Final = ("accept", "accept-encoding", "content-type", "user-agent")


class _Response(aiohttp.ClientResponse):
    """A response whose reason phrase can be encoded whatever bytes a worker puts there.

    The transport encodes it as UTF-8, which would raise after the response has begun.
    """

    async def start(self, connection: Connection) -> aiohttp.ClientResponse:
        await super().start(connection)
        if self.reason is not None and not self.reason.isascii():
            self.reason = self.reason.encode("ascii", "replace").decode("ascii")
        return self


class _Connection(ResponseHandler):
    """A connection whose parser runs once for what comes, and not once more when it is read.

    A reader that has room says so at every read, and aiohttp then lets the parser go on; there is
    only something to go on with after it was paused.
    """

    __slots__ = ()

    def resume_reading(self, resume_parser: bool = True) -> None:
        if self._reading_paused:
            super().resume_reading(resume_parser)


class _Body(AiohttpResponseStream):
    """A response's bytes as they came: whatever has come since the last is one part."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        read = self._aiohttp_response.content.readany
        with map_aiohttp_exceptions():
            while part := await read():
                yield part


def _requests_over(tls: Callable[[], ssl.SSLContext | None]) -> type[aiohttp.ClientRequest]:
    """Requests that ask for their TLS context when they are made.

    The pool tells connections apart by it, so a new context never gets an old connection.
    """

    class Request(aiohttp.ClientRequest):
        def __init__(self, *args: object, **options: object) -> None:
            context = tls()
            options["ssl"] = True if context is None else context
            super().__init__(*args, **options)  # type: ignore[arg-type]

    return Request


class _EachHeader(httpx.Headers):
    """Headers whose repeated names stay repeated when they are copied.

    aiohttp copies a mapping by its items, where httpx joins the values of one name by commas;
    not every header is a list (Cookie is none).
    """

    def items(self) -> ItemsView[str, str]:
        return CIMultiDict(self.multi_items()).items()


def _repeats(headers: httpx.Headers) -> bool:
    names = [name.lower() for name, _ in headers.raw]
    return len(set(names)) < len(names)


class WorkerTransport(AiohttpTransport):
    """`httpx_aiohttp.AiohttpTransport` whose errors tell whether the request can have been sent.

    The library calls a refused connection, and one reset before the response, a ConnectTimeout
    alike, and lets a garbled response out as aiohttp's own error. Here ConnectError and
    ConnectTimeout mean that no connection was made, hence nothing was sent; what came later is a
    ReadError or a RemoteProtocolError. Whether a generation runs twice hangs on that difference.

    Args:
        keepalive_s: idle connections are dropped after this.
        link_local: whether names may lead to link-local and metadata addresses.
        tls: tells the context for a request to a worker at https; None trusts whom the system
            trusts. Connections of another context are not used again, and end when they idle.
    """

    def __init__(
        self,
        *,
        keepalive_s: float,
        link_local: bool = True,
        tls: Callable[[], ssl.SSLContext | None] = lambda: None,
    ) -> None:
        def open_session() -> aiohttp.ClientSession:
            connector = aiohttp.TCPConnector(
                limit=0,
                keepalive_timeout=keepalive_s,
                resolver=None if link_local else GuardedResolver(),
            )
            # There is no public way to say which connections a pool opens.
            connect: Callable[[], ResponseHandler] = partial(
                _Connection, loop=asyncio.get_running_loop()
            )
            connector._factory = connect  # type: ignore[assignment]
            return aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=AUTO_HEADERS,
                trust_env=False,
                auto_decompress=False,
                request_class=_requests_over(tls),
                response_class=_Response,
            )

        super().__init__(trust_env=False, client=open_session)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send, with errors told apart and every header as it is."""
        if _repeats(request.headers):
            request.headers = _EachHeader(request.headers.raw)
        try:
            response = await super().handle_async_request(request)
        except httpx.ConnectTimeout as error:
            match error.__cause__:
                case aiohttp.ConnectionTimeoutError():
                    raise
                case aiohttp.ClientConnectorError() as cause:
                    raise httpx.ConnectError(str(error), request=request) from cause
                case cause:
                    message = str(error) or "connection lost"
                    raise httpx.ReadError(message, request=request) from cause
        except aiohttp.ClientError as error:
            raise httpx.RemoteProtocolError(str(error), request=request) from error
        if response.status_code not in STATUSES:
            await response.aclose()
            raise httpx.RemoteProtocolError(
                f"no answer has the status {response.status_code}", request=request
            )
        assert isinstance(response.stream, AiohttpResponseStream)
        response.stream = _Body(response.stream._aiohttp_response)
        return response
