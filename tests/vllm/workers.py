"""Real vLLM workers on loopback ports: start, wait for health, kill, restart, stop by pid.

For tests, benchmarks and by hand: `python -m tests.vllm.workers --count 2` prints one URL a line
and serves until interrupted; with `-- COMMAND...` it runs the command with the URLs at its end
instead, with `--apart` on other processors than the engines. `scripts/vllm-env` must have run.
The model comes from tiny_model.py.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / ".vllm"
PYTHON = HOME / "venv" / "bin" / "python"
MODEL = HOME / "tiny-llama"
LOGS = HOME / "logs"
SERVED_NAME = "tiny"

MEMORY_FREE_MIN_KIB = 4 * 1024 * 1024
MEMORY_PER_WORKER_KIB = 1_300_000
START_MAX_S = 420.0
STOP_MAX_S = 15.0
MODEL_BUILD_MAX_S = 300.0
POLL_S = 0.2
LOG_TAIL_LINES = 40

# The engine's own buckets start at 0.3 s, far above a decode iteration; these resolve one.
LATENCY_BUCKETS_S = (
    *(0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.010, 0.012, 0.016, 0.02, 0.03, 0.04, 0.06, 0.08),
    *(0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 20.0, 40.0),
)


class WorkerError(RuntimeError):
    """A real worker cannot be had: no environment, no memory, or the engine did not start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """How every worker of a fleet is started.

    Attributes:
        batch_limit: --max-num-seqs, B_g.
        kv_blocks: KV blocks of the cache (the engine keeps one for itself).
        block_tokens: KV block size in tokens.
        context_max_tokens: --max-model-len.
        shutdown_timeout_s: --shutdown-timeout; 0, its default, may leave requests hanging.
        data_parallel_size: --data-parallel-size; above 1 every rank is a process of its own.
        model: folder of the model served.
        python: interpreter of the environment that has vLLM.
        extra: further command line arguments.
        environment: further variables, as pairs.
    """

    batch_limit: int = 8
    kv_blocks: int = 512
    block_tokens: int = 32
    context_max_tokens: int = 2048
    shutdown_timeout_s: int = 0
    data_parallel_size: int = 1
    model: Path = MODEL
    python: Path = PYTHON
    extra: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()

    def command(self, port: int) -> list[str]:
        """The command line of one worker on this port."""
        flags: dict[str, object] = {
            "--served-model-name": SERVED_NAME,
            "--host": "127.0.0.1",
            "--port": port,
            "--max-num-seqs": self.batch_limit,
            "--max-model-len": self.context_max_tokens,
            "--dtype": "float32",
            "--block-size": self.block_tokens,
            "--kv-cache-memory-bytes": "64M",
            "--num-gpu-blocks-override": self.kv_blocks,
            "--distributed-executor-backend": "uni",
            "--shutdown-timeout": self.shutdown_timeout_s,
            "--tool-call-parser": "hermes",
            "--custom-histogram-buckets": json.dumps({"request_latency": LATENCY_BUCKETS_S}),
        }
        switches = (
            "--enforce-eager",
            "--enable-server-load-tracking",
            "--enable-request-id-headers",
            "--enable-auto-tool-choice",
            "--disable-uvicorn-access-log",
        )
        if self.data_parallel_size > 1:
            # One API server, so that every rank is on the page of metrics from the start.
            flags |= {"--data-parallel-size": self.data_parallel_size, "--api-server-count": 1}
        vllm = str(self.python.with_name("vllm"))
        pairs = [text for flag, value in flags.items() for text in (flag, str(value))]
        return [vllm, "serve", str(self.model), *pairs, *switches, *self.extra]


def engine_environment(options: WorkerOptions | None = None) -> dict[str, str]:
    """The engine's settings: offline, one OpenMP thread, dev mode on (loopback only)."""
    ranks = 1 if options is None else options.data_parallel_size
    return os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(ranks > 1)),
        # vLLM 0.8 knows no "nobind": record_page.py is called with another value for it.
        "VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
        "OMP_NUM_THREADS": "1",
        "VLLM_ENABLE_RESPONSES_API_STORE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CACHE_ROOT": str(HOME / "cache"),
        **dict(() if options is None else options.environment),
    }


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def memory_available_kib() -> int:
    """What the kernel says can be allocated without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1])
    raise WorkerError("/proc/meminfo does not tell MemAvailable")


def check_machine(count: int, options: WorkerOptions) -> None:
    """Refuse loudly where real workers cannot run."""
    if not options.python.exists():
        raise WorkerError(f"{options.python} is missing: run scripts/vllm-env first")
    wanted_kib = max(
        MEMORY_FREE_MIN_KIB, count * options.data_parallel_size * MEMORY_PER_WORKER_KIB
    )
    free_kib = memory_available_kib()
    if free_kib < wanted_kib:
        raise WorkerError(
            f"{count} workers want {wanted_kib} KiB of free memory, {free_kib} are free"
        )


def build_model(python: Path = PYTHON, out: Path = MODEL) -> None:
    """Make the tiny model unless the one in `out` came from the same recipe."""
    recipe = Path(__file__).with_name("tiny_model.py")
    corpus = (recipe, recipe.with_name("requirements-vllm-cpu.txt"), ROOT / "LICENSE")
    wanted = hashlib.sha256(b"".join(path.read_bytes() for path in corpus)).hexdigest()
    stamp = out / ".recipe"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    command = [str(python), str(recipe), str(out)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=MODEL_BUILD_MAX_S, check=False
    )
    if done.returncode != 0:
        raise WorkerError(f"the tiny model could not be made:\n{done.stderr[-4000:]}")
    stamp.write_text(wanted)


@dataclass(slots=True)
class Worker:
    """One vLLM server process of ours (with its engine process) on one port."""

    name: str
    port: int
    options: WorkerOptions
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def url(self) -> str:
        """Base URL, without a trailing slash."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        """Standard output and error of every start, appended."""
        return LOGS / f"{self.name}-{self.port}.log"

    @property
    def pid(self) -> int:
        """Process id of the API server; also the id of its process group."""
        if self._process is None:
            raise WorkerError(f"{self.name} was never started")
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the API server process runs."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the server in its own process group; does not wait."""
        LOGS.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.options.command(self.port),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=engine_environment(self.options),
                # Not a session of its own: Linux may share the CPU by session (autogroup),
                # and two engines in theirs then starve everything else for seconds.
                process_group=0,
            )

    def wait_healthy(self, within_s: float = START_MAX_S) -> None:
        """Return when /health answers 200; raise with the log's end when it dies or is late."""
        deadline_s = time.monotonic() + within_s
        with httpx.Client(trust_env=False, timeout=2.0) as client:
            while time.monotonic() < deadline_s:
                if not self.alive:
                    raise WorkerError(f"{self.name} died while starting:\n{self.log_tail()}")
                with contextlib.suppress(httpx.HTTPError):
                    if client.get(f"{self.url}/health").status_code == 200:
                        return
                time.sleep(POLL_S)
        raise WorkerError(f"{self.name} not healthy after {within_s:.0f} s:\n{self.log_tail()}")

    def log_tail(self) -> str:
        """The last lines of the log."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-LOG_TAIL_LINES:])

    def engine_pids(self) -> list[int]:
        """The children of the API server: the engine core."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        return [int(pid) for pid in children.read_text().split()]

    def send(self, sent: signal.Signals) -> None:
        """Send a signal to the API server alone."""
        os.kill(self.pid, sent)

    def wait_dead(self, within_s: float = STOP_MAX_S) -> None:
        """Reap the API server, then make sure that nothing of its group is left."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(within_s)
            self.kill()

    def kill(self) -> None:
        """Kill the whole process group at once."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(STOP_MAX_S)

    def stop(self) -> None:
        """SIGTERM, a bounded wait, then SIGKILL for the group."""
        if self._process is not None:
            if self.alive:
                self.send(signal.SIGTERM)
            self.wait_dead()


@contextlib.contextmanager
def running_workers(count: int = 2, options: WorkerOptions | None = None) -> Iterator[list[Worker]]:
    """Yield `count` healthy workers; whatever happens, their process groups are gone afterwards."""
    options = options or WorkerOptions()
    check_machine(count, options)
    build_model(options.python, options.model)
    workers = [Worker(f"worker{index}", free_port(), options) for index in range(count)]
    with running(workers):
        yield workers


@contextlib.contextmanager
def running(workers: Sequence[Worker]) -> Iterator[None]:
    """Start workers side by side and wait for all; their process groups end with the block."""
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.wait_healthy()
        yield
    finally:
        for worker in workers:
            if worker.alive:
                worker.send(signal.SIGTERM)
        for worker in workers:
            worker.wait_dead()


def halves(processors: set[int]) -> tuple[set[int], set[int]]:
    """Processors for engines and for everything else.

    Engines on processors of their own stand for engines on GPUs: what a router computes does not
    slow them down.
    """
    if len(processors) < 2:
        raise WorkerError("engines cannot stand apart: there is only one processor")
    in_order = sorted(processors)
    half = len(in_order) // 2
    return set(in_order[:half]), set(in_order[half:])


def stay_on(processors: set[int] | None) -> None:
    """Run this process, and those that it starts from now on, on these; None changes nothing."""
    if processors is not None:
        os.sched_setaffinity(0, processors)


def main() -> None:
    """Serve until interrupted, or only check that the machine can: for benchmarks and by hand."""
    parser = argparse.ArgumentParser(prog="tests.vllm.workers", description=__doc__)
    defaults = WorkerOptions()
    parser.add_argument("--count", type=int, default=2)
    parser.add_argument("--batch-limit", type=int, default=defaults.batch_limit)
    parser.add_argument("--kv-blocks", type=int, default=defaults.kv_blocks)
    parser.add_argument("--shutdown-timeout-s", type=int, default=defaults.shutdown_timeout_s)
    parser.add_argument(
        "--check", action="store_true", help="only say whether workers can run here"
    )
    parser.add_argument(
        "--apart",
        action="store_true",
        help="engines on one half of the processors, COMMAND on the other",
    )
    parser.add_argument("command", nargs="*", help="run this with the URLs at its end, then stop")
    args = parser.parse_args()
    options = WorkerOptions(
        batch_limit=args.batch_limit,
        kv_blocks=args.kv_blocks,
        shutdown_timeout_s=args.shutdown_timeout_s,
    )
    if args.check:
        try:
            check_machine(args.count, options)
        except WorkerError as error:
            sys.exit(f"REAL vLLM WORKERS CANNOT RUN HERE: {error}")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    engines, others = halves(os.sched_getaffinity(0)) if args.apart else (None, None)
    stay_on(engines)
    with contextlib.suppress(KeyboardInterrupt), running_workers(args.count, options) as workers:
        stay_on(others)
        urls = [worker.url for worker in workers]
        if args.command:
            sys.exit(subprocess.run([*args.command, *urls], check=False).returncode)
        sys.stdout.write("".join(f"{url}\n" for url in urls))
        sys.stdout.flush()
        signal.pause()


if __name__ == "__main__":
    main()
