"""The command simulate: what it writes, that it repeats itself, and what it says to mistakes."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import orjson
import pytest

from loadgen.outcomes import read_outcomes
from loadgen.simulate_command import SimulateOptions, make_plan, simulate
from loadgen.simulate_options import FleetOptions, LoadOptions, PolicyOptions, SightOptions
from loadgen.workload import Prediction
from service.control.config import Kernel, PolicyName, Variant

if TYPE_CHECKING:
    from pathlib import Path

FLEET = FleetOptions(workers=2, batch_limit=4, kv_tokens=4000, profile="unit")
LOAD = LoadOptions(load=1.1, requests=60, seed=7, prediction=Prediction.NOISY)


def written(out: Path, policy: str, load: LoadOptions = LOAD) -> tuple[bytes, bytes]:
    simulate(out=out, fleet=FLEET, load=load, policy=PolicyOptions(policy=policy))
    return (out / "summary.json").read_bytes(), (out / "outcomes.jsonl").read_bytes()


@pytest.mark.parametrize("policy", ["online_lp", "power_of_two", "true_jsq"])
def test_the_same_seed_writes_the_same_bytes_twice_and_another_seed_does_not(
    tmp_path: Path, policy: str
) -> None:
    first = written(tmp_path / "one", policy)
    assert first == written(tmp_path / "two", policy)
    assert first[1] != written(tmp_path / "three", policy, replace(LOAD, seed=8))[1]


def test_the_summary_tells_seconds_and_iterations_flat_and_per_policy(tmp_path: Path) -> None:
    written(tmp_path, "least_outstanding")
    summary = orjson.loads((tmp_path / "summary.json").read_bytes())
    assert summary["entered"] == summary["completed"] == 60
    assert summary["iteration_s"] == pytest.approx(0.01)
    for measure in ("ttft", "e2e"):
        for name in ("mean", "p50", "p95", "p99"):
            in_iterations = summary[f"{measure}_iterations"][name]
            assert summary[f"{measure}_s"][name] == pytest.approx(0.01 * in_iterations)
    policy = summary["policies"]["least_outstanding"]
    assert policy == {name: summary[name] for name in policy}
    assert policy["preemptions"] == sum(worker["preemptions"] for worker in policy["workers"])
    assert policy["router"]["starts"] == 60
    assert summary["setting"]["offered_load"] == pytest.approx(1.1, rel=0.3)
    assert str(tmp_path) not in summary["command"]


def test_outcomes_are_those_that_every_report_reads(tmp_path: Path) -> None:
    written(tmp_path, "central_fcfs")
    records = list(read_outcomes(tmp_path / "outcomes.jsonl"))
    lines = [orjson.loads(line) for line in (tmp_path / "outcomes.jsonl").read_bytes().splitlines()]
    assert [record.index for record in records] == list(range(60))
    for record, line in itertools.zip_longest(records, lines):
        assert record.output_tokens == record.decode_tokens
        assert line["first_token_s"] == pytest.approx(record.arrival_s + record.ttft_s)
        assert line["end_s"] == pytest.approx(record.arrival_s + record.e2e_s)
        assert line["preemptions"] == 0


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_hints_ten_times_too_long_do_no_harm(tmp_path: Path, share: float) -> None:
    off = LoadOptions(requests=1000, seed=1, forecast_bias=10.0, forecast_bias_share=share)
    found = {}
    for policy in ("online_lp", "least_outstanding"):
        simulate(out=tmp_path, load=off, policy=PolicyOptions(policy=policy))
        found[policy] = orjson.loads((tmp_path / "summary.json").read_bytes())["ttft_s"]
    ours, other = found["online_lp"], found["least_outstanding"]
    assert ours["mean"] <= 1.05 * other["mean"]
    assert ours["p99"] <= 1.05 * other["p99"]


def plan_options(
    *,
    fleet: FleetOptions = FLEET,
    load: LoadOptions = LOAD,
    policy: PolicyOptions | None = None,
    sight: SightOptions | None = None,
) -> SimulateOptions:
    return SimulateOptions(
        fleet=fleet, load=load, policy=policy or PolicyOptions(), sight=sight or SightOptions()
    )


def test_flags_reach_the_router_and_the_fleet() -> None:
    options = plan_options(
        fleet=replace(
            FLEET,
            iteration_factors="1,2",
            decode_only=True,
            outage=("w1:2-3.5", "w0:9-"),
            iteration_error=0.7,
        ),
        policy=PolicyOptions(weights="1,2,3,4,5,6", variant=Variant.PUBLISHED, zero_prices=True),
        sight=SightOptions(network_s=0.001, patience_s=3.0, streams=False),
    )
    config = make_plan(options).config
    assert config.control.policy is PolicyName.ONLINE_LP
    assert config.control.kernel is Kernel.DECODE_ONLY
    weights = config.control.weights
    assert (weights.throughput, weights.e2e, weights.ttft) == (1, 2, 3)
    assert (weights.queries, weights.tail_e2e, weights.tail_ttft) == (4, 5, 6)
    assert (config.control.prices.variant, config.control.prices.zero) == (Variant.PUBLISHED, True)
    assert [w.iteration_factor for w in config.workers] == [1, 2]
    assert [w.spec().iteration_s for w in config.workers] == pytest.approx([0.007, 0.014])
    assert config.telemetry.report_bias == 0.7
    assert not config.telemetry.streams
    assert config.patience_s == 3.0
    assert [(o.worker_id, o.down_s, o.up_s) for o in config.outages] == [
        ("w1", 2.0, 3.5),
        ("w0", 9.0, float("inf")),
    ]


def test_a_load_is_shared_by_the_capacity_of_unequal_workers() -> None:
    load = LoadOptions(trace="fixed:10x50", load=0.5)
    lengths = load.lengths()
    fleet = replace(FLEET, iteration_factors="1,2").fleet(lengths)
    # 4 slots / (50 x 10 ms) and half of that, at half load.
    assert load.rate_per_s(fleet, lengths) == pytest.approx(0.5 * (8 + 4))


def test_prompts_of_a_trace_with_block_ids_stay_in_the_workers_caches(tmp_path: Path) -> None:
    trace = tmp_path / "mooncake.jsonl"
    row = '{"timestamp": %d, "input_length": 64, "output_length": 4, "hash_ids": [7, 8]}'
    trace.write_text("\n".join(row % (1000 * second) for second in range(10)))
    load = LoadOptions(trace=str(trace), arrivals="recorded", requests=0)
    for piece_tokens, hits in ((0, 0), (32, 8 * 63)):
        fleet = replace(FLEET, piece_tokens=piece_tokens)
        policy = PolicyOptions(policy="round_robin")
        simulate(out=tmp_path / "out", fleet=fleet, load=load, policy=policy)
        workers = orjson.loads((tmp_path / "out" / "summary.json").read_bytes())["workers"]
        assert sum(worker["prefix_hits"] for worker in workers) == hits


def test_recorded_arrivals_keep_their_times_unless_a_load_is_asked_for(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,decode_tokens\n0,5,10\n1,5,10\n2.5,5,10\n")
    recorded = LoadOptions(trace=str(trace), arrivals="recorded", requests=0)
    requests = make_plan(plan_options(load=recorded)).requests
    assert [request.arrival_s for request in requests] == [0, 1, 2.5]
    scaled = make_plan(plan_options(load=replace(recorded, rate=30.0))).requests
    assert scaled[-1].arrival_s == pytest.approx(0.1, rel=0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (plan_options(fleet=replace(FLEET, profile="h100")), "no profile 'h100'; there are llama"),
        (
            plan_options(fleet=replace(FLEET, iteration_factors="1,2,3")),
            "expected 2 numbers, got 3",
        ),
        (plan_options(fleet=replace(FLEET, outage=("w1",))), "expected WORKER:DOWN-UP"),
        (plan_options(fleet=replace(FLEET, outage=("w7:1-2",))), "unknown worker 'w7'"),
        (
            plan_options(policy=PolicyOptions(policy="best")),
            "no policy 'best'; there are online_lp",
        ),
        (plan_options(policy=PolicyOptions(weights="1,1")), "--weights 1,1: expected 6 numbers"),
        (plan_options(policy=PolicyOptions(weights="a,b,c,d,e,f")), "--weights a,b"),
        (plan_options(load=replace(LOAD, rate=3.0)), "not both"),
    ],
)
def test_flags_that_do_not_fit_are_one_sentence(options: SimulateOptions, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan(options)
