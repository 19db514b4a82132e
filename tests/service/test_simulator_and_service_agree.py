"""One workload through the live queue on a virtual clock and through the simulator: one log."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.simulation_config import SimulatedWorker, SimulationConfig, Telemetry
from loadgen.simulator import Hooks, simulate
from loadgen.trace_record import TraceRequest
from service.control.config import ControlConfig, PolicyName, PriceConfig, Variant
from service.control.events import Command, Refuse, Start
from service.mock.profiles import LLAMA_2_7B_A100, UNIT
from tests.clock import run_virtual
from tests.service.twin import live_log

Line = tuple[int, str, int, str]

# Times that no iteration's end meets, so that nothing hangs on the order of a tie.
SCRAPE_S = 0.2517


def _line(time_s: float, command: Command, index: int) -> Line:
    """One command, comparable: time in microseconds."""
    match command:
        case Start(worker_id=worker_id):
            said = worker_id
        case Refuse(reason=reason):
            said = reason.value
    return round(time_s * 1e6), type(command).__name__, index, said


def simulated(requests: list[TraceRequest], config: SimulationConfig) -> list[Line]:
    log: list[Line] = []

    def keep(time_s: float, command: Command) -> None:
        log.append(_line(time_s, command, int(command.request_id)))

    simulate(requests, config, hooks=Hooks(on_command=keep))
    return log


def lived(requests: list[TraceRequest], config: SimulationConfig) -> list[Line]:
    log = run_virtual(live_log(requests, config))
    # The queue names requests r1, r2, ... in order of arrival.
    return [_line(time_s, command, int(command.request_id[1:]) - 1) for time_s, command in log]


def fleet(workers: int, control: ControlConfig, patience_s: float, unit: bool) -> SimulationConfig:
    return SimulationConfig(
        workers=tuple(
            SimulatedWorker(
                worker_id=f"w{number}",
                profile=UNIT if unit else LLAMA_2_7B_A100,
                batch_limit=3 + number,
                kv_capacity_tokens=1600,
            )
            for number in range(workers)
        ),
        control=control,
        telemetry=Telemetry(scrape_interval_s=SCRAPE_S),
        patience_s=patience_s,
    )


@st.composite
def workloads(draw: st.DrawFn) -> list[TraceRequest]:
    """Up to 40 requests, the first at 0, never two at one time."""
    gaps = draw(st.lists(st.floats(0.0011, 0.3), max_size=39))
    requests, arrival_s = [], 0.0
    for gap_s in [0.0, *gaps]:
        arrival_s += gap_s
        decode = draw(st.integers(1, 60))
        hint = draw(st.sampled_from([None, decode, max(1, decode // 2), 2 * decode]))
        requests.append(
            TraceRequest(
                arrival_s=arrival_s,
                prompt_tokens=draw(st.integers(1, 400)),
                decode_tokens=decode,
                decode_tokens_hint=hint,
                value=draw(st.sampled_from([1.0, 4.0])),
            )
        )
    return requests


@pytest.mark.parametrize(
    "control",
    [
        ControlConfig(policy=PolicyName.CENTRAL_FCFS),
        ControlConfig(policy=PolicyName.CENTRAL_SHORTEST_FIRST, max_wait_s=0.5),
        ControlConfig(policy=PolicyName.LEAST_OUTSTANDING),
        ControlConfig(policy=PolicyName.ONLINE_LP, horizon_iterations=256),
        ControlConfig(
            policy=PolicyName.ONLINE_LP,
            horizon_iterations=256,
            queue_max=6,
            prices=PriceConfig(variant=Variant.PUBLISHED),
        ),
    ],
    ids=["fcfs", "shortest", "least", "forward", "published"],
)
@settings(max_examples=12)
@given(
    requests=workloads(),
    workers=st.integers(1, 3),
    patience_s=st.sampled_from([math.inf, math.inf, 0.4]),
    unit=st.booleans(),
)
def test_the_live_queue_and_the_simulator_give_equal_command_logs(
    control: ControlConfig,
    requests: list[TraceRequest],
    workers: int,
    patience_s: float,
    unit: bool,
) -> None:
    config = fleet(workers, control, patience_s, unit)
    assert lived(requests, config) == simulated(requests, config)


def test_the_logs_are_not_empty_and_hold_refusals() -> None:
    requests = [TraceRequest(0.01 * number, 50, 40, 40) for number in range(40)]
    control = ControlConfig(policy=PolicyName.ONLINE_LP, queue_max=6, max_wait_s=0.3)
    log = lived(requests, fleet(2, control, math.inf, unit=True))
    kinds = {kind for _, kind, _, _ in log}
    assert kinds == {"Start", "Refuse"}
    assert len({said for _, kind, _, said in log if kind == "Start"}) == 2
