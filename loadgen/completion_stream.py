"""Reading one streamed completion: when the first token came, how many came, how it ended.

Sans I/O: bytes and times in, a verdict out. A 200 with an error event, or one that stops without
[DONE], is no success: vLLM reports failures inside streams that began well.
"""

from __future__ import annotations

from dataclasses import dataclass

import orjson

from loadgen.outcomes import End

DATA_PREFIX = b"data:"
DONE = b"[DONE]"
EVENT_BYTES_MAX = 1 << 20
DETAIL_CHARACTERS_MAX = 200
REFUSING_5XX = frozenset({503})


@dataclass(frozen=True, slots=True)
class Verdict:
    """How an exchange ended and why."""

    end: End
    detail: str = ""


def verdict_of_status(status: int, body: bytes) -> Verdict:
    """Judge an answer that is no 200: 4xx and 503 turned the request away, the rest failed."""
    detail = error_detail(body) or f"status {status}"
    refused = 400 <= status < 500 or status in REFUSING_5XX
    return Verdict(End.REFUSED if refused else End.FAILED, detail)


def error_detail(body: bytes) -> str:
    """Take the reason out of an OpenAI-shaped error body; "" when there is none."""
    try:
        record = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body[:DETAIL_CHARACTERS_MAX].decode(errors="replace")
    error = record.get("error", record) if isinstance(record, dict) else None
    if not isinstance(error, dict):
        return str(error or "")[:DETAIL_CHARACTERS_MAX]
    reason = error.get("code") or error.get("type") or ""
    return f"{reason}: {error.get('message', '')}".strip(": ")[:DETAIL_CHARACTERS_MAX]


class CompletionStream:
    """Reads the server-sent events of one /v1/completions stream.

    Attributes:
        first_token_s: time of the first event with a choice, or None.
        done: whether [DONE] was seen.
        events: events with a choice so far.
    """

    def __init__(self) -> None:
        self.first_token_s: float | None = None
        self.done = False
        self._buffer = b""
        self.events = 0
        self._counted: int | None = None
        self._finish_reason: str | None = None
        self._error: Verdict | None = None

    def feed(self, chunk: bytes, now_s: float) -> None:
        """Take bytes as they came off the wire."""
        buffer = self._buffer + chunk
        *whole, self._buffer = buffer.split(b"\n")
        for line in whole:
            if line.startswith(DATA_PREFIX):
                self._event(line[len(DATA_PREFIX) :].strip(), now_s)
        if len(self._buffer) > EVENT_BYTES_MAX:
            self._error = Verdict(End.FAILED, "an event is larger than 1 MiB")
            self._buffer = b""

    @property
    def output_tokens(self) -> int:
        """Output tokens: as the engine counted them at the end, else events seen so far."""
        return self.events if self._counted is None else self._counted

    def verdict(self) -> Verdict:
        """Judge a stream whose bytes have ended."""
        if self._error is not None:
            return self._error
        if not self.done or self._finish_reason is None:
            return Verdict(End.FAILED, "the stream ended early")
        return Verdict(End.COMPLETED)

    def _event(self, payload: bytes, now_s: float) -> None:
        if payload == DONE:
            self.done = True
            return
        try:
            event = orjson.loads(payload)
        except orjson.JSONDecodeError:
            self._error = self._error or Verdict(End.FAILED, "an event is not JSON")
            return
        if not isinstance(event, dict):
            self._error = self._error or Verdict(End.FAILED, "an event is not an object")
            return
        if event.get("error"):
            self._error = _error_event(event["error"], payload)
        choices, usage = event.get("choices"), event.get("usage")
        if isinstance(choices, list) and choices and isinstance(choices[0], dict):
            self._choice(choices[0], now_s)
        counted = usage.get("completion_tokens") if isinstance(usage, dict) else None
        if isinstance(counted, int):
            self._counted = counted

    def _choice(self, choice: dict[str, object], now_s: float) -> None:
        if self.first_token_s is None:
            self.first_token_s = now_s
        self.events += 1
        reason = choice.get("finish_reason")
        if isinstance(reason, str):
            self._finish_reason = reason


def _error_event(error: object, payload: bytes) -> Verdict:
    """Judge an error inside a stream by the status code it carries, if it carries one."""
    code = error.get("code") if isinstance(error, dict) else None
    if isinstance(code, int) and code >= 400:
        return verdict_of_status(code, payload)
    return Verdict(End.FAILED, error_detail(payload))
