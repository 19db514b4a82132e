"""vLLM's own benchmark client gets the same texts through bidgate as from the engine itself."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from tests.vllm.router import running_router
from tests.vllm.workers import HOME, MODEL, PYTHON, engine_environment

if TYPE_CHECKING:
    from pathlib import Path

    from tests.vllm.conftest import Fleet

PROMPTS = 24
DECODE_TOKENS = 32
BENCH_MAX_S = 400.0


def bench(url: str, model: str, out: Path) -> dict[str, Any]:
    """Run `vllm bench serve` once against a URL; its detailed result."""
    flags: dict[str, object] = {
        "--backend": "vllm",
        "--base-url": url,
        "--endpoint": "/v1/completions",
        "--model": model,
        "--tokenizer": MODEL,
        "--dataset-name": "random",
        "--random-input-len": 48,
        "--random-output-len": DECODE_TOKENS,
        "--seed": 1,
        "--temperature": 0,
        "--num-prompts": PROMPTS,
        "--max-concurrency": 6,
        "--result-dir": out.parent,
        "--result-filename": out.name,
    }
    switches = ["--ignore-eos", "--disable-tqdm", "--save-result", "--save-detailed"]
    command = [str(PYTHON.with_name("vllm")), "bench", "serve", *switches]
    command += [text for flag, value in flags.items() for text in (flag, str(value))]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=BENCH_MAX_S,
        env=engine_environment(),
        cwd=HOME,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def test_the_benchmark_runs_the_same_through_bidgate(fleet: Fleet, tmp_path: Path) -> None:
    if not fleet.owned or not PYTHON.exists():
        pytest.skip("needs the tokenizer of our own model and the vllm command beside it")
    direct = bench(fleet.urls[0], fleet.model, tmp_path / "direct.json")
    with running_router(fleet.urls, batch_limit=fleet.batch_limit) as router:
        routed = bench(router.url, fleet.model, tmp_path / "routed.json")
    for result in (direct, routed):
        assert result["completed"] == PROMPTS
        assert result["failed"] == 0
        assert not any(result["errors"])
        assert result["output_lens"] == [DECODE_TOKENS] * PROMPTS
    assert routed["input_lens"] == direct["input_lens"]
    assert routed["generated_texts"] == direct["generated_texts"]
