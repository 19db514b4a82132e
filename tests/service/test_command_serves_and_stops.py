"""`bidgate serve` as a process: one line when the port is taken, an end in order on a signal."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import pytest

SERVE = (sys.executable, "-m", "service", "serve", "--mock", "1", "--log-format", "json")
COMMANDS = {"serve": SERVE, "mock-worker": (*SERVE[:3], "mock-worker")}
SLOW = {"model": "mock", "prompt": "x", "max_tokens": 300, "ignore_eos": True, "stream": True}
ENDLESS = SLOW | {"max_tokens": 20_000}


@dataclass
class Process:
    """A running router: its process, its address, and the log so far."""

    process: subprocess.Popen[str]
    url: str
    log: list[dict[str, object]]

    def line(self, event: str) -> dict[str, object]:
        """Read the log up to an event."""
        assert self.process.stdout is not None
        for text in self.process.stdout:
            self.log.append(json.loads(text))
            if self.log[-1]["event"] == event:
                return self.log[-1]
        raise AssertionError(f"the log ended without {event}: {self.log}")


@contextmanager
def running(*flags: str) -> Iterator[Process]:
    """A router with one embedded mock worker that is up."""
    process = subprocess.Popen([*SERVE, "--port", "0", *flags], stdout=subprocess.PIPE, text=True)
    try:
        router = Process(process, "", [])
        router.url = str(router.line("listening")["url"])
        router.line("worker_up")
        yield router
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_the_first_signal_lets_requests_finish_and_the_exit_status_is_0() -> None:
    with running() as router, httpx.Client(trust_env=False, timeout=20) as client:
        with client.stream("POST", f"{router.url}/v1/completions", json=SLOW) as response:
            assert response.status_code == 200, response.read()
            parts = response.iter_raw()
            next(parts)
            router.process.send_signal(signal.SIGTERM)
            router.line("draining")
            ready = httpx.get(f"{router.url}/ready", trust_env=False)
            assert (ready.status_code, ready.json()["why"]) == (503, "draining")
            late = httpx.post(f"{router.url}/v1/completions", json=SLOW, trust_env=False)
            assert late.status_code == 503
            assert late.headers["retry-after"]
            assert b"".join(parts).endswith(b"data: [DONE]\n\n")
        assert router.line("stopping")["held"] == 0
        assert router.process.wait(timeout=10) == 0


def test_a_signal_lets_streams_and_the_queue_finish() -> None:
    """T89: streams that run and streams that wait are whole, what comes later is refused."""
    body = SLOW | {"max_tokens": 120}
    with (
        running("--mock-batch-limit", "5") as router,
        httpx.Client(trust_env=False, timeout=60) as client,
        ThreadPoolExecutor(10) as pool,
    ):
        url = f"{router.url}/v1/completions"
        answers = [pool.submit(httpx.post, url, json=body, timeout=60) for _ in range(10)]
        while gauges(client, router) != {"running": 5, "waiting": 5}:
            time.sleep(0.01)
        router.process.send_signal(signal.SIGTERM)
        router.line("draining")
        ready = client.get(f"{router.url}/ready")
        assert (ready.status_code, ready.json()["why"]) == (503, "draining")
        late = client.post(url, json=body)
        assert (late.status_code, late.json()["error"]["code"]) == (503, "draining")
        for answer in answers:
            *events, done, end = answer.result().content.split(b"\n\n")
            assert (done, end) == (b"data: [DONE]", b"")
            assert len(events) >= 120
        assert router.line("stopping")["held"] == 0
        assert router.process.wait(timeout=10) == 0


def gauges(client: httpx.Client, router: Process) -> dict[str, float]:
    """Requests of the queue, by what they do."""
    page = client.get(f"{router.url}/metrics").text
    values = re.findall(r"^bidgate_queue_(running|waiting) (\S+)$", page, re.MULTILINE)
    return {name: float(value) for name, value in values}


def test_the_second_signal_ends_streams_with_an_error_event_at_once() -> None:
    with running() as router, httpx.Client(trust_env=False, timeout=20) as client:
        with client.stream("POST", f"{router.url}/v1/completions", json=ENDLESS) as response:
            assert response.status_code == 200, response.read()
            parts = response.iter_raw()
            next(parts)
            router.process.send_signal(signal.SIGINT)
            router.line("draining")
            router.process.send_signal(signal.SIGINT)
            assert_broken_off(b"".join(parts))
        assert router.line("stopping")["held"] == 1
        assert router.process.wait(timeout=10) == 0


def assert_broken_off(rest: bytes) -> None:
    """The last event is an error that says why, and none says that all is done."""
    *_, last, end = rest.split(b"\n\n")
    assert end == b""
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "stopped"
    assert b"[DONE]" not in rest


def test_the_drain_has_an_end() -> None:
    with (
        running("--drain-s", "0.5") as router,
        httpx.Client(trust_env=False, timeout=20) as client,
        client.stream("POST", f"{router.url}/v1/completions", json=ENDLESS) as response,
    ):
        assert response.status_code == 200, response.read()
        parts = response.iter_raw()
        next(parts)
        router.process.send_signal(signal.SIGTERM)
        assert_broken_off(b"".join(parts))
        assert router.line("stopping")["held"] == 1
        assert router.process.wait(timeout=10) == 0


@pytest.mark.parametrize("command", list(COMMANDS))
def test_a_taken_port_is_one_line_and_a_status(command: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = subprocess.run(
            [*COMMANDS[command], "--port", str(port)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert ended.returncode == 1
    assert ended.stdout == ""
    why = "the port is taken; give another with --port"
    assert ended.stderr == f"bidgate: cannot listen on 127.0.0.1:{port}: {why}\n"
