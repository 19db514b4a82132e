"""The demo, small: real processes, real HTTP, every request accounted for, nothing left running."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import orjson
import pytest

from loadgen.cluster import ClusterSpec
from loadgen.demo import DemoSpec, build_demo_workload
from loadgen.outcomes import OUTCOMES_FILE, read_outcomes
from loadgen.report import PAGE_FILE, PICTURE_FILE
from loadgen.summary import SUMMARY_FILE
from loadgen.traces import open_trace
from loadgen.workload import Prediction
from service.control.config import PolicyName

SMALL = ("--workers", "2", "--batch-limit", "4", "--trace", "fixed:16x20")
pytestmark = pytest.mark.timeout(300)


def demo_process_arguments(out: Path, *flags: str) -> list[str]:
    code = "from loadgen.cli import main; main()"
    return [sys.executable, "-c", code, "demo", "--out", str(out), *SMALL, *flags]


async def start_demo(out: Path, *flags: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *demo_process_arguments(out, *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def appears(path: Path, process: asyncio.subprocess.Process) -> None:
    """Wait, bounded, until a file is there that a process should write."""
    for _ in range(1000):
        if await asyncio.to_thread(path.exists):
            return
        if process.returncode is not None:
            break
        await asyncio.sleep(0.1)
    pytest.fail(f"{path} did not appear; status {process.returncode}")


def children_of(pid: int) -> list[int]:
    """Process ids whose parent is pid, from /proc."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            if int(stat.rpartition(")")[2].split()[1]) == pid:
                found.append(int(entry.name))
    return found


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_every_policy_accounts_for_every_request(tmp_path: Path) -> None:
    process = await start_demo(
        tmp_path, "--duration-s", "2", "--policies", "round_robin", "online_lp"
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    summary = orjson.loads((tmp_path / SUMMARY_FILE).read_bytes())
    assert list(summary["policies"]) == ["round_robin", "online_lp"]
    for policy in summary["policies"].values():
        ends = [policy[end] for end in ("completed", "refused", "cancelled", "failed")]
        assert policy["entered"] == sum(ends) > 0
        assert policy["completed"] == policy["entered"]
        assert policy["answers_of_wrong_length"] == 0
        assert policy["ttft_s"]["p99"] >= policy["ttft_s"]["p50"] > 0
    entered = sum(policy["entered"] for policy in summary["policies"].values())
    records = list(read_outcomes(tmp_path / OUTCOMES_FILE))
    assert len(records) == entered
    assert {record.worker for record in records} - {""}
    assert b"TTFT mean" in output
    assert (tmp_path / PAGE_FILE).is_file()
    assert (tmp_path / PICTURE_FILE).is_file()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
async def test_an_interrupted_demo_stops_what_it_started(
    tmp_path: Path, sent: signal.Signals
) -> None:
    process = await start_demo(tmp_path, "--duration-s", "60", "--policies", "round_robin")
    await appears(tmp_path / "logs" / "router-round_robin.log", process)
    children = children_of(process.pid)
    process.send_signal(sent)
    _, errors = await process.communicate()
    assert process.returncode == 130
    assert errors.decode().strip() == "bidgate-load: interrupted; everything it started was stopped"
    assert len(children) >= 2
    assert not [pid for pid in children if is_running(pid)]


def test_the_sample_offers_exactly_the_load_that_was_asked(tmp_path: Path) -> None:
    spec = DemoSpec(
        cluster=ClusterSpec(
            workers=4, batch_limit=8, profile="llama-3-8b-a100", time_scale=1.0, log_dir=tmp_path
        ),
        trace=open_trace("lmsys-like"),
        policies=(PolicyName.ROUND_ROBIN,),
        load=1.0,
        duration_s=30.0,
        drain_s=30.0,
        prediction=Prediction.NOISY,
        ttft_bound_s=1.0,
        seed=5,
    )
    requests = build_demo_workload(spec)
    decode_tokens = sum(request.decode_tokens for request in requests)
    assert requests[-1].arrival_s * spec.capacity_tokens_per_s() == pytest.approx(
        decode_tokens, rel=0.05
    )
