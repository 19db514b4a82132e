"""The HTTP connections to one worker: a pool of its own, no proxy, no cookies, nothing added.

One pool per worker, as a shared pool is scanned in full at every request.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, ItemsView
from typing import TYPE_CHECKING, Final

import aiohttp
import httpx
from httpx_aiohttp import AiohttpTransport
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
            return aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=0,
                    keepalive_timeout=keepalive_s,
                    resolver=None if link_local else GuardedResolver(),
                ),
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
        return response


def make_client(
    transport: httpx.AsyncBaseTransport, *, connect_timeout_s: float
) -> httpx.AsyncClient:
    """The client for the small questions (health, metrics, models) over a worker's transport."""
    return httpx.AsyncClient(
        transport=transport,
        trust_env=False,
        timeout=httpx.Timeout(None, connect=connect_timeout_s),
    )
