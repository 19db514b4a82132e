"""Read progress from the bytes of a server-sent event stream as they pass, without re-encoding.

A fast scan: JSON escapes newlines and quotes, so a raw `"completion_tokens":` or a line starting
with `data:` is never model output. Only the first events of a stream, and those that speak of an
error, are parsed.
"""

from __future__ import annotations

import re
from typing import Final

import orjson

_USAGE: Final = re.compile(rb'"completion_tokens":\s*(\d+)')
_DONE: Final = re.compile(rb"^data: ?\[DONE\]", re.MULTILINE)
EVENT_BYTES_MAX: Final = 1 << 20


def usage_tokens(body: bytes) -> int | None:
    """Find the last completion_tokens in JSON bytes, or None."""
    if b'"completion_tokens"' not in body:
        return None
    found = _USAGE.findall(body)
    return int(found[-1]) if found else None


class SseMeter:
    """Counts the tokens of one stream of completions or chat completions.

    One event with content counts as one token, as vLLM sends them; a usage object corrects the
    count.

    Attributes:
        tokens: output tokens seen so far, all choices together.
        done: whether `[DONE]` came.
        failed: whether an error event came.
        error_code: the code it carried, as HTTP means it; 0 when it carried none.
    """

    def __init__(self) -> None:
        self.tokens = 0
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
        end = data.rfind(b"\n\n") + 2
        if end == 1:
            # An event this long is no token event; what counts is that memory is bounded.
            self._rest = data if len(data) <= EVENT_BYTES_MAX else data[-2:]
            return
        self._rest = data[end:]
        self._count(data[:end] if self._rest else data)

    def _count(self, events: bytes) -> None:
        if b"[DONE]" in events and _DONE.search(events):
            self.done = True
        if self.tokens == 0 or b'"error"' in events:
            for event in events.split(b"\n\n"):
                self._read(event)
        else:
            self.tokens += events.count(b"\ndata:") + events.startswith(b"data:")
            self.tokens -= events.count(b'"choices":[]') + self.done
        told = usage_tokens(events)
        if told is not None and told > 0:
            self.tokens = told

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


def _bears_token(choice: object) -> bool:
    if not isinstance(choice, dict):
        return False
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return bool(choice.get("text") or choice.get("finish_reason") or choice.get("token_ids"))
    spoken = (value for key, value in delta.items() if key != "role")
    return any(spoken) or bool(choice.get("finish_reason"))
