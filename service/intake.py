"""1 edge, reading: what a request body says about its own size, value and bounds.

The body passes on byte for byte; here it is parsed once, and only for what the controller needs.
How prompts are measured is in prompts.py, how a body is changed where it must be in json_edit.py,
what the headers say in hints.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import orjson

from service.control.events import Prefix
from service.errors import BadRequestError
from service.json_edit import edit_object
from service.prefixes import prompt_prefix
from service.prompts import Payload, prompt_size, system_fingerprint
from service.surface import Api

COMPLETIONS_MAX_TOKENS: Final = 16
"""What vLLM generates for /v1/completions when max_tokens is missing."""
PRIORITY_STEPS_MAX: Final = 6
VALUE_MAX: Final = 2.0**PRIORITY_STEPS_MAX
COUNT_MAX: Final = 2**31
"""Larger numbers of tokens or sequences tell the controller nothing; the engine judges them."""
ENGINES_OWN: Final = frozenset({"kv_transfer_params", "ec_transfer_params"})
"""Fields by which a client could kill an engine or read another's cache; never sent on."""
FREE_FORM: Final = (("vllm_xargs",), ("sampling_params", "extra_args"), ("extra_args",))
"""Where engines would take those fields as well."""
NEED_THE_PROMPT: Final = ("echo", "prompt_logprobs", "use_beam_search")
"""Fields that a worker which did not compute the prompt cannot serve."""

TO_CONTEXT: Final = -1
"""What vLLM takes as the model's own limit in `truncate_prompt_tokens`."""
CUT_PROMPTS: Final = (Api.CHAT, Api.TEXT, Api.CHAT_BATCH)
"""Formats with `truncate_prompt_tokens`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What the operator wants done to bodies.

    Attributes:
        aliases: other names of models, by the name that workers know.
        forward_priority: send the body's `priority` on to the engine.
    """

    aliases: Mapping[str, str]
    forward_priority: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyFacts:
    """What the body says.

    Attributes:
        model: name asked for, an alias resolved; "" when missing (the worker's own then).
        streams: whether the client wants server-sent events.
        prompt_tokens: estimate of one sequence's prompt, as far as the engine reads it.
        prompts: how many there are.
        fits_context: the engine cuts the prompt to what the model's context length holds.
        fingerprint: hash of the system prompt, or "".
        sequences: parallel sequences.
        decode_tokens_limit: most output tokens of one sequence, or None.
        decode_tokens_floor: fewest, or None.
        decode_tokens_hint: a forecast of them, or None.
        value: from the body's `priority`, as vLLM means it: lower is sooner, each step doubles.
        previous: id of the stored response that this one continues, or "".
        names_itself: id that the client chose for the stored response, or "".
        whole: one worker must do all of it: it asks for several sequences, or for what only the
            worker that computes the prompt can tell, or in another format than completions.
        body: bytes to send on; the client's own unless a field had to go or to change.
        prefix: by what the prompt's beginning is known again, or None.
    """

    model: str
    streams: bool
    prompt_tokens: int
    prompts: int
    fits_context: bool
    fingerprint: str
    sequences: int
    decode_tokens_limit: int | None
    decode_tokens_floor: int | None
    decode_tokens_hint: int | None
    value: float
    previous: str
    names_itself: str
    whole: bool
    body: bytes
    prefix: Prefix | None = None


def read_body(body: bytes, api: Api, rules: Rules, session: bytes = b"") -> BodyFacts:
    """Parse a body that generates and read what it says.

    Args:
        body: as the client sent it.
        api: its format.
        rules: what is changed in it.
        session: what the client calls the conversation, or nothing.

    Raises:
        BadRequestError: not JSON, not an object, or a field no engine can accept.
    """
    payload = _parse(body)
    sampling = _sampling(payload, api)
    prompt_tokens, prompts = prompt_size(payload, api)
    cut = _cut(payload, api)
    sequences = prompts * _branches(sampling)
    limit = _limit(sampling, api)
    floor = _floor(sampling, limit)
    model = _model(payload)
    model = rules.aliases.get(model, model)
    return BodyFacts(
        model=model,
        streams=payload.get("stream") is True,
        prompt_tokens=_read_of(prompt_tokens, cut),
        prompts=prompts,
        fits_context=cut == TO_CONTEXT,
        fingerprint=system_fingerprint(payload),
        sequences=sequences,
        decode_tokens_limit=limit,
        decode_tokens_floor=floor,
        decode_tokens_hint=_hint(payload, limit, floor),
        value=priority_value(payload.get("priority")),
        previous=_text(payload, "previous_response_id"),
        names_itself=_text(payload, "request_id") if api is Api.RESPONSES else "",
        whole=sequences > 1 or _wants_whole(payload, api),
        body=_body_to_send(payload, body, rules),
        prefix=prompt_prefix(payload, api, model, session),
    )


def read_light_body(body: bytes, rules: Rules) -> tuple[str, bytes]:
    """(model asked for, body to send) of a JSON body that does not generate.

    Whatever is no JSON object passes: the worker knows what it wants.

    Raises:
        BadRequestError: it carries a field that only engines may send each other.
    """
    try:
        payload = _parse(body)
    except BadRequestError:
        return "", body
    model = payload.get("model")
    name = model if isinstance(model, str) else ""
    return rules.aliases.get(name, name), _body_to_send(payload, body, rules)


def priority_value(priority: object) -> float:
    """What a priority multiplies the reward by; vLLM's direction: lower is sooner."""
    if not isinstance(priority, int) or isinstance(priority, bool):
        return 1.0
    return 2.0 ** -min(max(priority, -PRIORITY_STEPS_MAX), PRIORITY_STEPS_MAX)


def _wants_whole(payload: Payload, api: Api) -> bool:
    """Whether a single sequence cannot be split over two workers."""
    return api not in (Api.CHAT, Api.TEXT) or any(map(payload.get, NEED_THE_PROMPT))


def _parse(body: bytes) -> Payload:
    try:
        payload = orjson.loads(body)
    except orjson.JSONDecodeError:
        payload = _parse_as_python(body)
    if not isinstance(payload, dict):
        raise BadRequestError("the request body must be a JSON object")
    return payload


def _parse_as_python(body: bytes) -> object:
    """Parse what orjson refuses but engines accept: 1e400, NaN, lone surrogates."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        why = f"is not valid JSON: {error}" if body else "is empty; it must be a JSON object"
        raise BadRequestError(f"the request body {why}") from error


def _model(payload: Payload) -> str:
    model = payload.get("model")
    if model is None:
        return ""
    if not isinstance(model, str):
        raise BadRequestError("model must be a string", param="model")
    return model


def _sampling(payload: Payload, api: Api) -> Payload:
    """Where limits and branches stand."""
    if api is not Api.TOKENS:
        return payload
    inner = payload.get("sampling_params")
    return inner if isinstance(inner, dict) else {}


def _limit(sampling: Payload, api: Api) -> int | None:
    """The most tokens asked for; the newer name wins, as in the engines."""
    names = ("max_completion_tokens", "max_tokens")
    for name in ("max_output_tokens",) if api is Api.RESPONSES else names:
        limit = _count(sampling, name)
        if limit is not None:
            return limit
    return COMPLETIONS_MAX_TOKENS if api in (Api.TEXT, Api.TOKENS) else None


def _cut(payload: Payload, api: Api) -> int | None:
    """Tokens to which the engine cuts a prompt, TO_CONTEXT or None; its end stays, most often."""
    if api is Api.RESPONSES:
        return TO_CONTEXT if payload.get("truncation") == "auto" else None
    if api not in CUT_PROMPTS:
        return None
    return _count(payload, "truncate_prompt_tokens", least=TO_CONTEXT)


def _read_of(prompt_tokens: int, cut: int | None) -> int:
    """Tokens of a prompt that the engine reads; what TO_CONTEXT leaves depends on the model."""
    return prompt_tokens if cut is None or cut == TO_CONTEXT else max(1, min(prompt_tokens, cut))


def _branches(sampling: Payload) -> int:
    """Sequences of one prompt: n, or best_of; the width of a beam search is n."""
    return max(_count(sampling, "n") or 1, _count(sampling, "best_of") or 1)


def _count(payload: Payload, name: str, least: int = 1) -> int | None:
    number = payload.get(name)
    if number is None:
        return None
    if not isinstance(number, int) or isinstance(number, bool) or number < least:
        raise BadRequestError(f"{name} must be an integer of at least {least}", param=name)
    return min(number, COUNT_MAX)


def _floor(sampling: Payload, limit: int | None) -> int | None:
    """Fewest output tokens: with ignore_eos as many as the bound allows."""
    floor = _count(sampling, "min_tokens", least=0) or None
    return limit if limit is not None and sampling.get("ignore_eos") is True else floor


def _hint(payload: Payload, limit: int | None, floor: int | None) -> int | None:
    """A forecast in the body: certain when the end is fixed, else the peers' fields."""
    if floor is not None and limit is not None and floor >= limit:
        return limit
    for path in (
        ("nvext", "agent_hints", "osl"),
        ("vllm_xargs", "agentic_context", "expected_output_length"),
    ):
        found = _inside(payload, path)
        if isinstance(found, int) and not isinstance(found, bool) and found >= 1:
            return min(found, COUNT_MAX)
    return None


def _inside(payload: Payload, path: tuple[str, ...]) -> object:
    found: object = payload
    for name in path:
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _text(payload: Payload, name: str) -> str:
    value = payload.get(name)
    return value if isinstance(value, str) else ""


def _body_to_send(payload: Payload, body: bytes, rules: Rules) -> bytes:
    """Resolve an alias and take out what must not reach an engine; else the body as it is."""
    for path in FREE_FORM:
        inner = _inside(payload, path)
        if isinstance(inner, dict) and not ENGINES_OWN.isdisjoint(inner):
            raise BadRequestError(f"{'.'.join(path)} must not hold transfer parameters")
    drop = ENGINES_OWN if rules.forward_priority else ENGINES_OWN | {"priority"}
    model = payload.get("model")
    alias = isinstance(model, str) and model in rules.aliases
    if not alias and drop.isdisjoint(payload):
        return body
    put = {"model": rules.aliases[str(model)]} if alias else {}
    return edit_object(body, drop=drop, put=put)
