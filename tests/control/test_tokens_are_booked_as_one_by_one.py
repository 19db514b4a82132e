"""Tokens of many requests at once move the books as those of one after the other would."""

import numpy as np
import pytest

from service.control.kernels.tokens import book_tokens, iteration_pace, note_pace

WORKERS, HELD = 5, 40


@pytest.mark.parametrize("seed", range(8))
def test_a_batch_of_tokens_is_booked_row_by_row(seed: int) -> None:
    rng = np.random.default_rng(seed)
    worker = rng.integers(-1, WORKERS if seed else 1, HELD)
    sequences, ahead = (
        rng.integers(1, 4, HELD).astype(float),
        7.0 * rng.integers(0, 2, HELD).astype(float),
    )
    produced, seen_s = rng.integers(0, 3, HELD).astype(float), rng.uniform(0.0, 9.0, HELD)
    kv_tokens = rng.integers(0, 1000, WORKERS).astype(float)
    forecast, left_steps = rng.integers(1, 4, HELD).astype(float), np.full(WORKERS, 500.0)
    rows = rng.permutation(HELD)[: rng.integers(0, HELD)]
    totals, now_s = rng.integers(0, 5, rows.size).astype(float), 5.0

    left, kv, slot_s, tokens, first = left_steps.copy(), kv_tokens.copy(), [], [], []
    for row, total in zip(rows.tolist(), totals.tolist(), strict=True):
        after = max(total, produced[row])
        slot_s.append(sequences[row] * max(0.0, now_s - seen_s[row]))
        tokens.append(sequences[row] * (after - produced[row]))
        if worker[row] >= 0:
            kv[worker[row]] += tokens[-1]
            was, now = (max(forecast[row] - each, 0.0) for each in (produced[row], after))
            left[worker[row]] += sequences[row] * (now - was)
        if produced[row] == 0 and after > 0 and ahead[row] > 0:
            first.append(row)
    now_produced = produced.copy()
    now_produced[rows] = np.maximum(produced[rows], totals)

    at, found, came = np.empty_like(rows), np.empty_like(rows), np.empty((2, rows.size))
    firsts, lowest, highest = book_tokens(
        rows,
        totals,
        now_s,
        worker,
        sequences,
        forecast,
        ahead,
        produced,
        seen_s,
        kv_tokens,
        left_steps,
        at,
        came,
        found,
    )
    here = worker[rows][worker[rows] >= 0]
    assert (lowest, highest) == (here.min(initial=WORKERS), here.max(initial=-1))
    assert found[:firsts].tolist() == first
    assert at.tolist() == worker[rows].tolist()
    assert came.tolist() == [slot_s, tokens]
    assert kv_tokens.tolist() == kv.tolist()
    assert left_steps.tolist() == left.tolist()
    assert produced.tolist() == now_produced.tolist()
    assert (seen_s[rows] == now_s).all()


def test_what_came_counts_where_it_came_from_and_fades_by_halves() -> None:
    sums = np.array([[10.0, 20.0], [90.0, 10.0], [4.0, 6.0]])
    worker, came = np.array([0, -1, 1, 0]), np.array([[1.0, 9.0, 2.0, 3.0], [5.0, 9.0, 7.0, 6.0]])
    note_pace(worker, came, 100.0, sums)
    assert sums.tolist() == [[7.0, 22.0], [50.5, 17.0], [2.0, 6.0]]


def test_prompts_are_taken_off_the_time_of_a_token_but_never_all_of_it() -> None:
    told_s, prompt_s = np.array([0.02, 0.02, 0.02]), np.array([0.001, 0.0, 1.0])
    sums = np.array([[30.0, 30.0, 30.0], [1000.0, 1000.0, 1000.0], [5000.0, 5000.0, 5000.0]])
    step_s = np.empty(3)
    iteration_pace(told_s, prompt_s, sums, 500.0, 0.05, step_s)
    token_s = (500.0 * 0.02 + 30.0) / 1500.0
    assert step_s == pytest.approx([token_s - 5.0 / 1500.0, token_s, 0.05 * token_s])
