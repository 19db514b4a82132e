"""EndpointSlices by list and watch, against an API server on loopback that follows a script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import structlog
import yaml
from aiohttp import web

from service.discovery.config import DiscoveryConfig, KubernetesConfig
from service.discovery.following import Discovery
from service.discovery.kubernetes_slices import KubernetesSource
from service.discovery.source import SourceError
from service.settings_text import SettingsError
from service.worker_config import WorkerConfig
from service.worker_settings import FleetConfig
from tests.service.live import until

PATH = "/apis/discovery.k8s.io/v1/namespaces/prod/endpointslices"
Slice = dict[str, Any]
WAIT_S = 60.0


def endpoint(address: str, pod: str | None = None, *, ready: bool | None = True) -> Slice:
    found: Slice = {"addresses": [address], "conditions": {"ready": ready}}
    if pod is not None:
        found["targetRef"] = {"kind": "Pod", "name": pod}
    return found


def a_slice(
    *endpoints: Slice, name: str = "vllm-1", kind: str = "IPv4", port: str = "http"
) -> Slice:
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": "vllm"}},
        "addressType": kind,
        "endpoints": list(endpoints),
        "ports": [{"name": port, "port": 8000, "protocol": "TCP"}],
    }


@dataclass
class ScriptedApi:
    """Lists what it holds; each watch gets its events from a queue, None drops the connection."""

    slices: dict[str, Slice] = field(default_factory=dict)
    version: int = 1
    lists: int = 0
    watches: list[str] = field(default_factory=list)
    selectors: list[str] = field(default_factory=list)
    fail: int = 0
    refuse: int = 0
    events: asyncio.Queue[Slice | None] = field(default_factory=asyncio.Queue)

    def hold(self, *slices: Slice) -> None:
        self.version += 1
        self.slices = {one["metadata"]["name"]: one for one in slices}

    def tell(self, kind: str, one: Slice) -> None:
        self.version += 1
        one = {**one, "metadata": {**one["metadata"], "resourceVersion": str(self.version)}}
        self.events.put_nowait({"type": kind, "object": one})

    def expire(self) -> None:
        status = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
        self.events.put_nowait({"type": "ERROR", "object": status})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        assert request.headers["authorization"] == "Bearer t0ken"
        self.selectors.append(request.query["labelSelector"])
        if request.query.get("watch") in ("True", "true"):
            return await self._watch(request)
        self.lists += 1
        if self.fail:
            return web.json_response({"kind": "Status", "code": self.fail}, status=self.fail)
        return web.json_response(
            {
                "kind": "EndpointSliceList",
                "apiVersion": "discovery.k8s.io/v1",
                "metadata": {"resourceVersion": str(self.version)},
                "items": list(self.slices.values()),
            }
        )

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        self.watches.append(request.query["resourceVersion"])
        if self.refuse:
            # As a gateway before the API server answers, where that is not a Status.
            return web.Response(status=self.refuse, text="<html>no</html>")
        response = web.StreamResponse()
        await response.prepare(request)
        while (event := await self.events.get()) is not None:
            await response.write(json.dumps(event).encode() + b"\n")
            if event["type"] == "ERROR":
                return response
        assert request.transport is not None
        request.transport.abort()
        return response


@asynccontextmanager
async def scripted_api(tmp_path: Path) -> AsyncIterator[tuple[ScriptedApi, Path]]:
    """The server, and a kubeconfig that leads to it."""
    api = ScriptedApi()
    app = web.Application()
    app.router.add_get(PATH, api.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "c", "cluster": {"server": f"http://{host}:{port}"}}],
        "users": [{"name": "u", "user": {"token": "t0ken"}}],
        "contexts": [{"name": "test", "context": {"cluster": "c", "user": "u"}}],
    }
    file = tmp_path / "kubeconfig"
    file.write_text(yaml.safe_dump(config))
    try:
        yield api, file
    finally:
        await runner.cleanup()


@dataclass
class Followed:
    """What discovery wants now."""

    discovery: Discovery
    workers: dict[str, WorkerConfig] = field(default_factory=dict)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    async def until(self, *ids: str) -> None:
        async with asyncio.timeout(WAIT_S):
            while sorted(self.workers) != sorted(ids):
                self.news.clear()
                await self.news.wait()


@asynccontextmanager
async def following(kubeconfig: Path, **fields: Any) -> AsyncIterator[Followed]:
    given = {"service": "vllm", "namespace": "prod", "kubeconfig": kubeconfig} | fields
    config = KubernetesConfig(**{"retry_max_s": 0.2, **given})

    def want(workers: Any) -> None:
        followed.workers = dict(workers)
        followed.news.set()

    followed = Followed(Discovery(want, lambda _: True))
    followed.discovery.configure((), FleetConfig(), DiscoveryConfig(kubernetes=(config,)))
    task = asyncio.create_task(followed.discovery.run())
    try:
        yield followed
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_ready_endpoints_are_workers_named_after_their_pods(tmp_path: Path) -> None:
    async with scripted_api(tmp_path) as (api, kubeconfig):
        api.hold(
            a_slice(
                endpoint("10.0.0.1", "pod-a"),
                endpoint("10.0.0.2", "pod-b", ready=False),
                endpoint("10.0.0.3", ready=None),
            ),
            a_slice(
                endpoint("fd00::1", "pod-a"), endpoint("fd00::4", "pod-d"), name="v6", kind="IPv6"
            ),
            a_slice(endpoint("10.0.0.9", "pod-z"), name="other", port="metrics"),
        )
        async with following(kubeconfig, port_name="http") as followed:
            await followed.until("pod-a", "pod-d", "10.0.0.3:8000")
            assert followed.workers["pod-a"].url == "http://10.0.0.1:8000"
            assert followed.workers["pod-d"].url == "http://[fd00::4]:8000"
        assert set(api.selectors) == {"kubernetes.io/service-name=vllm"}


async def test_the_watch_brings_changes_and_deletions(tmp_path: Path) -> None:
    async with scripted_api(tmp_path) as (api, kubeconfig):
        api.hold(a_slice(endpoint("10.0.0.1", "a")))
        async with following(kubeconfig, label_selector="tier=gold") as followed:
            await followed.until("a")
            api.tell("MODIFIED", a_slice(endpoint("10.0.0.1", "a"), endpoint("10.0.0.2", "b")))
            await followed.until("a", "b")
            api.tell(
                "MODIFIED",
                a_slice(endpoint("10.0.0.1", "a", ready=False), endpoint("10.0.0.2", "b")),
            )
            await followed.until("b")
            api.tell("ADDED", a_slice(endpoint("10.0.0.3", "c"), name="vllm-2"))
            await followed.until("b", "c")
            api.tell("DELETED", a_slice(name="vllm-1"))
            await followed.until("c")
            assert api.lists == 1
        assert set(api.selectors) == {"kubernetes.io/service-name=vllm,tier=gold"}


async def test_a_deletion_missed_while_the_watch_was_dropped_is_found_by_the_list(
    tmp_path: Path,
) -> None:
    async with scripted_api(tmp_path) as (api, kubeconfig):
        api.hold(a_slice(endpoint("10.0.0.1", "a"), endpoint("10.0.0.2", "b")))
        async with following(kubeconfig) as followed:
            await followed.until("a", "b")
            api.hold(a_slice(endpoint("10.0.0.1", "a")))
            api.events.put_nowait(None)
            await followed.until("a")
            (stats,) = followed.discovery.stats()
            assert (stats.failing, stats.failures) == (False, 0)


async def test_a_version_that_is_too_old_is_listed_anew_and_never_watched_again(
    tmp_path: Path,
) -> None:
    async with scripted_api(tmp_path) as (api, kubeconfig):
        api.hold(a_slice(endpoint("10.0.0.1", "a"), endpoint("10.0.0.2", "b")))
        async with following(kubeconfig) as followed:
            await followed.until("a", "b")
            api.hold(a_slice(endpoint("10.0.0.3", "c")))
            api.expire()
            await followed.until("c")
            api.tell("MODIFIED", a_slice(endpoint("10.0.0.4", "d")))
            await followed.until("d")
        assert api.watches == ["2", "3"]


@pytest.mark.parametrize("status", [403, 410, 504])
async def test_a_watch_that_is_refused_is_shown_and_lists_go_on_at_the_pause_of_a_failure(
    tmp_path: Path, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def noting(seconds_s: float) -> None:
        if seconds_s < 0.05:
            await sleep(seconds_s)
            return
        pauses.append(seconds_s)

    async with scripted_api(tmp_path) as (api, kubeconfig):
        api.hold(a_slice(endpoint("10.0.0.1", "a")))
        api.refuse = status
        with structlog.testing.capture_logs() as log:
            async with following(kubeconfig, retry_max_s=6.4) as followed:
                monkeypatch.setattr(asyncio, "sleep", noting)
                failures = followed.discovery.stats
                await until(lambda: failures()[0].failures >= 8, within_s=WAIT_S)
                api.hold(a_slice(endpoint("10.0.0.2", "b")))
                await followed.until("b")
                assert failures()[0].failing
                api.refuse = 0
                await until(lambda: not failures()[0].failing, within_s=WAIT_S)
                api.tell("MODIFIED", a_slice(endpoint("10.0.0.3", "c")))
                await followed.until("c")
    assert pauses[:8] == pytest.approx([0.1 * 2**n for n in range(7)] + [6.4], rel=0.21)
    events = [line["event"] for line in log]
    assert events.count("discovery_failed") == 1
    assert events.count("discovery_works_again") == 1
    (said,) = [line["reason"] for line in log if line["event"] == "discovery_failed"]
    assert f"refused the watch: {status}" in said


async def test_an_error_within_a_watch_is_shown_unless_its_version_is_too_old(
    tmp_path: Path,
) -> None:
    async with scripted_api(tmp_path) as (api, kubeconfig):
        api.hold(a_slice(endpoint("10.0.0.1", "a")))
        async with following(kubeconfig) as followed:
            await followed.until("a")
            status = {"kind": "Status", "code": 500, "reason": "Broken", "message": "no storage"}
            api.events.put_nowait({"type": "ERROR", "object": status})
            stats = followed.discovery.stats
            await until(lambda: stats()[0].failures == 1, within_s=WAIT_S)
            await until(lambda: not stats()[0].failing, within_s=WAIT_S)
            api.tell("MODIFIED", a_slice(endpoint("10.0.0.4", "d")))
            await followed.until("d")


async def test_an_api_server_that_fails_leaves_the_workers_and_is_told_once(
    tmp_path: Path,
) -> None:
    async with scripted_api(tmp_path) as (api, kubeconfig):
        api.hold(a_slice(endpoint("10.0.0.1", "a")))
        with structlog.testing.capture_logs() as log:
            async with following(kubeconfig) as followed:
                await followed.until("a")
                api.fail = 503
                api.events.put_nowait(None)
                failed = followed.discovery.stats
                await until(lambda: failed()[0].failures >= 3, within_s=WAIT_S)
                assert list(followed.workers) == ["a"]
                assert followed.discovery.stats()[0].failing
                api.fail = 0
                api.hold(a_slice(endpoint("10.0.0.2", "b")))
                await followed.until("b")
                assert not followed.discovery.stats()[0].failing
    events = [line["event"] for line in log]
    assert events.count("discovery_failed") == 1
    assert events.count("discovery_works_again") == 1
    assert "t0ken" not in str(log)


async def test_without_a_cluster_it_says_so(tmp_path: Path) -> None:
    source = KubernetesSource(KubernetesConfig(service="s", kubeconfig=tmp_path / "none"))
    with pytest.raises(SourceError, match="no access to a Kubernetes API"):
        await anext(source.snapshots())


async def test_several_ports_need_a_name(tmp_path: Path) -> None:
    async with scripted_api(tmp_path) as (api, kubeconfig):
        one = a_slice(endpoint("10.0.0.1"))
        one["ports"].append({"name": "metrics", "port": 9000})
        api.hold(one)
        config = KubernetesConfig(service="vllm", namespace="prod", kubeconfig=kubeconfig)
        snapshots = KubernetesSource(config).snapshots()
        with pytest.raises(SourceError, match="choose one by port_name"):
            await anext(snapshots)


def test_a_missing_library_is_one_line_that_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from service.discovery import config

    monkeypatch.setattr(config, "find_spec", lambda _: None)
    with pytest.raises(SettingsError, match=r"bidgate\[kubernetes\]"):
        config.require_kubernetes()
