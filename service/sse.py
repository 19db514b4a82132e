"""Read progress from the bytes of a server-sent event stream as they pass, without re-encoding.

Completions and chats end with `[DONE]`; responses and messages name their events, and a name says
the end; of other streams nothing is known but their bytes. A fast scan: JSON escapes newlines and
quotes, so a raw `"completion_tokens":` or a line starting with `data:` is never model output. Only
the first events of a stream, and those that speak of an error, are parsed.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import Final, Protocol

import orjson

from service.surface import Api

_USAGE: Final = re.compile(rb'"(?:completion|output)_tokens":\s*(\d{1,9})(?!\d)')
_PROMPT: Final = re.compile(rb'"(?:prompt|input)_tokens":\s*(\d{1,9})(?!\d)')
_NAMED: Final = re.compile(rb"^event: ?([\w.-]+)", re.MULTILINE)
ENDS: Final = frozenset(
    {b"message_stop"} | {b"response." + how for how in (b"completed", b"incomplete", b"cancelled")}
)
FAILURES: Final = frozenset({b"error", b"response.failed"})
NO_TOKEN: Final = b"message_delta"
"""The one event named a delta that carries no token but the end's reason and the usage."""
_DONE: Final = re.compile(rb"^data: ?\[DONE\]", re.MULTILINE)
USAGE_BYTES_MAX: Final = 64
"""Longer than a name and its number, with a blank or two between."""
EVENT_BYTES_MAX: Final = 1 << 20


def usage_tokens(body: bytes) -> int | None:
    """Find the last completion_tokens or output_tokens in JSON bytes, or None.

    No answer has a thousand million tokens: such a number is as good as none.
    """
    if b'_tokens"' not in body:
        return None
    found = _USAGE.findall(body)
    return int(found[-1]) if found else None


class UsageReader:
    """Reads what an answer says that it cost as its bytes pass, wherever in it that stands.

    The largest number counts: what an engine repeats of its client's words comes before the usage
    in some answers and after it in others, and must not make it cheaper.
    """

    def __init__(self) -> None:
        self._decode = self._prompt = -1
        self._rest = b""

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes, cut anywhere; few of them are kept."""
        data = self._rest + chunk
        self._rest = data[-USAGE_BYTES_MAX:]
        # What ends here may go on in the next bytes.
        self._scan(data, len(data))

    def _scan(self, data: bytes, end: int) -> None:
        if b'_tokens"' not in data:
            return
        decode = (int(one[1]) for one in _USAGE.finditer(data) if one.end() < end)
        self._decode = max(self._decode, *decode, -1)
        prompt = (int(one[1]) for one in _PROMPT.finditer(data) if one.end() < end)
        self._prompt = max(self._prompt, *prompt, -1)

    @property
    def decode_tokens(self) -> int | None:
        """Output tokens so far, or None where it says nothing."""
        return None if self._decode < 0 else self._decode

    @property
    def prompt_tokens(self) -> int | None:
        """Tokens of all its prompts so far, or None where it says nothing."""
        return None if self._prompt < 0 else self._prompt


class Meter(Protocol):
    """What the relay reads from a stream as it passes.

    Attributes:
        tokens: output tokens seen so far.
        exact: whether the last of them were counted by the engine and not by events.
        done: whether the stream said that it is complete.
        failed: whether it said that it failed.
        error_code: the code that came with it, as HTTP means it, or 0.
    """

    tokens: int
    exact: bool
    done: bool
    failed: bool
    error_code: int

    @property
    def mid_event(self) -> bool:
        """Whether the last event is incomplete."""

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes, cut anywhere."""

    def error_event(self, body: bytes) -> bytes:
        """Write an error object as an event that readers of this stream understand."""


def meter_of(api: Api) -> Meter:
    """Choose how a stream is read."""
    match api:
        case Api.CHAT | Api.TEXT | Api.TOKENS | Api.CHAT_BATCH:
            return SseMeter()
        case Api.RESPONSES | Api.MESSAGES:
            return NamedEventMeter()
        case Api.OTHER:
            return OpaqueMeter()


class _EventMeter(ABC):
    """Cuts a stream into whole events; a usage object corrects the count of its subclass.

    Attributes:
        tokens: output tokens seen so far, all choices together.
        exact: whether a usage object gave the last count.
        done: whether the event that ends the stream came.
        failed: whether an error event came.
        error_code: the code it carried, as HTTP means it; 0 when it carried none.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.exact = False
        self.done = False
        self.failed = False
        self.error_code = 0
        self._rest = b""

    @property
    def mid_event(self) -> bool:
        """Whether the last event is incomplete."""
        return bool(self._rest)

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes, cut anywhere."""
        data = self._rest + chunk if self._rest else chunk
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        if data.endswith(b"\n\n"):
            events, self._rest = data, b""
        else:
            end = data.rfind(b"\n\n") + 2
            if end == 1:
                # An event this long is no token event; what counts is that memory is bounded.
                self._rest = data if len(data) <= EVENT_BYTES_MAX else data[-2:]
                return
            events, self._rest = data[:end], data[end:]
        self._count(events)
        told = usage_tokens(events) if b'_tokens"' in events else None
        self.exact = told is not None and told > 0
        if told is not None and told > 0:
            self.tokens = told

    @abstractmethod
    def _count(self, events: bytes) -> None:
        """Read whole events."""


class SseMeter(_EventMeter):
    """Counts the tokens of one stream of completions or chat completions.

    One event with content counts as one token, as vLLM sends them.
    """

    def error_event(self, body: bytes) -> bytes:
        """An event with an error object."""
        return b"data: " + body + b"\n\n"

    def _count(self, events: bytes) -> None:
        if b"[DONE]" in events and _DONE.search(events):
            self.done = True
        if self.tokens == 0 or b'"error"' in events:
            for event in events.split(b"\n\n"):
                self._read(event)
        else:
            self.tokens += events.count(b"\ndata:") + events.startswith(b"data:")
            self.tokens -= events.count(b'"choices":[]') + self.done

    def _read(self, event: bytes) -> None:
        if not event.startswith(b"data:") or _DONE.match(event):
            return
        try:
            message = orjson.loads(event[5:])
        except orjson.JSONDecodeError:
            return
        if isinstance(message, dict):
            error = message.get("error")
            self.failed |= bool(error) or message.get("object") == "error"
            code = error.get("code") if isinstance(error, dict) else message.get("code")
            self.error_code = code if isinstance(code, int) and self.failed else self.error_code
            choices = message.get("choices")
            self.tokens += isinstance(choices, list) and any(map(_bears_token, choices))


class NamedEventMeter(_EventMeter):
    """Counts the tokens of one stream of responses or messages: one for each event named a delta.

    These streams carry no error code.
    """

    def error_event(self, body: bytes) -> bytes:
        """A named event with an error object."""
        return b"event: error\ndata: " + body + b"\n\n"

    def _count(self, events: bytes) -> None:
        for name in _NAMED.findall(events):
            self.tokens += name.endswith(b"delta") and name != NO_TOKEN
            self.done |= name in ENDS
            self.failed |= name in FAILURES


class OpaqueMeter:
    """Of a stream in an unknown format: it is complete when its connection says so.

    Attributes:
        events: whole ones so far; how many tokens they are is not known.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.exact = False
        self.done = True
        self.failed = False
        self.error_code = 0
        self.events = 0
        self._tail = b"\n\n"

    @property
    def mid_event(self) -> bool:
        """Whether the last event is incomplete."""
        return self._tail != b"\n\n"

    def feed(self, chunk: bytes) -> None:
        """Count the ends of events; remember only how it ends."""
        data = (self._tail + chunk).replace(b"\r\n", b"\n")
        self.events += data.count(b"\n\n") - (self._tail == b"\n\n")
        self._tail = data[-2:]

    def error_event(self, body: bytes) -> bytes:
        """An event with an error object."""
        return b"data: " + body + b"\n\n"


def _bears_token(choice: object) -> bool:
    if not isinstance(choice, dict):
        return False
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return bool(choice.get("text") or choice.get("finish_reason") or choice.get("token_ids"))
    spoken = (value for key, value in delta.items() if key != "role")
    return any(spoken) or bool(choice.get("finish_reason"))
