"""Bodies of the generation routes as vLLM takes them: names, types and defaults, by pydantic."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Final, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

if TYPE_CHECKING:
    from collections.abc import Iterator

COMPLETION_TOKENS_DEFAULT: Final = 16
"""vLLM's max_tokens where /v1/completions gets none; chat may fill the context."""

TokenIds: TypeAlias = list[Annotated[int, Field(ge=0, lt=2**31)]]


_AnyBody = TypeVar("_AnyBody", bound=BaseModel)


class ApiError(Exception):
    """A refusal, with what vLLM writes into its error object."""

    def __init__(
        self, status: int, message: str, *, kind: str = "BadRequestError", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param

    def body(self) -> dict[str, object]:
        """Return the error object."""
        error = {
            "message": str(self),
            "type": self.kind,
            "param": self.param,
            "code": self.status,
        }
        return {"error": error}


class StreamOptions(BaseModel):
    """stream_options."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    include_usage: bool | None = True
    continuous_usage_stats: bool | None = False


class GenerationBody(BaseModel):
    """Fields that completions and chat completions share; others are ignored, as in vLLM.

    mock_decode_tokens is ours: the output length that the model would choose by itself. Real
    vLLM ignores it.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    model: str | None = None
    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    temperature: float | None = 1.0
    seed: int | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    request_id: str | None = None
    kv_transfer_params: dict[str, object] | None = None
    mock_decode_tokens: Annotated[int, Field(ge=1)] | None = None


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: TokenIds | list[TokenIds] | str | list[str]

    def prompts(self) -> list[bytes | list[int]]:
        """Return the prompts one by one, text as UTF-8."""
        if isinstance(self.prompt, str):
            return [self.prompt.encode()]
        tokens: list[int] = []
        prompts: list[bytes | list[int]] = []
        for item in self.prompt:
            if isinstance(item, int):
                tokens.append(item)
            else:
                prompts.append(item.encode() if isinstance(item, str) else item)
        return [tokens] if tokens else prompts

    def wanted_tokens(self) -> int | None:
        """Return max_tokens, vLLM's default where neither it nor our own field was sent."""
        if self.max_tokens is None and self.mock_decode_tokens is None:
            return COMPLETION_TOKENS_DEFAULT
        return self.max_tokens


class Message(BaseModel):
    """One message of a chat."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    role: str
    content: str | list[dict[str, object]] | None = None


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None

    def wanted_tokens(self) -> int | None:
        """Return the limit under its new or its old name; None may fill the context."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens


def parse_body(kind: type[_AnyBody], raw: bytes) -> _AnyBody:
    """Check a body's JSON and types; the first mistake is what the client is told."""
    with telling_mistakes():
        return kind.model_validate_json(raw)


@contextmanager
def telling_mistakes() -> Iterator[None]:
    """Turn what a body's types do not allow into vLLM's 400."""
    try:
        yield
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(step) for step in first["loc"])
        message = f"{place}: {first['msg']}" if place else first["msg"]
        raise ApiError(400, message, kind="Bad Request") from error
