"""What the routes that decode nothing answer to a body; numbers depend on its text alone."""

from __future__ import annotations

import base64
import math
import struct
import time
import zlib
from typing import TYPE_CHECKING, Final, TypeVar

from service.mock.bodies import ApiError, parse_body
from service.mock.light_bodies import (
    EMBEDDING_SIZE,
    DetokenizeBody,
    InputBody,
    LightBody,
    RerankBody,
    ScoreBody,
    TokenizeBody,
    chat_ids,
    text_of,
    token_ids,
)
from service.mock.named_bodies import MessagesBody
from service.mock.replies import usage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from service.mock.worker_config import MockWorkerConfig

SPREAD: Final = 2654435761
"""Knuth's multiplicative hash: WORD over the golden ratio."""
WORD: Final = 2**32
_Body = TypeVar("_Body", bound=LightBody)


class LightAnswers:
    """Answers of one worker.

    Args:
        config: of the worker.
    """

    def __init__(self, config: MockWorkerConfig) -> None:
        self._config = config

    def by_path(self) -> dict[str, Callable[[bytes, str], dict[str, object]]]:
        """By path, what turns a body and a request id into an answer."""
        return {
            "/v1/embeddings": self._embeddings,
            "/pooling": self._pooling,
            "/classify": self._classify,
            "/score": self._score,
            "/v1/score": self._score,
            "/rerank": self._rerank,
            "/v1/rerank": self._rerank,
            "/v2/rerank": self._rerank,
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
            "/v1/messages/count_tokens": self._count_tokens,
        }

    def _embeddings(self, raw: bytes, name: str) -> dict[str, object]:
        body, prompts = self._inputs(raw)
        size = EMBEDDING_SIZE if body.dimensions is None else body.dimensions
        if not 1 <= size <= EMBEDDING_SIZE:
            message = f"dimensions must be in 1..{EMBEDDING_SIZE}, got {size}"
            raise ApiError(400, message, param="dimensions")
        vectors = _vectors(prompts, size, body)
        data = [
            {"index": index, "object": "embedding", "embedding": vector}
            for index, vector in enumerate(vectors)
        ]
        return self._list(f"embd-{name}", data, prompts)

    def _pooling(self, raw: bytes, name: str) -> dict[str, object]:
        body, prompts = self._inputs(raw)
        vectors = _vectors(prompts, EMBEDDING_SIZE, body)
        data = [
            {"index": index, "object": "pooling", "data": vector}
            for index, vector in enumerate(vectors)
        ]
        return self._list(f"pooling-{name}", data, prompts)

    def _classify(self, raw: bytes, name: str) -> dict[str, object]:
        _, prompts = self._inputs(raw)
        data: list[dict[str, object]] = []
        for index, prompt in enumerate(prompts):
            yes = _share(_key(prompt))
            label = "LABEL_1" if yes > 1 - yes else "LABEL_0"
            probs = [1 - yes, yes]
            data.append({"index": index, "label": label, "probs": probs, "num_classes": 2})
        return self._list(f"classify-{name}", data, prompts)

    def _score(self, raw: bytes, name: str) -> dict[str, object]:
        body = self._read(ScoreBody, raw)
        pairs = body.pairs()
        prompts = self._pair_prompts(pairs)
        data: list[dict[str, object]] = [
            {"index": index, "object": "score", "score": _likeness(*pair)}
            for index, pair in enumerate(pairs)
        ]
        return self._list(f"score-{name}", data, prompts)

    def _rerank(self, raw: bytes, name: str) -> dict[str, object]:
        body = self._read(RerankBody, raw)
        pairs = body.pairs()
        tokens = sum(map(len, self._pair_prompts(pairs)))
        scored = sorted(
            ((_likeness(*pair), index) for index, pair in enumerate(pairs)),
            key=lambda each: (-each[0], each[1]),
        )
        results = [
            {
                "index": index,
                "document": {"text": pairs[index][1], "multi_modal": None},
                "relevance_score": score,
            }
            for score, index in scored[: body.top_n or len(scored)]
        ]
        return {
            "id": f"score-{name}",
            "model": self._config.model,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            "results": results,
        }

    def _tokenize(self, raw: bytes, _: str) -> dict[str, object]:
        body = self._read(TokenizeBody, raw)
        ids = body.ids()
        return {
            "count": len(ids),
            "max_model_len": self._config.max_model_len,
            "tokens": ids,
            "token_strs": [text_of([one]) for one in ids] if body.return_token_strs else None,
        }

    def _detokenize(self, raw: bytes, _: str) -> dict[str, object]:
        return {"prompt": text_of(self._read(DetokenizeBody, raw).tokens)}

    def _count_tokens(self, raw: bytes, _: str) -> dict[str, object]:
        body = parse_body(MessagesBody, raw)
        self.check_model(body.model)
        count = len(chat_ids(body.turns()))
        return {
            "input_tokens": count,
            "context_management": {"original_input_tokens": count},
        }

    def _inputs(self, raw: bytes) -> tuple[InputBody, list[list[int]]]:
        body = self._read(InputBody, raw)
        prompts = body.prompts()
        self._check_lengths(prompts)
        return body, prompts

    def _pair_prompts(self, pairs: Sequence[tuple[str, str]]) -> list[list[int]]:
        """What a cross encoder reads: both texts of a pair, one after the other."""
        prompts = [token_ids(first) + token_ids(second) for first, second in pairs]
        self._check_lengths(prompts)
        return prompts

    def _read(self, kind: type[_Body], raw: bytes) -> _Body:
        body = parse_body(kind, raw)
        self.check_model(body.model)
        return body

    def check_model(self, model: str | None) -> None:
        """Refuse another model.

        Raises:
            ApiError: it is another.
        """
        if model and model != self._config.model:
            message = f"The model `{model}` does not exist."
            raise ApiError(404, message, kind="NotFoundError", param="model")

    def _check_lengths(self, prompts: Sequence[Sequence[int]]) -> None:
        longest, context = max(map(len, prompts)), self._config.max_model_len
        if longest > context:
            message = (
                f"This model's maximum context length is {context} tokens. However, your request "
                f"has {longest} input tokens. Please reduce the length of the input."
            )
            raise ApiError(400, message, param="input_tokens")

    def _list(
        self, name: str, data: Sequence[object], prompts: Sequence[Sequence[int]]
    ) -> dict[str, object]:
        return {
            "id": name,
            "object": "list",
            "created": int(time.time()),
            "model": self._config.model,
            "data": data,
            "usage": usage(sum(map(len, prompts)), 0),
        }


def _key(prompt: Sequence[int]) -> int:
    return zlib.crc32(repr(list(prompt)).encode())


def _share(key: int) -> float:
    """A number in [0, 1), far from that of a key nearby."""
    return (key * SPREAD % WORD) / WORD


def _vector(prompt: Sequence[int], size: int) -> list[float]:
    """A vector of length 1."""
    key = _key(prompt)
    raw = [_share(zlib.crc32(f"{key} {index}".encode())) - 0.5 for index in range(size)]
    norm = math.sqrt(sum(each * each for each in raw)) or 1.0
    return [each / norm for each in raw]


def _vectors(
    prompts: Sequence[Sequence[int]], size: int, body: InputBody
) -> list[list[float] | str]:
    """One vector a prompt, encoded as the body asks."""
    return [_encoded(_vector(prompt, size), body.encoding_format) for prompt in prompts]


def _encoded(vector: Sequence[float], encoding: str) -> list[float] | str:
    if encoding == "float":
        return list(vector)
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def _likeness(first: str, second: str) -> float:
    """Share of the words of both texts that are in both: alike texts score higher."""
    words, others = set(first.split()), set(second.split())
    return len(words & others) / max(1, len(words | others))
