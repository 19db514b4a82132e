"""1 edge, the light path: a place at a worker for requests that hold no decode slot for long.

No queue and no prices, but health, draining and a bound: at most so many light requests at a
worker at once. The least loaded worker takes it, by what it said of itself and what we sent it.
What such requests hold inside the engine shows in its reports and reaches the ledger from there.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from service.control.events import Outcome, Refusal, nobody_up, unserved
from service.errors import ClientGoneError, RefusedError
from service.fleet_types import Candidate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

LOOK_AGAIN_S: Final = 0.05
"""While no worker that serves the request is up, how often it is looked for one."""
TRY_SOON_S: Final = 1


class Workers(Protocol):
    """Who could take a light request."""

    def candidates(self, model: str) -> Sequence[Candidate]:
        """Workers that are up and serve a model, or may; "" is any model."""

    def served(self) -> frozenset[str] | None:
        """What the workers, up or not, serve; None when one of them may serve any model."""

    def answers(self, worker_id: str) -> bool:
        """Whether a worker can be asked, though it may take nothing new."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LightConfig:
    """Bounds of requests that skip the queue.

    Attributes:
        light_per_worker_max: most of them at one worker at once; more are a 429.
        light_hold_s: how long one waits for any worker that serves it to come up.
        responses_max: stored responses whose worker is remembered.
        responses_ttl_s: how long each is remembered, seconds.
    """

    light_per_worker_max: int = 256
    light_hold_s: float = 5.0
    responses_max: int = 20_000
    responses_ttl_s: float = 86_400.0

    def __post_init__(self) -> None:
        """Refuse bounds that are none."""
        if self.light_per_worker_max < 1 or self.responses_max < 1:
            raise ValueError("light_per_worker_max and responses_max must be at least 1")
        if self.light_hold_s < 0 or not self.responses_ttl_s > 0:
            raise ValueError("light_hold_s must not be negative and responses_ttl_s be positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a light request asks for.

    Attributes:
        model: or "" for any.
        only: the one worker that can serve it, or "".
    """

    model: str = ""
    only: str = ""


class LightPath:
    """Gives out light places.

    Attributes:
        ended: how many ended, by outcome; refused ones by the name "refused".
    """

    def __init__(
        self, *, workers: Workers, draining: Callable[[], bool], config: LightConfig
    ) -> None:
        self.ended: Counter[str] = Counter({outcome.value: 0 for outcome in Outcome})
        self.ended["refused"] = 0
        self._workers = workers
        self._draining = draining
        self._config = config
        self._held: Counter[str] = Counter()

    @property
    def held(self) -> int:
        """Light requests at workers now."""
        return self._held.total()

    def running(self) -> dict[str, int]:
        """Light requests at each worker now."""
        return dict(self._held)

    def candidates(self, model: str) -> Sequence[Candidate]:
        """Workers that could take a request for a model."""
        return self._workers.candidates(model)

    @contextmanager
    def place(self, wanted: Wanted) -> Iterator[LightPlace]:
        """Lend a place for the block; `start` finds its worker."""
        place = LightPlace(self, wanted)
        try:
            yield place
        except RefusedError:
            self.ended["refused"] += 1
            raise
        except BaseException as error:
            cancelled = isinstance(error, (asyncio.CancelledError, GeneratorExit, ClientGoneError))
            self.ended[Outcome.CANCELLED if cancelled else Outcome.FAILED] += 1
            raise
        else:
            self.ended[place.outcome] += 1
        finally:
            self.release(place.worker_id)

    async def find(self, wanted: Wanted, avoid: set[str]) -> str:
        """Take a place at the best worker.

        Raises:
            RefusedError: draining, nobody serves it, or all who do are full.
        """
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + self._config.light_hold_s
        while True:
            if self._draining():
                raise RefusedError(Refusal.DRAINING, "bidgate is shutting down")
            able = self._able(wanted, avoid)
            if able:
                return self._take_best(able)
            self._refuse_hopeless(wanted, avoid)
            if loop.time() >= give_up_s:
                raise RefusedError(Refusal.NO_WORKER, nobody_up(self._config.light_hold_s))
            await asyncio.sleep(LOOK_AGAIN_S)

    def _able(self, wanted: Wanted, avoid: set[str]) -> list[Candidate]:
        """Who could take it; a worker that drains still tells what it alone knows."""
        if wanted.only:
            asked = wanted.only not in avoid and self._workers.answers(wanted.only)
            return [Candidate(worker_id=wanted.only, load=0.0)] if asked else []
        candidates = self._workers.candidates(wanted.model)
        return [one for one in candidates if one.worker_id not in avoid]

    def _refuse_hopeless(self, wanted: Wanted, avoid: set[str]) -> None:
        if avoid:
            raise RefusedError(Refusal.NO_WORKER, f"{len(avoid)} workers did not take the request")
        served = self._workers.served()
        if wanted.model and served is not None and wanted.model not in served:
            raise RefusedError(Refusal.UNKNOWN_MODEL, unserved(wanted.model, served))

    def _take_best(self, able: Sequence[Candidate]) -> str:
        most = self._config.light_per_worker_max
        best = min(able, key=lambda one: one.load + self._held[one.worker_id] / most)
        if self._held[best.worker_id] >= most:
            best = min(able, key=lambda one: self._held[one.worker_id])
        if self._held[best.worker_id] >= most:
            detail = f"{most} requests of this kind are at every worker already"
            raise RefusedError(Refusal.QUEUE_FULL, detail, retry_after_s=TRY_SOON_S)
        self._held[best.worker_id] += 1
        return best.worker_id

    def release(self, worker_id: str) -> None:
        """Take a place back."""
        if not worker_id:
            return
        self._held[worker_id] -= 1
        if not self._held[worker_id]:
            del self._held[worker_id]


class LightPlace:
    """A light request's place at a worker.

    Attributes:
        worker_id: where it goes; "" before.
        prefill_id: always "", as one worker does all of it.
        starts: how often it was sent to one.
        queued_s: always 0, as there is no queue.
        first_token_s: when the first output token was seen, or None.
        decode_tokens: as counted, or None.
        told_prompt_tokens: tokens of all its prompts by the answer's word, or None.
        column_tokens: always 0, as nothing is set aside.
        prices: always 0, as nothing is reserved.
        outcome: how it will end if the block is left without an exception.
    """

    def __init__(self, path: LightPath, wanted: Wanted) -> None:
        self.worker_id = self.prefill_id = ""
        self.starts = 0
        self.queued_s = 0.0
        self.prices = (0.0, 0.0)
        self.first_token_s: float | None = None
        self.decode_tokens: int | None = None
        self.told_prompt_tokens: int | None = None
        self.column_tokens = 0
        self.outcome = Outcome.COMPLETED
        self._path = path
        self._wanted = wanted
        self._avoid: set[str] = set()

    async def start(self) -> None:
        """Find a worker.

        Raises:
            RefusedError: there is none.
        """
        self.worker_id = await self._path.find(self._wanted, self._avoid)
        self.starts += 1

    def first_token(self) -> None:
        """Note when the first output token came."""
        self.first_token_s = asyncio.get_running_loop().time()

    def progressed(self, decode_tokens: int, *, exact: bool = False) -> None:
        """Note output tokens seen so far."""
        self.decode_tokens = decode_tokens

    def price(self) -> float:
        """Light requests cost nothing."""
        return 0.0

    async def returned(self) -> None:
        """Try another worker.

        Raises:
            RefusedError: there is none.
        """
        self._avoid.add(self.worker_id)
        worker_id, self.worker_id = self.worker_id, ""
        self._path.release(worker_id)
        await self.start()
