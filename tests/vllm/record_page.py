"""Record the /metrics page of one vLLM version, for the parser's tests: see pages/README.md.

`python -m tests.vllm.record_page --python SOME_VENV/bin/python` starts one worker of that
environment with flags every version knows, sends a few requests, and writes pages/<version>.txt.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.vllm.engine import completion
from tests.vllm.workers import HOME, SERVED_NAME, Worker, WorkerOptions, build_model, free_port

PAGES = Path(__file__).with_name("pages")
REQUESTS = 12
DECODE_TOKENS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class OldestFlags(WorkerOptions):
    """Only flags that vLLM has had since 0.8."""

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
        }
        pairs = [text for flag, value in flags.items() for text in (flag, str(value))]
        entry = [str(self.python), "-m", "vllm.entrypoints.cli.main"]
        return [*entry, "serve", str(self.model), "--enforce-eager", *pairs, *self.extra]


def exercise(http: httpx.Client) -> None:
    """More requests than slots, so that every counter and histogram has moved."""
    bodies = [
        completion(SERVED_NAME, prompt_tokens=50, decode_tokens=DECODE_TOKENS, salt=salt)
        for salt in range(REQUESTS)
    ]
    with ThreadPoolExecutor(REQUESTS) as threads:
        answers = list(threads.map(lambda body: http.post("/v1/completions", json=body), bodies))
    for answer in answers:
        if answer.json()["usage"]["completion_tokens"] != DECODE_TOKENS:
            raise ValueError(f"the engine answered {answer.status_code}: {answer.text[:400]}")


def behaviour(http: httpx.Client) -> str:
    """Answers that docs/compatibility.md lists beside the page's names."""
    filtered = http.get("/metrics/", params={"name[]": "vllm:num_requests_running"})
    body = completion(SERVED_NAME, prompt_tokens=5, decode_tokens=3)
    named = http.post("/v1/completions", json=body, headers={"X-Request-Id": "mine"})
    streamed = http.post("/v1/completions", json=body | {"stream": True})
    return (
        f"filtered page: {filtered.status_code}, {len(filtered.content)} bytes\n"
        f"id of a request named mine: {named.json()['id']}\n"
        f"events of 3 tokens: {streamed.text.count('data: {')}, "
        f"done: {streamed.text.rstrip().endswith('[DONE]')}\n"
        f"max_model_len: {http.get('/v1/models').json()['data'][0].get('max_model_len')}\n"
        f"/load: {http.get('/load').status_code}\n"
    )


def record(worker: Worker) -> tuple[str, str, str]:
    """The engine's version, its page after `exercise`, and how it behaves."""
    worker.start()
    try:
        worker.wait_healthy()
        with httpx.Client(base_url=worker.url, trust_env=False, timeout=120.0) as http:
            exercise(http)
            version = http.get("/version").json()["version"].partition("+")[0]
            page = http.get("/metrics").text
            return version, page, behaviour(http)
    finally:
        worker.stop()


def main() -> None:
    """Record with the environment named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", type=Path, required=True)
    parser.add_argument("--block-tokens", type=int, default=16)
    parser.add_argument("extra", nargs="*", help="further engine arguments, after --")
    args = parser.parse_args()
    model = HOME / f"tiny-llama-{args.python.absolute().parents[1].name}"
    build_model(args.python, model)
    options = OldestFlags(
        python=args.python.absolute(),
        model=model,
        block_tokens=args.block_tokens,
        extra=tuple(args.extra),
    )
    worker = Worker("recorded", free_port(), options)
    version, page, behaves = record(worker)
    out = PAGES / f"{version}.txt"
    out.parent.mkdir(exist_ok=True)
    out.write_text(page)
    sys.stdout.write(f"{out.name}: {len(page.splitlines())} lines\n{behaves}")


if __name__ == "__main__":
    main()
