"""A router as a process with TLS, keys, an admin key and a settings file that changes under it."""

from __future__ import annotations

import asyncio
import json
import signal
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
import yaml

from service.mock.serving import running_mock_workers
from tests.service.live import mock, until

SECRETS = {
    "client": "sk-client-5ecret",
    "admin": "adm-5ecret",
    "worker": "wrk-5ecret",
    "added": "add-5ecret",
    "wrong": "wrong-5ecret",
}
WAIT_S = 60.0


@dataclass
class Router:
    """The process, what it logged, and every answer that it gave."""

    process: asyncio.subprocess.Process
    client: httpx.AsyncClient
    log: list[dict[str, Any]] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    more: asyncio.Event = field(default_factory=asyncio.Event)
    read: int = 0

    async def collect(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.text.append(line.decode())
            if line.startswith(b"{"):
                self.log.append(json.loads(line))
            self.more.set()

    async def event(self, name: str) -> dict[str, Any]:
        """The next line of that event."""
        async with asyncio.timeout(WAIT_S):
            while True:
                while self.read < len(self.log):
                    self.read += 1
                    if self.log[self.read - 1]["event"] == name:
                        return self.log[self.read - 1]
                self.more.clear()
                await self.more.wait()

    async def ask(self, method: str, path: str, key: str | None = None, **kwargs: Any) -> Any:
        headers = {} if key is None else {"authorization": f"Bearer {SECRETS[key]}"}
        answer = await self.client.request(method, path, headers=headers, **kwargs)
        self.text.append(f"{answer.headers} {answer.text}")
        return answer

    async def metric(self, name: str) -> float:
        page = (await self.ask("GET", "/metrics")).text
        return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name))


@asynccontextmanager
async def routing(config: Path, context: ssl.SSLContext) -> AsyncIterator[Router]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "service", "serve", "--config", str(config)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with httpx.AsyncClient(verify=context, trust_env=False, timeout=WAIT_S) as client:
        router = Router(process, client)
        collector = asyncio.create_task(router.collect())
        try:
            client.base_url = (await router.event("listening"))["url"]
            yield router
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(WAIT_S):
                assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            await collector


def settings_of(tmp_path: Path, *urls: str, **more: Any) -> dict[str, Any]:
    return {
        "workers": [{"url": url, "api_key": SECRETS["worker"]} for url in urls],
        "fleet": {"max_num_seqs": 8},
        "server": {
            "port": 0,
            "log_format": "json",
            "tls_cert_file": str(tmp_path / "cert.pem"),
            "tls_key_file": str(tmp_path / "key.pem"),
            "tls_min_version": "1.3",
        },
        "auth": {
            "keys": [{"key": {"file": str(tmp_path / "client-key")}, "tenant": "team"}],
            "admin_key": SECRETS["admin"],
        },
        **more,
    }


@pytest.fixture
def context(tmp_path: Path) -> ssl.SSLContext:
    """A client that trusts the certificate in tmp_path and no other."""
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    for part in certificate.cert_chain_pems:
        part.write_to_path(tmp_path / "cert.pem", append=True)
    (tmp_path / "client-key").write_text(SECRETS["client"] + "\n")
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


def put(path: Path, text: str) -> None:
    path.write_text(text)


def line_of(path: Path, text: str) -> int:
    return path.read_text().splitlines().index(text) + 1


BODY = {"model": "mock", "prompt": "x", "max_tokens": 4}


async def test_operations(tmp_path: Path, context: ssl.SSLContext) -> None:
    config = tmp_path / "bidgate.yaml"

    def write(values: dict[str, Any]) -> None:
        config.write_text("# a comment\n" + yaml.safe_dump(values, sort_keys=False))

    async with running_mock_workers([mock(), mock()]) as (first, second):
        write(settings_of(tmp_path, first))
        async with routing(config, context) as router:
            await router.event("worker_up")
            await _keys_are_needed(router)
            await _a_request_outlives_every_change(router, tmp_path, write, first, second)
            await _a_bad_file_changes_nothing(router, tmp_path, config, write, first, second)
            await _the_operator_has_the_last_word(router, second)
        said = "".join(router.text)
    assert "team" in said
    assert not [name for name, secret in SECRETS.items() if secret in said]


async def _keys_are_needed(router: Router) -> None:
    for key, status in ((None, 401), ("wrong", 401), ("admin", 401), ("client", 200)):
        answer = await router.ask("POST", "/v1/completions", key, json=BODY)
        assert answer.status_code == status, answer.text
    assert (await router.ask("GET", "/scarcity")).status_code == 401
    assert (await router.ask("GET", "/health")).status_code == 200
    assert (await router.ask("GET", "/admin/v1/workers", "client")).status_code == 401
    assert await router.metric("bidgate_unauthorized_total") == 5
    assert await router.metric('bidgate_tenant_requests_total{tenant="team"}') == 1


async def _a_request_outlives_every_change(
    router: Router, tmp_path: Path, write: Any, first: str, second: str
) -> None:
    body = BODY | {"max_tokens": 300, "ignore_eos": True, "stream": True}
    headers = {"authorization": f"Bearer {SECRETS['client']}"}
    path = "/v1/completions"
    async with router.client.stream("POST", path, json=body, headers=headers) as response:
        assert response.status_code == 200
        parts = response.aiter_bytes()
        await anext(parts)
        changed = settings_of(tmp_path, first, second, control={"weights": {"ttft": 2.0}})
        changed["server"]["port"] = 1
        changed["fleet"]["max_num_seqs"] = 9
        write(changed)
        pending = await router.event("settings_need_restart")
        assert pending["settings"] == ["server.port"]
        applied = await router.event("settings_applied")
        assert set(applied["changed"]) == {
            "workers",
            "fleet.max_num_seqs",
            "control.weights.ttft",
        }
        left = b"".join([part async for part in parts])
    assert left.endswith(b"data: [DONE]\n\n")

    async def both_have_it() -> bool:
        return await router.metric("bidgate_worker_batch_limit") == 18

    await until(both_have_it, within_s=WAIT_S)
    assert await router.metric("bidgate_settings_restart_pending") == 1
    assert await router.metric("bidgate_accounting_imbalance") == 0


async def _a_bad_file_changes_nothing(
    router: Router, tmp_path: Path, config: Path, write: Any, first: str, second: str
) -> None:
    good = settings_of(tmp_path, first, second)
    write(good | {"control": {"weights": {"ttft": -1}}})
    refused = await router.event("settings_rejected")
    line = line_of(config, "    ttft: -1")
    assert f"{config}:{line}:" in refused["reason"]
    assert "weights.ttft" in refused["reason"]
    assert "mend the file" in refused["advice"]
    assert await router.metric("bidgate_settings_rejected") == 1
    assert (await router.ask("POST", "/v1/completions", "client", json=BODY)).status_code == 200
    put(config, "workers: [\n")
    assert f"{config}:2" in (await router.event("settings_rejected"))["reason"]
    write(good)
    await router.event("settings_applied")
    assert await router.metric("bidgate_settings_rejected") == 0
    router.process.send_signal(signal.SIGHUP)
    assert (await router.event("settings_applied"))["changed"] == []
    assert await router.metric("bidgate_settings_restart_pending") == 0


async def _the_operator_has_the_last_word(router: Router, second: str) -> None:
    workers = "/admin/v1/workers"

    async def listed() -> dict[str, dict[str, Any]]:
        answer = await router.ask("GET", workers, "admin")
        return {one["id"]: one for one in answer.json()["workers"]}

    name = second.partition("://")[2]
    assert (await listed())[name]["source"] == "static"
    for _ in range(2):
        answer = await router.ask("POST", f"{workers}/{name}/drain", "admin")
        assert answer.json()["workers"][0]["standing"] == "drained"
    for _ in range(4):
        answer = await router.ask("POST", "/v1/completions", "client", json=BODY)
        assert answer.headers["x-bidgate-worker"] != name
    await router.ask("POST", f"{workers}/{name}/resume", "admin")
    for _ in range(2):
        answer = await router.ask("DELETE", f"{workers}/{name}", "admin")
        assert answer.status_code == 202
    await router.event("worker_removed")
    assert name not in await listed()
    assert f'"{name}"' not in (await router.ask("GET", "/metrics")).text
    entry = {"url": second, "id": "back", "api_key": SECRETS["added"], "batch_limit": 3}
    for status in (201, 200):
        answer = await router.ask("POST", workers, "admin", json=entry)
        assert answer.status_code == status, answer.text
    assert (await listed())["back"]["source"] == "admin"
    for bad, status in (
        ({"url": "file:///etc/passwd"}, 400),
        ({"url": "http://169.254.169.254/latest"}, 400),
        ({"url": "http://me:you@a:1"}, 400),
        ({"url": second}, 409),
        ({"url": "http://a:1", "api_key": {"file": "/etc/hostname"}}, 400),
        ({"url": "http://a:1", "batch": 3}, 400),
        ({"url": "http://a:1", "batch_limit": 0}, 400),
        ([], 400),
    ):
        answer = await router.ask("POST", workers, "admin", json=bad)
        assert answer.status_code == status, (bad, answer.text)
        assert answer.json()["error"]["message"]
    assert (await router.ask("DELETE", f"{workers}/nobody", "admin")).status_code == 404
    assert (await router.ask("POST", f"{workers}/nobody/drain", "admin")).status_code == 404


async def test_authorities_of_clients_follow_their_file(
    tmp_path: Path, context: ssl.SSLContext
) -> None:
    old, new = trustme.CA(), trustme.CA()
    old.cert_pem.write_to_path(tmp_path / "ca.pem")
    old.issue_cert("client").configure_cert(context)
    settings = settings_of(tmp_path)
    settings["server"]["tls_client_ca_file"] = str(tmp_path / "ca.pem")
    config = tmp_path / "bidgate.yaml"
    config.write_text(yaml.safe_dump(settings))
    async with routing(config, context) as router:
        assert (await router.ask("GET", "/health")).status_code == 200
        new.cert_pem.write_to_path(tmp_path / "ca.pem")
        await router.event("settings_applied")
        # The connection that is open goes on; another one is refused, until the client is known.
        assert (await router.ask("GET", "/health")).status_code == 200
        url = router.client.base_url
        with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError, httpx.ConnectError)):
            async with httpx.AsyncClient(verify=context, trust_env=False) as client:
                await client.get(f"{url}/health")
        new.issue_cert("client").configure_cert(context)
        async with httpx.AsyncClient(verify=context, trust_env=False) as client:
            assert (await client.get(f"{url}/health")).status_code == 200
