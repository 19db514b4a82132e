"""The routes of vLLM that decode nothing: embeddings, scores, rankings, token ids, transcriptions.

One worker serves all of them beside its chats, where a real one has the routes of its model alone.
Answers take no time but wait for a hung engine. What they say is in light_answers.py.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import orjson
from python_multipart.multipart import parse_options_header
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request

from service.mock.bodies import ApiError
from service.mock.exchange import EVENTS, ClientLeftError, Exchange
from service.mock.light_answers import LightAnswers
from service.mock.replies import DONE, WORDS, event

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping

    from starlette.types import Message

    from service.mock.engine import MockEngine
    from service.mock.worker_config import MockWorkerConfig

AUDIO_PATHS: Final = ("/v1/audio/transcriptions", "/v1/audio/translations")
AUDIO_BYTES_PER_S: Final = 32_000
"""Of a sound of 16 kHz with 16 bits, which every file is taken for."""
AUDIO_BYTES_MAX: Final = 25 * 1024 * 1024
WORDS_PER_S: Final = 2
WORDS_MAX: Final = 1000
TRANSCRIBED: Final = ("text", "json")
"""Response formats that a mock has."""


@dataclass(frozen=True, slots=True)
class Transcript:
    """What was heard.

    Attributes:
        words: of the text. seconds: of sound, rounded up. stream: whether words come one by one.
    """

    words: tuple[str, ...]
    seconds: int
    stream: bool

    def whole(self) -> dict[str, object]:
        """The answer in one piece."""
        sound = {"type": "duration", "seconds": self.seconds}
        return {"text": " ".join(self.words), "usage": sound}

    def events(self, head: Mapping[str, object]) -> bytes:
        """The answer as events, one a word."""
        last = len(self.words) - 1
        return b"".join(
            event(
                {
                    **head,
                    "choices": [
                        {
                            "delta": {"content": f" {word}"},
                            "finish_reason": "stop" if index == last else None,
                            "stop_reason": None,
                        }
                    ],
                }
            )
            for index, word in enumerate(self.words)
        )


class LightRoutes:
    """Serves these routes for one worker.

    Args:
        config: of the worker.
        engine: whose state every answer waits for.
    """

    def __init__(self, config: MockWorkerConfig, engine: MockEngine) -> None:
        self._config = config
        self._engine = engine
        self._answers = LightAnswers(config)

    def handlers(self) -> Iterator[tuple[str, Callable[[Request, Exchange], Awaitable[None]]]]:
        """Every path with what answers a POST to it.

        A handler raises ApiError for what vLLM would refuse, ClientLeftError when nobody waits any
        more, EngineDeadError when the engine does not run.
        """
        for path, answer in self._answers.by_path().items():
            yield path, partial(self._serve, answer)
        for path in AUDIO_PATHS:
            yield path, self._transcribe

    async def _serve(
        self, answer: Callable[[bytes, str], dict[str, object]], _: Request, exchange: Exchange
    ) -> None:
        raw = await exchange.body()
        reply = answer(raw, exchange.name(None))
        await self._turn(exchange)
        await exchange.answer(200, orjson.dumps(reply))

    async def _transcribe(self, request: Request, exchange: Exchange) -> None:
        transcript = await self._heard(request, await exchange.any_body())
        name = exchange.name(None)
        await self._turn(exchange)
        if not transcript.stream:
            await exchange.answer(200, orjson.dumps(transcript.whole()))
            return
        head = {
            "id": f"trsc-{name}",
            "object": "transcription.chunk",
            "created": int(time.time()),
            "model": self._config.model,
        }
        await exchange.start(200, EVENTS)
        await exchange.end(transcript.events(head) + DONE)

    async def _turn(self, exchange: Exchange) -> None:
        """Wait for the engine, unless the client leaves."""
        going = asyncio.ensure_future(self._engine.until_going())
        leaving = asyncio.ensure_future(exchange.client_leaves())
        try:
            await asyncio.wait((going, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not going.done():
                raise ClientLeftError
            going.result()
        finally:
            going.cancel()
            leaving.cancel()

    async def _heard(self, request: Request, body: bytes) -> Transcript:
        async def receive() -> Message:
            return {"type": "http.request", "body": body, "more_body": False}

        _, options = parse_options_header(request.headers.get("content-type", ""))
        if b"\r\n--" + options.get(b"boundary", b"") + b"--" not in body:
            # The parser would take it for whole and leave open the file that it was in.
            raise ApiError(400, "There was an error parsing the body", kind="Bad Request")
        try:
            async with Request(request.scope, receive).form() as form:
                fields = {key: value for key, value in form.items() if isinstance(value, str)}
                sound = form.get("file")
                data = await sound.read() if isinstance(sound, UploadFile) else None
        except HTTPException as error:
            raise ApiError(400, str(error.detail), kind="Bad Request") from error
        if data is None:
            raise ApiError(400, "file: Field required", kind="Bad Request")
        if len(data) > AUDIO_BYTES_MAX:
            raise ApiError(400, "Maximum file size exceeded", param="audio_filesize_mb")
        self._answers.check_model(fields.get("model"))
        if fields.get("response_format", "json") not in TRANSCRIBED:
            formats = ", ".join(f"`{name}`" for name in TRANSCRIBED)
            raise ApiError(400, f"Currently only support response_format: {formats}")
        seconds = -(-len(data) // AUDIO_BYTES_PER_S)
        key = zlib.crc32(data)
        count = min(WORDS_MAX, max(1, WORDS_PER_S * seconds))
        words = (WORDS[(key + position) % len(WORDS)].decode().strip() for position in range(count))
        return Transcript(tuple(words), seconds, fields.get("stream", "false").lower() == "true")
