"""1 edge, how a proxied request ended: what its record says of it, and the tokens it cost."""

from __future__ import annotations

import math
from typing import Final

from service.asgi import Place
from service.errors import BidgateError, ClientGoneError, RefusedError
from service.exchange import Exchange
from service.headers import FORM, media_type
from service.prompts import BYTES_PER_TOKEN
from service.surface import Way

BAD_STATUS: Final = 400
"""From here on an answer says that something went wrong."""


def conclude(exchange: Exchange, error: BaseException | None, now_s: float) -> None:
    """Note in a request's record how it ended: by an error of ours, or None."""
    reply, record = exchange.reply, exchange.record
    placement = reply.placement
    record.e2e_s = now_s - exchange.arrival_s
    if placement is not None:
        _note_place(exchange, placement)
    elif error is not None:
        record.outcome = "refused" if isinstance(error, RefusedError) else "failed"
    if isinstance(error, BidgateError):
        record.status = reply.status or error.status
        record.reason = error.cause
        if isinstance(error, ClientGoneError):
            record.status, record.outcome = error.status, "cancelled"
        elif isinstance(error, RefusedError):
            record.outcome = "refused"
        elif placement is not None:
            record.outcome = "failed"
    elif reply.status:
        record.status = reply.status


def _note_place(exchange: Exchange, placement: Place) -> None:
    """Take over what its place at a worker knows."""
    record = exchange.record
    record.worker = placement.worker_id
    record.prefill_worker = placement.prefill_id
    record.starts = placement.starts
    if not record.light:
        record.queued_s, record.price = placement.queued_s, placement.price()
        record.price_batch, record.price_kv = placement.prices
    elif exchange.route.way is Way.LIGHT:
        record.prompt_tokens = placement.told_prompt_tokens
    record.decode_tokens = placement.decode_tokens
    record.outcome = placement.outcome
    if placement.first_token_s is not None:
        record.ttft_s = placement.first_token_s - exchange.arrival_s


def tokens_spent(exchange: Exchange) -> int:
    """Tokens that a request cost its tenant; one that never started cost nothing.

    Prompts cost what the answer says, else the estimate; outputs what was counted or told, and of
    an answer that told nothing what was set aside for it. What skips the queue has neither
    estimate nor column: an answer that tells nothing costs what was relayed. To ask again for a
    stored response costs no prompt.
    """
    record, reply = exchange.record, exchange.reply
    placement = reply.placement
    if placement is None or not record.starts:
        return 0
    told = None if record.light else placement.told_prompt_tokens
    prompt_tokens = record.prompt_tokens if told is None else told
    decode_tokens = record.decode_tokens
    if decode_tokens is None and 0 < reply.status < BAD_STATUS:
        silent = record.light and prompt_tokens is None
        decode_tokens = _relayed_tokens(exchange) if silent else placement.column_tokens
    return (prompt_tokens or 0) + (decode_tokens or 0)


def _relayed_tokens(exchange: Exchange) -> int:
    """Tokens of what was relayed, by its length: of the JSON that came, or what a form gave.

    A form's own length says nothing about its tokens, nor does that of vectors. A stream's events
    were counted.
    """
    if not exchange.route.runs_a_model:
        return 0
    if media_type(exchange.headers) == FORM:
        return math.ceil(exchange.reply.sent_bytes / BYTES_PER_TOKEN)
    return math.ceil(exchange.body_bytes / BYTES_PER_TOKEN)
