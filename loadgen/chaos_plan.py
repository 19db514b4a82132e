"""What is sent in a chaos run and when: requests of every kind, with every sort of key.

A pure function of its settings: the same seed gives the same plan. Work is counted in
slot-iterations, sequences times decode iterations, so that the load is a share of what the healthy
fleet could do.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from loadgen.chaos_keys import KEY_WEIGHTS, Key

ITERATION_S: Final = 0.01
"""Of the unit profile at time_scale 1."""
DECODE_TOKENS_MAX: Final = 24
LONG_DECODE_TOKENS: Final = 150
LEAVE_S: Final = (0.0, 3.0)
"""After which time a client leaves that does leave."""
DAWDLE_S: Final = (0.1, 2.0)
"""How long a client stops reading that does stop."""


class Kind(StrEnum):
    """Kinds of requests."""

    STREAM = "stream"
    CHAT_STREAM = "chat_stream"
    WHOLE = "whole"
    CHAT = "chat"
    PARALLEL = "parallel"
    BATCH = "batch"
    TOKEN_IDS = "token_ids"
    LONG = "long"
    IMPATIENT = "impatient"
    RESPONSE = "response"
    RESPONSE_STREAM = "response_stream"
    MESSAGE = "message"
    MESSAGE_STREAM = "message_stream"
    ID_BATCH = "id_batch"
    LARGE_BODY = "large_body"
    TENANT = "tenant"
    DEADLINE = "deadline"
    SHOWN = "shown"
    DELETED = "deleted"
    EMBEDDING = "embedding"
    RERANK = "rerank"
    TOKENIZE = "tokenize"
    AUDIO = "audio"
    NEWER_ROUTE = "newer_route"
    TOO_LARGE = "too_large"
    UNKNOWN_MODEL = "unknown_model"
    NOT_JSON = "not_json"
    WRONG_FIELD = "wrong_field"
    MODELS = "models"
    METRICS = "metrics"
    NO_SUCH_ROUTE = "no_such_route"


KIND_WEIGHTS: Final[dict[Kind, int]] = {
    Kind.STREAM: 30,
    Kind.CHAT_STREAM: 20,
    Kind.WHOLE: 12,
    Kind.CHAT: 8,
    Kind.PARALLEL: 4,
    Kind.BATCH: 4,
    Kind.TOKEN_IDS: 6,
    Kind.LONG: 2,
    Kind.IMPATIENT: 4,
    Kind.RESPONSE: 5,
    Kind.RESPONSE_STREAM: 8,
    Kind.MESSAGE: 4,
    Kind.MESSAGE_STREAM: 8,
    Kind.ID_BATCH: 2,
    Kind.LARGE_BODY: 1,
    Kind.TENANT: 6,
    Kind.DEADLINE: 4,
    Kind.SHOWN: 4,
    Kind.DELETED: 2,
    Kind.EMBEDDING: 5,
    Kind.RERANK: 2,
    Kind.TOKENIZE: 2,
    Kind.AUDIO: 3,
    Kind.NEWER_ROUTE: 2,
    Kind.TOO_LARGE: 1,
    Kind.UNKNOWN_MODEL: 2,
    Kind.NOT_JSON: 2,
    Kind.WRONG_FIELD: 2,
    Kind.MODELS: 1,
    Kind.METRICS: 1,
    Kind.NO_SUCH_ROUTE: 1,
}
UNSERVED: Final = frozenset(
    {
        Kind.TOO_LARGE,
        Kind.UNKNOWN_MODEL,
        Kind.NOT_JSON,
        Kind.WRONG_FIELD,
        Kind.MODELS,
        Kind.METRICS,
        Kind.NO_SUCH_ROUTE,
    }
)
"""Kinds that no worker generates for: the router answers by itself."""
LIGHT: Final = frozenset(
    {
        Kind.SHOWN,
        Kind.DELETED,
        Kind.EMBEDDING,
        Kind.RERANK,
        Kind.TOKENIZE,
        Kind.AUDIO,
        Kind.NEWER_ROUTE,
    }
)
"""Kinds that a worker answers without a place in its batch."""
STORED: Final = frozenset({Kind.SHOWN, Kind.DELETED})
"""Kinds that are about a response of before."""
ID_BATCH_LENGTHS: Final = (5, 40, 300, 2000)
"""Tokens of the prompts of one batch of token ids."""
SEQUENCES: Final[dict[Kind, int]] = {
    Kind.PARALLEL: 2,
    Kind.BATCH: 3,
    Kind.ID_BATCH: len(ID_BATCH_LENGTHS),
}
"""Sequences of the kinds that have several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosSpec:
    """One chaos run.

    Attributes:
        duration_s: how long requests arrive.
        seed: of everything that is drawn.
        workers: mock workers.
        prefill_workers: how many of them, the first ones, compute prompts for the others; with
            none, each computes its own.
        batch_limit: sequences in one worker's batch.
        time_scale: how many times faster than 10 ms an iteration the workers run.
        load: offered work over what the healthy fleet can do.
        leave_share: share of the clients that leave before their answer is complete.
        dawdle_share: share of the clients that stop reading for a while.
        faults_per_s: how often something goes wrong, over the fleet.
    """

    duration_s: float = 120.0
    seed: int = 0
    workers: int = 8
    prefill_workers: int = 0
    batch_limit: int = 8
    time_scale: float = 0.2
    load: float = 1.2
    leave_share: float = 0.15
    dawdle_share: float = 0.05
    faults_per_s: float = 1.0

    def __post_init__(self) -> None:
        """Refuse runs that cannot be."""
        if not (self.duration_s >= 1 and self.time_scale > 0 and self.load > 0):
            raise ValueError("duration_s must be at least 1, time_scale and load positive")
        if self.workers < 1 or self.batch_limit < max(SEQUENCES.values()):
            raise ValueError(f"give a worker, and a batch of at least {max(SEQUENCES.values())}")
        if not 0 <= self.prefill_workers < self.workers:
            raise ValueError("prefill_workers must leave a worker that decodes")

    @property
    def capacity_per_s(self) -> float:
        """Slot-iterations a second of the healthy fleet."""
        decoding = self.workers - self.prefill_workers
        return decoding * self.batch_limit * self.time_scale / ITERATION_S


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request.

    Attributes:
        at_s: when it is sent, seconds after the start. index: its place in order of time.
        kind: what it asks. decode_tokens: how long the answer of a sequence is.
        leave_s: after how many seconds the client leaves, if it has no answer by then; or None.
        dawdle_s: how long it does not read after the first bytes of the answer.
        key: what the client comes with.
        about: index of the stored response that it is about; its own where there was none.
    """

    at_s: float
    index: int
    kind: Kind
    decode_tokens: int
    leave_s: float | None
    dawdle_s: float
    key: Key = Key.OPEN
    about: int = 0

    @property
    def sequences(self) -> int:
        """How many a worker decodes for it."""
        return 0 if self.kind in UNSERVED | LIGHT else SEQUENCES.get(self.kind, 1)


def plan_requests(spec: ChaosSpec) -> list[PlannedRequest]:
    """Draw requests until the work of those without limits is the load, and spread them at random.

    What comes with other keys comes on top.
    """
    rng = random.Random(f"requests {spec.seed}")
    kinds, weights = list(KIND_WEIGHTS), list(KIND_WEIGHTS.values())
    keys, key_weights = list(KEY_WEIGHTS), list(KEY_WEIGHTS.values())
    budget = spec.load * spec.capacity_per_s * spec.duration_s
    drawn: list[PlannedRequest] = []
    while budget > 0:
        kind = rng.choices(kinds, weights)[0]
        tokens = LONG_DECODE_TOKENS if kind is Kind.LONG else rng.randint(1, DECODE_TOKENS_MAX)
        leave_s = rng.uniform(*LEAVE_S) if rng.random() < spec.leave_share else None
        dawdle_s = rng.uniform(*DAWDLE_S) if rng.random() < spec.dawdle_share else 0.0
        key = rng.choices(keys, key_weights)[0]
        drawn.append(PlannedRequest(0.0, 0, kind, tokens, leave_s, dawdle_s, key))
        if key is Key.OPEN:
            budget -= drawn[-1].sequences * (tokens + 1)
    times_s = sorted(rng.uniform(0.0, spec.duration_s) for _ in drawn)
    plan: list[PlannedRequest] = []
    stored = -1
    for index, (at_s, one) in enumerate(zip(times_s, drawn, strict=True)):
        stored = index if one.kind is Kind.RESPONSE else stored
        about = stored if stored >= 0 else index
        plan.append(replace(one, at_s=at_s, index=index, about=about))
    return plan
