"""1 edge, the routes that generate: read, placed by the queue, relayed."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from service.asgi import comments_while_waiting, while_client_stays
from service.call import Call, Reply
from service.central_queue import CentralQueue
from service.control.events import Request
from service.exchange import Exchange
from service.forwarder import Forwarder
from service.headers import RawHeaders, first, to_worker
from service.hints import HeaderFacts
from service.intake import BodyFacts, Rules, read_body
from service.owners import Owner, Owners
from service.placement import Placement
from service.surface import Api
from service.uploads import BodyBounds, check_plain, read_whole

MODEL_LABEL_CHARS_MAX: Final = 128
SPLIT_PATHS: Final = ("/v1/chat/completions", "/v1/completions")
"""Routes whose requests a prefill and a decode worker may share."""
ID_WITHIN_BYTES: Final = 16 * 1024
_ID: Final = re.compile(rb'"id":\s*"(resp[\w-]{1,200})"')


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingConfig:
    """How bodies are read and what leaves with them.

    Attributes:
        bounds: of the body.
        off_loop_bytes: bodies this long are parsed in a thread.
        rules: what is changed in them.
        keeps_authorization: whether the client's credentials are the worker's business.
        clients_pin: whether a client may name its worker.
        session_headers: where a client may name its conversation; the first one sent counts.
        comment_s: pause between comments to who waits for a stream; 0 for none.
    """

    bounds: BodyBounds
    off_loop_bytes: int
    rules: Rules
    keeps_authorization: bool
    clients_pin: bool
    comment_s: float
    session_headers: tuple[bytes, ...] = ()

    def session(self, headers: RawHeaders) -> bytes:
        """What the client calls its conversation, or nothing."""
        found = (first(headers, name) for name in self.session_headers)
        return next((name for name in found if name), b"")

    def pin(self, hints: HeaderFacts) -> str:
        """The worker that a request is for by its client's word, or "" for any."""
        return hints.worker_id if self.clients_pin else ""


class QueuedRoute:
    """Serves requests that generate.

    Attributes:
        config: how bodies are read; may change between requests.
    """

    def __init__(
        self,
        *,
        queue: CentralQueue,
        forwarder: Forwarder,
        owners: Owners,
        context_tokens: Callable[[str], int | None],
        config: ReadingConfig,
    ) -> None:
        self._queue = queue
        self._forwarder = forwarder
        self._owners = owners
        self._context_tokens = context_tokens
        self.config = config

    async def relay(self, exchange: Exchange) -> None:
        """Read, wait for a worker, relay."""
        stopwatch, record = self._queue.stopwatch, exchange.record
        check_plain(exchange.headers)
        exchange.claim.bid = exchange.bid
        body = await read_whole(exchange.headers, exchange.receive_held, self.config.bounds)
        exchange.arrived(asyncio.get_running_loop().time())
        began_s = stopwatch()
        async with while_client_stays(exchange.receive, exchange.reply):
            session = self.config.session(exchange.headers)
            facts = await self._parse(body, exchange.route.api, session)
            hints = exchange.hints()
            owner = self._owner(facts)
            request = self._as_request(exchange, facts, hints, owner)
            record.model = facts.model[:MODEL_LABEL_CHARS_MAX]
            record.prompt_tokens = request.prompt_tokens * facts.prompts
            record.tenant = hints.tenant
            call = self._call(exchange, facts, hints)
            pause_s = self.config.comment_s if facts.streams else 0.0
            async with (
                comments_while_waiting(exchange.reply, pause_s) as stop_comments,
                self._queue.place(request, exchange.trace, exchange.claim.release) as placement,
            ):
                stop_comments()
                exchange.reply.placement = placement
                record.queued_s = placement.queued_s
                record.overhead_s = stopwatch() - began_s - placement.queued_s
                exchange.reply.overhead_s = record.overhead_s
                await self._pass_on(call, placement, exchange, facts)

    async def _pass_on(
        self, call: Call, placement: Placement, exchange: Exchange, facts: BodyFacts
    ) -> None:
        """Relay; of a response that its worker stores, learn the id."""
        if call.api is not Api.RESPONSES:
            await self._forwarder.relay(call, placement, exchange.reply)
            return
        # At once, as the client may ask for it as soon as it knows the id; and at the end, when its
        # length is known.
        reader = _IdReader(
            exchange.reply, facts.names_itself, lambda known: self._note(known, placement)
        )
        try:
            await self._forwarder.relay(call, placement, reader)
        finally:
            self._note(reader.response_id, placement)

    def _note(self, response_id: str, placement: Placement) -> None:
        tokens = placement.request.prompt_tokens + (placement.decode_tokens or 0)
        now_s = asyncio.get_running_loop().time()
        self._owners.note(response_id, placement.worker_id, tokens, now_s)

    def _owner(self, facts: BodyFacts) -> Owner | None:
        if not facts.previous:
            return None
        return self._owners.find(facts.previous, asyncio.get_running_loop().time())

    async def _parse(self, body: bytes, api: Api, session: bytes) -> BodyFacts:
        if len(body) < self.config.off_loop_bytes:
            return read_body(body, api, self.config.rules, session)
        return await asyncio.to_thread(read_body, body, api, self.config.rules, session)

    def _as_request(
        self, exchange: Exchange, facts: BodyFacts, hints: HeaderFacts, owner: Owner | None
    ) -> Request:
        context = self._context_tokens(facts.model)
        prompt_tokens = facts.prompt_tokens + (0 if owner is None else owner.context_tokens)
        if facts.fits_context and context is not None:
            # One token stays for the answer.
            prompt_tokens = max(1, min(prompt_tokens, context - 1))
        floor = facts.decode_tokens_floor
        return Request(
            request_id="",
            arrival_s=exchange.arrival_s,
            prompt_tokens=prompt_tokens,
            decode_tokens_hint=hints.decode_tokens_hint or facts.decode_tokens_hint,
            decode_tokens_limit=_limit(facts, prompt_tokens, context),
            decode_tokens_floor=floor,
            model=facts.model,
            tenant=hints.tenant,
            group=f"{exchange.route.api}:{facts.model[:MODEL_LABEL_CHARS_MAX]}",
            fingerprint=facts.fingerprint,
            sequences=facts.sequences,
            value=facts.value if hints.value is None else hints.value,
            ttft_bound_s=hints.ttft_bound_s,
            e2e_bound_s=hints.e2e_bound_s,
            max_wait_s=hints.max_wait_s,
            streams=facts.streams,
            pinned_worker=self.config.pin(hints) if owner is None else owner.worker_id,
            prefix=facts.prefix,
            body_bytes=exchange.claim.held,
            whole=facts.whole or not exchange.target.startswith(SPLIT_PATHS),
        )

    def _call(self, exchange: Exchange, facts: BodyFacts, hints: HeaderFacts) -> Call:
        api = exchange.route.api
        headers = to_worker(
            exchange.headers,
            # The id of a response is read as it passes, so it must be readable.
            plain=facts.streams or api is Api.RESPONSES or exchange.metered,
            drop_authorization=not self.config.keeps_authorization,
        )
        headers.append((b"x-request-id", exchange.record.request_id.encode()))
        deadline_s = None if hints.deadline_s is None else exchange.arrival_s + hints.deadline_s
        return Call(
            path=exchange.target,
            headers=headers,
            body=facts.body,
            api=api,
            deadline_s=deadline_s,
            trace=exchange.trace,
        )


class _IdReader:
    """Passes an answer on and reads the id of the stored response from its first bytes.

    Attributes:
        response_id: "" until it is known.
    """

    def __init__(self, reply: Reply, named: str, note: Callable[[str], None]) -> None:
        self.response_id = ""
        self._note = note
        self._reply = reply
        self._named = named
        self._head: bytes | None = b""

    async def start(self, status: int, headers: RawHeaders) -> None:
        """Pass on; an answer that is an error stores nothing."""
        if status >= 400:
            self._head = None
        elif self._named:
            self._learn(self._named)
        await self._reply.start(status, headers)

    async def write(self, chunk: bytes) -> None:
        """Look for the id, and pass on."""
        if self._head is not None:
            self._head += chunk
            found = _ID.search(self._head)
            if found:
                self._learn(found[1].decode())
            elif len(self._head) > ID_WITHIN_BYTES:
                self._head = None
        await self._reply.write(chunk)

    async def end(self) -> None:
        """Pass on."""
        await self._reply.end()

    def _learn(self, response_id: str) -> None:
        self.response_id, self._head = response_id, None
        self._note(response_id)


def _limit(facts: BodyFacts, prompt_tokens: int, context_tokens: int | None) -> int | None:
    """The engine stops at the model's context length whatever was asked for."""
    if context_tokens is None:
        return facts.decode_tokens_limit
    room = max(1, context_tokens - prompt_tokens)
    return room if facts.decode_tokens_limit is None else min(facts.decode_tokens_limit, room)
