"""Bodies of the routes that decode nothing, as vLLM takes them, and texts as token ids.

A token id is its four bytes of UTF-8 read as a number, so that ids can be turned back into text.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from service.mock.bodies import ApiError, Message, TokenIds
from service.mock.protocol import MESSAGE_TOKENS, PART_TOKENS, TEXT_BYTES_PER_TOKEN

EMBEDDING_SIZE: Final = 8
"""Numbers in an embedding; a request may ask for fewer (`dimensions`)."""
ID_BYTES_MAX: Final = 8

Texts: TypeAlias = str | list[str]


def token_ids(text: str) -> list[int]:
    """Token ids of a text: as many as the documented rule counts."""
    data = text.encode("utf-8", "replace")
    starts = range(0, max(1, len(data)), TEXT_BYTES_PER_TOKEN)
    return [int.from_bytes(data[start : start + TEXT_BYTES_PER_TOKEN], "big") for start in starts]


def text_of(ids: list[int]) -> str:
    """The text of token ids; what is no UTF-8 becomes the replacement sign."""
    parts = (number.to_bytes(ID_BYTES_MAX, "big").lstrip(b"\0") for number in ids)
    return b"".join(parts).decode("utf-8", "replace")


class LightBody(BaseModel):
    """What these routes share; other fields are ignored, as in vLLM."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    model: str | None = None


class InputBody(LightBody):
    """POST /v1/embeddings, /pooling and /classify: an input, or a chat as one."""

    input: TokenIds | list[TokenIds] | Texts | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None

    def prompts(self) -> list[list[int]]:
        """Return the prompts as token ids.

        Raises:
            ApiError: there is none, or one is empty.
        """
        if self.messages is not None:
            return [chat_ids(self.messages)]
        if self.input is None:
            raise ApiError(400, "input: Field required", kind="Bad Request")
        if isinstance(self.input, str):
            return [token_ids(self.input)]
        ids: list[int] = []
        prompts: list[list[int]] = []
        for item in self.input:
            if isinstance(item, int):
                ids.append(item)
            else:
                prompts.append(token_ids(item) if isinstance(item, str) else item)
        prompts = [ids] if ids else prompts
        if not prompts or not all(prompts):
            raise ApiError(400, "The decoder prompt cannot be empty", param="prompt")
        return prompts


class ScoreBody(LightBody):
    """POST /score, under each pair of names that vLLM takes."""

    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    text_1: Texts | None = None
    text_2: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None

    def pairs(self) -> list[tuple[str, str]]:
        """Return what is compared with what: 1:1, 1:N or N:N.

        Raises:
            ApiError: a side is missing or empty, or the lengths do not fit.
        """
        given = (
            (self.queries, self.documents),
            (self.queries, self.items),
            (self.data_1, self.data_2),
            (self.text_1, self.text_2),
        )
        for first, second in given:
            if first is not None and second is not None:
                return _paired(_listed(first), _listed(second))
        raise ApiError(400, "queries and documents: Field required", kind="Bad Request")


class RerankBody(LightBody):
    """POST /rerank."""

    query: str
    documents: Texts
    top_n: Annotated[int, Field(ge=0)] = 0

    def pairs(self) -> list[tuple[str, str]]:
        """Return the query with each document.

        Raises:
            ApiError: there is no document.
        """
        return _paired([self.query], _listed(self.documents))


class TokenizeBody(LightBody):
    """POST /tokenize: a prompt or a chat."""

    prompt: str | None = None
    messages: list[Message] | None = None
    return_token_strs: bool | None = False

    def ids(self) -> list[int]:
        """Return the token ids.

        Raises:
            ApiError: there is nothing to count.
        """
        if self.prompt is not None:
            return token_ids(self.prompt)
        if self.messages is not None:
            return chat_ids(self.messages)
        raise ApiError(400, "prompt: Field required", kind="Bad Request")


class DetokenizeBody(LightBody):
    """POST /detokenize."""

    tokens: list[Annotated[int, Field(ge=0, le=2**63 - 1)]]


def chat_ids(messages: list[Message]) -> list[int]:
    """Token ids of a chat: as many as its prompt has; what is no text is zeros."""
    ids: list[int] = []
    for message in messages:
        ids += [0] * MESSAGE_TOKENS
        if isinstance(message.content, str):
            ids += token_ids(message.content)
            continue
        for part in message.content or ():
            text = part.get("text")
            ids += token_ids(text) if isinstance(text, str) else [0] * PART_TOKENS
    return ids


def _listed(texts: Texts) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def _paired(first: list[str], second: list[str]) -> list[tuple[str, str]]:
    if not first or not second:
        raise ApiError(400, "At least one text element must be given")
    if len(first) not in (1, len(second)):
        raise ApiError(400, "Input lengths must be either 1:1, 1:N or N:N")
    if len(first) == 1:
        first *= len(second)
    return list(zip(first, second, strict=True))
