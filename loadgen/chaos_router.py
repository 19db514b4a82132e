"""The router of a chaos run: a process of its own, with keys, bounds and its workers' addresses."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import TYPE_CHECKING, Final

import orjson

from loadgen.chaos_keys import TENANT_WEIGHTS, Key, key_settings
from loadgen.cluster import ROUTER_READY_PATH, bidgate_command, until_ready
from loadgen.processes import LOOPBACK, free_ports, start, stopping

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from loadgen.chaos_plan import ChaosSpec, PlannedRequest

FIRST_BYTE_S: Final = 6.0
LEASE_S: Final = 10.0
"""Prefill workers keep a prompt for longer than a decode worker may take to begin its answer."""
ROUTER_FLAGS: Final = (
    *("--max-wait-s", "8", "--queue-max", "400", "--no-worker-hold-s", "4"),
    *("--first-byte-timeout-s", f"{FIRST_BYTE_S:g}", "--stall-timeout-s", "2.5"),
    *("--connect-timeout-s", "1", "--client-stall-timeout-s", "5"),
    *("--health-timeout-s", "1", "--reprobe-max-s", "1", "--log-level", "warning"),
)
"""Bounds short enough that every one of them is reached in a run."""


@contextlib.asynccontextmanager
async def running_router(
    spec: ChaosSpec, plan: Sequence[PlannedRequest], worker_urls: Sequence[str], out: Path
) -> AsyncIterator[str]:
    """Start the router, its log and settings in `out`; yields its URL when it is ready.

    Raises:
        ClusterError: it did not start, or ended before the block did.
    """
    port = free_ports(1)[0]
    config = out / "router.yaml"
    config.write_bytes(orjson.dumps(router_settings(spec, plan), option=orjson.OPT_INDENT_2))
    command = [
        *(*bidgate_command(), "serve", "--host", LOOPBACK, "--port", str(port), *ROUTER_FLAGS),
        *("--config", str(config), "--max-num-seqs", str(spec.batch_limit)),
        *_roles(spec, worker_urls),
    ]
    url = f"http://{LOOPBACK}:{port}"
    with stopping([]) as children:
        children.append(start("the router", command, out / "router.log"))
        await until_ready(children[0], url + ROUTER_READY_PATH)
        yield url
        children[0].require_alive()


def router_settings(spec: ChaosSpec, plan: Sequence[PlannedRequest]) -> dict[str, object]:
    """What stands in the router's YAML file, of which JSON is a part."""
    requests: Counter[Key] = Counter(request.key for request in plan)
    tokens: Counter[Key] = Counter()
    for request in plan:
        tokens[request.key] += request.sequences * request.decode_tokens
    return {
        "auth": {"keys": key_settings(requests, tokens, spec.duration_s)},
        "control": {"handoff": {"lease_s": LEASE_S}, "tenants": {"weights": TENANT_WEIGHTS}},
    }


def _roles(spec: ChaosSpec, urls: Sequence[str]) -> list[str]:
    count = spec.prefill_workers
    if not count:
        return ["--workers", *urls]
    return ["--prefill-workers", *urls[:count], "--decode-workers", *urls[count:]]
