"""What an operator's script gets wrong: one clear answer each, and nothing is disturbed."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import orjson
import pytest
from structlog.testing import capture_logs

from service import admin
from service.auth_settings import AuthConfig
from service.edge_config import EdgeConfig
from service.secrets import Secret
from service.settings import ServerConfig
from tests.service.live import Live, mock, serving_mocks

WORKERS = "/admin/v1/workers"
HEADERS = {"authorization": "Bearer op", "content-type": "application/json"}
GROUPS = {"auth": AuthConfig(admin_key=Secret("op")), "server": ServerConfig(port=0)}
BAD: tuple[tuple[bytes, int], ...] = (
    (b"", 400),
    (b"{", 400),
    (b"\xff", 400),
    (b"null", 400),
    (b'"http://a:1"', 400),
    (b'{"url": null}', 400),
    (b'{"url": 5}', 400),
    (b'{"url": "http://a:1", "url": "file:///x"}', 400),
    (b'{"url": "http://a:1\\r\\nx: y"}', 400),
    (b'{"url": "http://a b"}', 400),
    (b'{"url": "http://a:1?x=y"}', 400),
    (b'{"url": "http://a:1", "id": ""}', 400),
    (b'{"url": "http://a:1", "id": "x\\r\\ny"}', 400),
    (b'{"url": "http://a:1", "id": "caf\xc3\xa9"}', 400),
    (b'{"url": "http://a:1", "api_key": "k\\ny"}', 400),
    (b'{"url": "http://a:1", "api_key": ""}', 400),
    (b'{"url": "http://a:1", "batch_limit": 1e400}', 400),
    (b'{"url": "http://a:1", "batch_limit": NaN}', 400),
    (b'{"url": "http://a:1", "batch_limit": -1}', 400),
    (b'{"url": "http://a:1", "batch_limit": 99999999999999999999999999}', 400),
    (b'{"url": "http://a:1", "kv_capacity_tokens": 1.5}', 400),
    (b'{"url": "http://a:1", "data_parallel_size": 1000000}', 400),
    (b'{"url": "http://a:1", "role": "boss"}', 400),
    (b'{"url": "http://a:1", "models": "m"}', 400),
    (b"[" * 60_000, 400),
    (b" " * (admin.BODY_BYTES_MAX + 1), 413),
)


async def ask(live: Live, method: str, path: str, body: bytes = b"") -> Any:
    return await live.client.request(method, live.url + path, content=body, headers=HEADERS)


async def test_a_body_that_describes_no_worker_adds_none() -> None:
    async with serving_mocks([mock()], **GROUPS) as live:
        for body, status in BAD:
            answer = await ask(live, "POST", WORKERS, body)
            assert answer.status_code == status, (body[:60], answer.text)
            error = answer.json()["error"]
            assert error["message"]
            assert "\n" not in error["message"]
        for method, path in (
            ("PUT", WORKERS),
            ("PATCH", f"{WORKERS}/a"),
            ("POST", f"{WORKERS}/a/explode"),
            ("DELETE", WORKERS),
            ("DELETE", f"{WORKERS}/"),
            ("POST", f"{WORKERS}//drain"),
            ("DELETE", f"{WORKERS}/%0d%0a"),
            ("DELETE", f"{WORKERS}/{'x' * 5000}"),
        ):
            answer = await ask(live, method, path)
            assert answer.status_code in (307, 404, 405), (method, path[:60], answer.text)
        listed = (await ask(live, "GET", WORKERS)).json()["workers"]
        assert [one["url"] for one in listed] == [*live.workers]


async def test_an_unknown_field_is_named_before_one_that_is_missing() -> None:
    async with serving_mocks([mock()], **GROUPS) as live:
        answer = await ask(live, "POST", WORKERS, b'{"urll": "http://a:1"}')
        assert "unknown setting urll; did you mean url?" in answer.json()["error"]["message"]


async def test_a_worker_behind_a_path_has_an_id_that_can_be_addressed() -> None:
    async with serving_mocks([mock()], **GROUPS) as live:
        url = "http://127.0.0.1:9/behind/a/path"
        added = await ask(live, "POST", WORKERS, b'{"url":"%s"}' % url.encode())
        assert added.status_code == 201
        (worker,) = added.json()["workers"]
        drained = await ask(live, "POST", f"{WORKERS}/{worker['id']}/drain")
        assert drained.json()["workers"][0]["standing"] == "drained"
        assert (await ask(live, "DELETE", f"{WORKERS}/{worker['id']}")).status_code == 202


async def test_a_body_that_does_not_come_is_a_408_and_one_whose_sender_left_is_no_bug(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(admin, "BODY_TIMEOUT_S", 0.3)
    head = (
        f"POST {WORKERS} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer op\r\n"
        "content-length: 90\r\n\r\n{"
    )
    async with serving_mocks([mock()], **GROUPS) as live:
        host, port = live.url.removeprefix("http://").rsplit(":", 1)
        for stays in (True, False):
            reader, writer = await asyncio.open_connection(host, int(port))
            with contextlib.closing(writer), capture_logs() as logs:
                writer.write(head.encode())
                if stays:
                    got = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10.0)
                    assert got.startswith(b"HTTP/1.1 408 ")
                else:
                    await asyncio.sleep(0.05)
                    writer.transport.abort()
                    await asyncio.sleep(0.1)
            assert not [line for line in logs if line["log_level"] == "error"]
    # The span exporter of an earlier test may still be giving up, in a thread of its own.
    ours = [record for record in caplog.records if not record.name.startswith("opentelemetry")]
    assert not [record for record in ours if record.levelname == "ERROR"]


def lines_of(logs: list[Any], event: str) -> list[tuple[Any, ...]]:
    return [
        (line["method"], line["path"], line["status"], line.get("reason", ""))
        for line in logs
        if line["event"] == event
    ]


@pytest.mark.parametrize("all_lines", [True, False])
async def test_who_asked_for_what_and_what_came_of_it_is_one_line_each(all_lines: bool) -> None:
    groups = GROUPS | {"edge": EdgeConfig(log_requests=all_lines)}
    with capture_logs() as logs:
        async with serving_mocks([mock()], **groups) as live:
            logs.clear()
            added = {"url": "http://127.0.0.1:9", "id": "late"}
            await ask(live, "POST", WORKERS, orjson.dumps(added))
            await ask(live, "GET", WORKERS)
            await ask(live, "POST", f"{WORKERS}/late/drain")
            await ask(live, "DELETE", f"{WORKERS}/nobody")
            await ask(live, "POST", WORKERS, b"{")
            await live.client.delete(f"{live.url}{WORKERS}/late")
            await ask(live, "DELETE", f"{WORKERS}/late")
            await ask(live, "GET", "/health")
    looks = [("GET", WORKERS, 200, "")] if all_lines else []
    assert lines_of(logs, "operator") == [
        ("POST", WORKERS, 201, ""),
        *looks,
        ("POST", f"{WORKERS}/late/drain", 200, ""),
        ("DELETE", f"{WORKERS}/nobody", 404, "no_such_worker"),
        ("POST", WORKERS, 400, "invalid_request_error"),
        ("DELETE", f"{WORKERS}/late", 401, "invalid_api_key"),
        ("DELETE", f"{WORKERS}/late", 202, ""),
    ]
    told = [line for line in logs if line["event"] == "operator"]
    assert all(line["client"].startswith("127.0.0.1:") and line["request_id"] for line in told)
    assert [line["workers"] for line in logs if line["event"] == "workers_added"] == [["late"]]
