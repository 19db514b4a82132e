"""Drive an ASGI application directly and see when each message comes.

httpx's ASGITransport buffers the whole body, so it cannot show a first token.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message


@dataclass
class Exchange:
    """One request and what came back so far.

    Attributes:
        chunks: (seconds on the loop's clock, bytes) of every non-empty body message.
        complete: whether the application finished the response.
    """

    status: int = 0
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    chunks: list[tuple[float, bytes]] = field(default_factory=list)
    complete: bool = False
    _gone: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def body(self) -> bytes:
        """All bytes so far."""
        return b"".join(chunk for _, chunk in self.chunks)

    @property
    def error(self) -> dict[str, Any]:
        """The OpenAI error object of the body."""
        error: dict[str, Any] = json.loads(self.body)["error"]
        return error

    def header(self, name: str) -> str | None:
        """A response header, or None."""
        values = [value for key, value in self.headers if key == name.encode()]
        return values[0].decode() if values else None

    def leave(self) -> None:
        """Disconnect."""
        self._gone.set()

    async def play(self, app: ASGIApp, scope: dict[str, Any], parts: list[bytes]) -> Exchange:
        """Run the application on this request to its end."""
        waiting = list(parts)

        async def receive() -> Message:
            if waiting:
                part = waiting.pop(0)
                return {"type": "http.request", "body": part, "more_body": bool(waiting)}
            await self._gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.status = message["status"]
                self.headers = list(message["headers"])
            elif not self._gone.is_set():
                if message.get("body"):
                    now_s = asyncio.get_running_loop().time()
                    self.chunks.append((now_s, message["body"]))
                self.complete = not message.get("more_body", False)

        await app(scope, receive, send)
        return self


def http_scope(
    method: str, path: str, headers: dict[str, str] | list[tuple[str, str]] | None = None
) -> dict[str, Any]:
    """An HTTP scope as uvicorn makes it."""
    pairs = list(headers.items()) if isinstance(headers, dict) else headers or []
    path, _, query = path.partition("?")
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in pairs],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8001),
    }
