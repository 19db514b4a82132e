"""1 edge, the routes that skip the queue: JSON is read for its model, forms and files flow through.

Stored responses go to the worker that holds them, everything else to the least loaded one.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Final

from service.asgi import while_client_stays
from service.call import Call
from service.errors import UnknownResponseError
from service.exchange import Exchange
from service.forwarder import Forwarder
from service.headers import FORM, announced_bytes, first, media_type, to_worker
from service.intake import read_light_body
from service.light import LightPath, Wanted
from service.owners import Owners
from service.queued_route import MODEL_LABEL_CHARS_MAX, ReadingConfig
from service.surface import Way
from service.uploads import ModelField, Upload, flowing, read_whole

JSON: Final = b"application/json"


class LightRoute:
    """Serves requests that hold no decode slot for long.

    Attributes:
        config: how bodies are read; may change between requests.
    """

    def __init__(
        self, *, light: LightPath, forwarder: Forwarder, owners: Owners, config: ReadingConfig
    ) -> None:
        self._light = light
        self._forwarder = forwarder
        self._owners = owners
        self.config = config

    async def relay(self, exchange: Exchange) -> None:
        """Read as much as must be known, find a worker, relay."""
        exchange.record.light = True
        hints = exchange.hints()
        exchange.record.tenant = hints.tenant
        call = Call(
            path=exchange.target,
            headers=self._headers(exchange),
            body=b"",
            method=exchange.scope["method"],
            api=exchange.route.api,
            deadline_s=(
                None if hints.deadline_s is None else exchange.arrival_s + hints.deadline_s
            ),
            trace=exchange.trace,
        )
        media = media_type(exchange.headers)
        if media == FORM:
            await self._relay_form(call, exchange, self.config.pin(hints))
        elif media == JSON or media.endswith(b"+json"):
            await self._relay_json(call, exchange, self.config.pin(hints))
        else:
            await self._relay_bytes(call, exchange, self.config.pin(hints))

    def _headers(self, exchange: Exchange) -> list[tuple[bytes, bytes]]:
        headers = to_worker(
            exchange.headers,
            plain=exchange.metered,
            drop_authorization=not self.config.keeps_authorization,
        )
        headers.append((b"x-request-id", exchange.record.request_id.encode()))
        return headers

    async def _relay_json(self, call: Call, exchange: Exchange, pin: str) -> None:
        body = await read_whole(exchange.headers, exchange.receive_held, self.config.bounds)
        exchange.body_bytes = len(body)
        exchange.arrived(asyncio.get_running_loop().time())
        async with while_client_stays(exchange.receive, exchange.reply):
            rules = self.config.rules
            if len(body) < self.config.off_loop_bytes:
                model, body = read_light_body(body, rules)
            else:
                model, body = await asyncio.to_thread(read_light_body, body, rules)
            await self._send(replace(call, body=body), self._wanted(exchange, model, pin), exchange)

    async def _relay_form(self, call: Call, exchange: Exchange, pin: str) -> None:
        """Read a form up to its model, then let the rest flow."""
        self.config.bounds.check_announced(exchange.headers)
        field = ModelField(first(exchange.headers, b"content-type") or b"")
        upload = Upload(exchange.receive, self.config.bounds, exchange.claim)
        await upload.read_head(field.feed)
        model = field.value.decode("utf-8", "replace")
        served = self.config.rules.aliases.get(model, model)
        grown_bytes = 0
        if served != model:
            head = field.replaced(bytes(upload.head), served.encode())
            grown_bytes = len(head) - len(upload.head)
            upload.head = bytearray(head)
        await self._flow(call, upload, self._wanted(exchange, served, pin), exchange, grown_bytes)

    async def _relay_bytes(self, call: Call, exchange: Exchange, pin: str) -> None:
        """Let any other body flow; without one there is nothing to wait for."""
        self.config.bounds.check_announced(exchange.headers)
        upload = Upload(exchange.receive, self.config.bounds, exchange.claim)
        await upload.read_head(lambda _: True)
        await self._flow(call, upload, self._wanted(exchange, "", pin), exchange, 0)

    async def _flow(
        self, call: Call, upload: Upload, wanted: Wanted, exchange: Exchange, grown_bytes: int
    ) -> None:
        exchange.arrived(asyncio.get_running_loop().time())
        if upload.ended:
            async with while_client_stays(exchange.receive, exchange.reply):
                await self._send(replace(call, body=upload.take_whole()), wanted, exchange)
            return
        headers = list(call.headers)
        announced = announced_bytes(exchange.headers)
        if announced is not None:
            headers.append((b"content-length", str(announced + grown_bytes).encode()))
        async with flowing(upload, exchange.reply) as body:
            await self._send(replace(call, headers=headers, body=body), wanted, exchange)

    def _wanted(self, exchange: Exchange, model: str, pin: str) -> Wanted:
        """Whom to ask.

        Raises:
            UnknownResponseError: nobody is known to hold the stored response.
        """
        exchange.record.model = model[:MODEL_LABEL_CHARS_MAX]
        if exchange.route.way is not Way.STORED:
            return Wanted(model=model, only=pin)
        response_id = exchange.route.response_id
        owner = self._owners.find(response_id, asyncio.get_running_loop().time())
        if owner is not None:
            return Wanted(only=owner.worker_id)
        able = self._light.candidates("")
        if len(able) == 1:
            return Wanted(only=able[0].worker_id)
        raise UnknownResponseError(f"no worker is known to hold the response {response_id!r}")

    async def _send(self, call: Call, wanted: Wanted, exchange: Exchange) -> None:
        reply = exchange.reply
        with self._light.place(wanted) as place:
            await place.start()
            reply.placement = place
            await self._forwarder.relay(call, place, reply)
        if exchange.route.response_id and call.method == "DELETE" and reply.status < 300:
            self._owners.forget(exchange.route.response_id)
