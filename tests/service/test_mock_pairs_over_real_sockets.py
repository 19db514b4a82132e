"""The whole service before mock prefill and decode workers: a pair says what one worker says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from service.control.config import ControlConfig, HandoffConfig
from service.control.events import Role
from service.mock.serving import running_mock_workers
from service.settings import MockConfig
from service.worker_settings import WorkerSettings
from tests.service.live import Live, mock, serving, until

BATCH = 4
FAST = 10.0


def asked(salt: int, **fields: Any) -> dict[str, Any]:
    prompt = [salt, *range(1, 200)]
    return {"prompt": prompt, "max_tokens": 20, "ignore_eos": True, "temperature": 0, **fields}


@asynccontextmanager
async def pair_of_mocks(control: ControlConfig | None = None) -> AsyncIterator[Live]:
    """Two prefill workers and one decode worker."""
    # However slow this machine is, no lease ends: what is late is answered with other text.
    leased = {"kv_transfer": True, "kv_lease_s": 600.0}
    mocks = [mock(**leased, batch_limit=BATCH, time_scale=FAST) for _ in range(3)]
    async with running_mock_workers(mocks) as urls:
        roles = (Role.PREFILL, Role.PREFILL, Role.DECODE)
        workers = tuple(
            WorkerSettings(url=url, batch_limit=BATCH, role=role)
            for url, role in zip(urls, roles, strict=True)
        )
        groups: dict[str, object] = {} if control is None else {"control": control}
        async with serving(urls, workers=workers, wait=False, **groups) as live:
            await until(lambda: up(live) == 3, within_s=20.0)
            yield live


def up(live: Live) -> int:
    """Workers of every role that are up."""
    router = live.service.queue.stats().router
    return sum(one.state.value == "up" for one in (*router.workers, *router.prefillers))


async def text(live: Live, url: str, body: dict[str, Any]) -> str:
    response = await live.client.post(f"{url}/v1/completions", json=body)
    assert response.status_code == 200
    if not body.get("stream"):
        said: str = response.json()["choices"][0]["text"]
        return said
    events = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    return "".join(choice["text"] for choice in choices)


@pytest.mark.parametrize("hold_s", [0.0, 25.0])
async def test_texts_of_a_pair_are_those_of_one_worker(hold_s: float) -> None:
    control = ControlConfig(handoff=HandoffConfig(hold_s=hold_s))
    async with pair_of_mocks(control) as live:
        bodies = [asked(salt, stream=salt % 2 == 0) for salt in range(12)]
        alone = [await text(live, live.workers[2], body) for body in bodies]
        told = await asyncio.gather(*(text(live, live.url, body) for body in bodies))
        assert told == alone
        router = live.service.queue.stats().router
        assert router.prefills >= len(bodies)
        page = (await live.client.get(f"{live.url}/metrics")).text
        assert 'bidgate_handoffs_total{result="missing"} 0.0' in page
        assert 'bidgate_handoffs_total{result="failed"} 0.0' in page
        # Every prompt was fetched, so the prefill workers hold nothing.
        for worker in live.workers[:2]:
            assert await live.gauge(worker, "kv_cache_usage_perc") == 0.0


async def test_without_a_lead_no_decode_slot_is_promised_twice() -> None:
    control = ControlConfig(handoff=HandoffConfig(lead_max_s=0.0))
    async with pair_of_mocks(control) as live:
        promised: list[int] = []

        async def watch() -> None:
            while True:
                (worker,) = live.service.queue.stats().router.workers
                promised.append(worker.active)
                await asyncio.sleep(0.005)

        watcher = asyncio.ensure_future(watch())
        bodies = [asked(salt, stream=True) for salt in range(12)]
        await asyncio.gather(*(text(live, live.url, body) for body in bodies))
        watcher.cancel()
        assert max(promised) == BATCH


async def test_a_client_that_leaves_at_any_time_leaves_nothing_behind_but_leases() -> None:
    async with pair_of_mocks() as live:
        bodies = [asked(salt, stream=True, max_tokens=200) for salt in range(16)]
        tasks = [asyncio.ensure_future(text(live, live.url, body)) for body in bodies]
        for pause_s, task in zip([0.002, 0.01, 0.03, 0.05] * 4, tasks, strict=True):
            await asyncio.sleep(pause_s)
            task.cancel()
        await asyncio.wait(tasks)
        await until(lambda: live.service.queue.held == 0, within_s=10.0)
        router = live.service.queue.stats().router
        assert [worker.active for worker in router.workers] == [0]
        assert [one.legs for one in router.prefillers] == [0, 0]
        assert [one.kv_tokens for one in router.prefillers] == [
            one.orphaned_kv_tokens for one in router.prefillers
        ]


async def test_embedded_mock_workers_make_a_pair() -> None:
    config = MockConfig(workers=2, prefill_workers=1, profile="unit", time_scale=FAST)
    async with serving((), workers=(), mock=config, wait=False) as live:
        await until(lambda: up(live) == 3, within_s=20.0)
        response = await live.client.post(f"{live.url}/v1/completions", json=asked(1))
        assert response.headers["x-bidgate-prefill-worker"] == "mock-prefill-0"
        assert response.headers["x-bidgate-worker"] in ("mock-0", "mock-1")
