"""3 controller, ledger: every started request, and what it will hold from now on.

The state is counted in tokens seen, not in time passed, so a wrong iteration time cannot corrupt
it. Forecasts are corrected while a request decodes: one that outlives its forecast gets its
conditional expected remaining length, one that ends early frees its slots at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from service.control.columns import BoolArray, FloatArray, IntArray, Usage
from service.control.events import Request
from service.control.fleet_state import FleetState, OwnLoad
from service.control.kernels.fleet import sum_over
from service.control.kernels.tokens import book_tokens
from service.control.lengths import LengthPredictor
from service.control.occupancy import Frame, Occupancy, PerWorker
from service.control.started import NUMBERS, TIMES, Started
from service.control.tables import Table
from service.control.token_pace import PromptPace, TokenPace
from service.control.usual_work import UsualWork
from service.control.waiting import Entry

NO_LIMIT = 2**31
HELD = ("worker", "sequences", "prompt_tokens", "produced", "forecast", "streams", "ready_s")
"""What an end is booked by."""
PROGRESS = ("worker", "sequences", "forecast", "ahead_tokens", "produced", "seen_s")
"""What tokens that come are booked by, and in."""


class Ledger:
    """Started requests as arrays; occupancy of every worker's look-ahead."""

    def __init__(self, predictor: LengthPredictor) -> None:
        self._predictor = predictor
        self._entries: dict[str, Entry] = {}
        self._table = Table(
            worker=np.int64,
            prompt_tokens=np.float64,
            produced=np.float64,
            forecast=np.float64,
            limit=np.float64,
            pool=np.int64,
            scale=np.float64,
            sequences=np.float64,
            started_s=np.float64,
            seen_s=np.float64,
            streams=np.bool_,
            ready_s=np.float64,
            ahead_tokens=np.float64,
        )
        self._sequences: FloatArray = np.zeros(0)
        self._kv_tokens: FloatArray = np.zeros(0)
        self._left_steps: FloatArray = np.zeros(0)
        # Requests that are not seen token by token, on the workers that have any.
        self._blind: Counter[int] = Counter()
        self._ahead: FloatArray = np.zeros(0)
        self._occupancy = Occupancy()
        self._pace, self._prompts = TokenPace(), PromptPace()
        self._usual = UsualWork()
        self._learned = -1

    def __len__(self) -> int:
        return len(self._table)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._table

    def start(self, entry: Entry, worker: int, now_s: float, ready_s: float = 0.0) -> None:
        """Book a start on worker index `worker`.

        Args:
            entry: of the request.
            worker: index g.
            now_s: the time.
            ready_s: when its prompt should be computed by a prefill worker; 0 where it decodes now.
        """
        request, forecast = entry.request, entry.forecast
        self._make_room(worker + 1)
        # Of a prompt that another worker computes, or whose first token is not seen, nothing is
        # learned.
        if request.streams and not ready_s:
            self._ahead[worker] += request.prompt_tokens
        self._entries[request.request_id] = entry
        self._table.add(
            request.request_id,
            worker=worker,
            prompt_tokens=request.prompt_tokens,
            produced=0.0,
            forecast=entry.decode_tokens,
            limit=request.decode_tokens_limit or NO_LIMIT,
            pool=forecast.pool,
            scale=forecast.scale,
            sequences=entry.sequences,
            started_s=now_s,
            seen_s=max(now_s, ready_s),
            streams=request.streams,
            ready_s=ready_s,
            ahead_tokens=self._ahead[worker] if request.streams and not ready_s else 0.0,
        )
        self._sequences[worker] += entry.sequences
        self._kv_tokens[worker] += entry.sequences * request.prompt_tokens
        self._left_steps[worker] += entry.sequences * entry.decode_tokens
        if not request.streams or ready_s > 0:
            self._blind[worker] += 1
        self._occupancy.touch(worker)

    def prefilled(self, request_id: str, now_s: float) -> None:
        """A started request's prompt is computed, or will be where it decodes; others: nothing."""
        if request_id not in self:
            return
        table, row = self._table, self._table.row(request_id)
        worker = int(table["worker"][row])
        if worker >= 0:
            if table["streams"][row] and table["ready_s"][row] > 0:
                self._see_again(worker)
            self._occupancy.touch(worker)
        table["ready_s"][row] = 0.0
        table["started_s"][row] = table["seen_s"][row] = now_s

    def request(self, request_id: str) -> Request:
        """A started request; KeyError when it is not here."""
        return self._entries[request_id].request

    def progress(self, decode_tokens: dict[str, int], now_s: float) -> None:
        """Note tokens produced so far; totals never fall.

        Raises:
            KeyError: a request is not in the ledger; then nothing is noted.
        """
        table = self._table
        rows = table.rows(decode_tokens)
        totals = np.fromiter(decode_tokens.values(), np.float64, rows.size)
        at, first, came = np.empty_like(rows), np.empty_like(rows), np.empty((2, rows.size))
        held = table.live(*PROGRESS)
        worker, sequences, forecast, ahead_tokens, produced, seen_s = held.values()
        firsts, lowest, highest = book_tokens(
            rows,
            totals,
            now_s,
            worker,
            sequences,
            forecast,
            ahead_tokens,
            produced,
            seen_s,
            self._kv_tokens,
            self._left_steps,
            at,
            came,
            first,
        )
        self._pace.note(at, came, highest + 1)
        for row in first[:firsts].tolist():
            # Later tokens came with it where only the end was seen.
            alone = produced[row] == 1
            started_s = float(table["started_s"][row])
            self._first_token(row, now_s - started_s if alone else None)
        if lowest == highest:
            self._occupancy.touch(highest)
        else:
            self._occupancy.touch_all(at[at >= 0])

    def _first_token(self, row: int, waited_s: float | None) -> None:
        """A request's prompt is ahead of nobody any more; learn how long it took, if it is told."""
        table = self._table
        worker = int(table["worker"][row])
        if worker >= 0:
            if waited_s is not None:
                self._prompts.note(worker, float(table["ahead_tokens"][row]), waited_s)
                busy = float(self._sequences[worker])
                self._pace.note_prompt(worker, busy * float(table["prompt_tokens"][row]))
            left = self._ahead[worker] - float(table["prompt_tokens"][row])
            self._ahead[worker] = max(0.0, left)
        table["ahead_tokens"][row] = 0.0

    def end(self, request_id: str) -> tuple[Entry, int, int]:
        """Free a request's slots; returns it, its worker index (-1: gone) and the tokens seen."""
        row = self._table.row(request_id)
        if self._table["ahead_tokens"][row] > 0:
            self._first_token(row, None)
        held = self._table.remove(request_id, *HELD)
        worker, sequences = int(held["worker"]), held["sequences"]
        if worker >= 0:
            self._sequences[worker] -= sequences
            self._kv_tokens[worker] -= sequences * (held["prompt_tokens"] + held["produced"])
            self._left_steps[worker] -= sequences * max(held["forecast"] - held["produced"], 0.0)
            if not held["streams"] or held["ready_s"] > 0:
                self._see_again(worker)
            self._occupancy.touch(worker)
        return self._entries.pop(request_id), worker, int(held["produced"])

    def drop_worker(self, gone: int) -> None:
        """Renumber after a worker was removed; its own requests keep no worker (-1)."""
        worker = self._table["worker"]
        worker[worker == gone] = -1
        worker[worker > gone] -= 1
        self._pace.drop_worker(gone)
        self._prompts.drop_worker(gone)
        if gone < self._sequences.size:
            self._sequences = np.delete(self._sequences, gone)
            self._kv_tokens = np.delete(self._kv_tokens, gone)
            self._left_steps = np.delete(self._left_steps, gone)
            self._ahead = np.delete(self._ahead, gone)
        del self._blind[gone]
        self._blind = Counter({g - (g > gone): many for g, many in self._blind.items()})
        self._occupancy.forget()

    def sequences_per_worker(self, workers: int) -> FloatArray:
        """(g,) batch slots held by our own started requests."""
        self._make_room(workers)
        return self._sequences[:workers].copy()

    def outstanding(self, fleet: FleetState) -> FloatArray:
        """(g,) batch slots held by started requests, those of others included."""
        foreign = fleet.array("foreign_active")
        self._make_room(foreign.size)
        return np.asarray(self._sequences[: foreign.size] + foreign)

    def kv_tokens_per_worker(self, workers: int) -> FloatArray:
        """(g,) KV tokens held now by our own started requests."""
        self._make_room(workers)
        return self._kv_tokens[:workers].copy()

    def token_s(self, fleet: FleetState) -> FloatArray:
        """(g,) seconds that a batch slot takes for a token, prefills beside it included."""
        return self._pace.token_s(fleet.array("iteration_s"))

    def ahead_tokens(self, workers: int) -> FloatArray:
        """(g,) prompt tokens sent to a worker whose first tokens are still to come."""
        self._make_room(workers)
        return self._ahead[:workers].copy()

    def pace(self, fleet: FleetState) -> tuple[FloatArray, FloatArray]:
        """What workers take, as was seen; both are read-only.

        Returns:
            (g,) seconds of a decode iteration, without the prompts computed in it.
            (g,) seconds by which a prompt token holds up everything else on a worker.
        """
        told_s = fleet.array("iteration_s")
        prompt_s = self._prompts.prompt_s(told_s.size)
        return self._pace.step_s(told_s, prompt_s), prompt_s

    def came(self, entry: Entry) -> None:
        """Learn from a request that arrived."""
        self._usual.came(entry.decode_tokens, entry.sequences)

    def ended(self, entry: Entry, decode_tokens: int) -> None:
        """Learn from a request that came to its end by itself."""
        self._usual.ended(entry.decode_tokens, decode_tokens, entry.sequences)

    def usual_left_steps(self) -> float:
        """Iterations that a busy slot has left on average in any order of starts; 0: unknown."""
        return self._usual.left_steps()

    def left_steps(self, workers: BoolArray) -> float:
        """Slot-iterations that our requests on some (g,) workers have left by their forecasts."""
        self._make_room(workers.size)
        return sum_over(self._left_steps, workers)

    def own_load(self, worker: int) -> OwnLoad:
        """What we hold on one worker now, in sequences and in KV tokens."""
        self._make_room(worker + 1)
        return OwnLoad(int(self._sequences[worker]), float(self._kv_tokens[worker]))

    def kv_ceiling_tokens(self, worker: int, spare_tokens: float) -> float:
        """Most KV tokens that our requests on a worker will ever hold together, by their forecasts.

        Infinity when one of them outlived its forecast or is not seen token by token, so that only
        the calendar can tell.

        Args:
            worker: index g.
            spare_tokens: what rounding to blocks and buckets may add to each sequence.
        """
        table = self._table
        here = (table["worker"] == worker).nonzero()[0]
        produced, forecast = table["produced"][here], table["forecast"][here]
        if (produced >= forecast).any() or not table["streams"][here].all():
            return float("inf")
        tokens = table["prompt_tokens"][here] + forecast + spare_tokens
        return float((table["sequences"][here] * tokens).sum())

    def occupancy(
        self, fleet: FleetState, now_s: float, frame: Frame, workers: IntArray | None = None
    ) -> Usage:
        """(w, N) batch slots and KV tokens held from now on, load of others included.

        Args:
            fleet: for iteration times and foreign load.
            now_s: the tick's time.
            frame: the look-ahead, and from when on it is looked at.
            workers: (w,) whose rows are wanted; None for all of them.
        """
        wanted = self._made(fleet, now_s, frame, workers)
        foreign = fleet.array("foreign_active"), fleet.array("foreign_kv")
        return self._occupancy.plus(wanted, *foreign)

    def free(
        self,
        fleet: FleetState,
        now_s: float,
        frame: Frame,
        limits: PerWorker,
        workers: IntArray | None = None,
    ) -> Usage:
        """(w, N) what is left of the (g,) limits beside what `occupancy` counts."""
        wanted = self._made(fleet, now_s, frame, workers)
        foreign = fleet.array("foreign_active"), fleet.array("foreign_kv")
        return self._occupancy.free(wanted, foreign, limits)

    def frozen_occupancy(
        self, fleet: FleetState, now_s: float, frame: Frame
    ) -> Callable[[], Usage]:
        """What `occupancy` of all workers would give now, to be worked out later in any thread.

        Nobody may write to what is given.
        Only copies are made here, of what is not kept already: at most NUMBERS and TIMES
        of every started request, the rows kept, and the lengths learned.
        """
        everyone = np.arange(len(fleet))
        self._look(frame)
        kept, due = self._occupancy.copy(frame), self._occupancy.are_stale(everyone)
        started = self._started(fleet, now_s, frame).frozen() if due else None
        foreign = fleet.array("foreign_active"), fleet.array("foreign_kv")

        def occupancy() -> Usage:
            if started is not None:
                kept.make(everyone, started)
            return kept.all_plus(*foreign)

        return occupancy

    def _made(
        self, fleet: FleetState, now_s: float, frame: Frame, workers: IntArray | None
    ) -> IntArray:
        """Make the rows of some workers that are out of date; returns which, where None is all."""
        wanted = np.arange(len(fleet)) if workers is None else workers
        self._look(frame)
        if self._occupancy.are_stale(wanted):
            self._occupancy.make(wanted, self._started(fleet, now_s, frame))
        return wanted

    def _see_again(self, worker: int) -> None:
        """One request less on a worker is not seen token by token."""
        self._blind[worker] -= 1
        if not self._blind[worker]:
            del self._blind[worker]

    def _look(self, frame: Frame) -> None:
        """Look through a frame, and see which rows are out of date under it."""
        known = self._occupancy
        known.enter(frame)
        # Requests that are not seen token by token move with the clock, late ones with what was
        # learned.
        if self._blind:
            known.touch_all(np.array(list(self._blind)))
        if self._learned != self._predictor.version:
            self._learned = self._predictor.version
            known.touch_late()

    def _started(self, fleet: FleetState, now_s: float, frame: Frame) -> Started:
        """All started requests; views of their numbers."""
        blind = bool(self._blind)
        names = (*NUMBERS, *TIMES) if blind else NUMBERS
        return Started(
            held=self._table.live(*names),
            blind=blind,
            iteration_s=fleet.array("iteration_s"),
            now_s=now_s,
            frame=frame,
            survival=self._predictor.survival(),
        )

    def _make_room(self, workers: int) -> None:
        """Count for at least so many workers."""
        more = workers - self._sequences.size
        if more > 0:
            self._sequences = np.append(self._sequences, np.zeros(more))
            self._kv_tokens = np.append(self._kv_tokens, np.zeros(more))
            self._left_steps = np.append(self._left_steps, np.zeros(more))
            self._ahead = np.append(self._ahead, np.zeros(more))
