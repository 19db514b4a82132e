"""Schemathesis against our own OpenAPI document, over real sockets: no 500, no hang."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import Case
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from service.app import build
from service.auth_settings import AuthConfig
from service.edge_config import EdgeConfig
from service.secrets import Secret
from service.settings import MockConfig, Settings
from service.surface import LIGHT, QUEUED
from tests.fuzz.conftest import examples
from tests.service.live import Live, mock, serving_mocks

ANSWER_S: Final = 20.0
STARTS_S: Final = 60.0
ADMIN: Final = "operator"
NOWHERE: Final = "http://127.0.0.1:9"
CHECKS: Final = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    response_headers_conformance,
]
TOKENS_MAX: Final = 8
INPUT: Final[dict[str, Any]] = {"input": ["a", "b"]}
PAIRS: Final[dict[str, Any]] = {"text_1": "a", "text_2": ["a", "b"]}
RANKED: Final[dict[str, Any]] = {"query": "a", "documents": ["b"]}
RIGHT: Final[dict[str, dict[str, Any]]] = {
    **{path: INPUT for path in ("/v1/embeddings", "/pooling", "/classify")},
    **{path: PAIRS for path in ("/score", "/v1/score")},
    **{path: RANKED for path in ("/rerank", "/v1/rerank", "/v2/rerank")},
    **{"/tokenize": {"prompt": "a"}, "/detokenize": {"tokens": [97]}},
}
"""What some bodies need to be served by a mock worker, whatever else is in them."""


class Running:
    """A service in a thread of its own, for a client that is not asynchronous."""

    def __init__(self) -> None:
        self.url = ""
        self.live: Live | None = None
        self._started = threading.Event()
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @contextmanager
    def serve(self) -> Iterator[Running]:
        """Serve until the block ends; then nothing may be held."""
        thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        thread.start()
        assert self._started.wait(STARTS_S)
        try:
            yield self
        finally:
            assert self._loop is not None
            assert self._stop is not None
            self._loop.call_soon_threadsafe(self._stop.set)
            thread.join(STARTS_S)

    def until_quiet(self) -> None:
        """Wait until no request is inside; the last answer may be read before its place is free."""
        assert self.live is not None
        until_s = time.monotonic() + ANSWER_S
        while self.live.service.held:
            assert time.monotonic() < until_s, "a request is still held"
            time.sleep(0.01)

    async def _run(self) -> None:
        self._stop, self._loop = asyncio.Event(), asyncio.get_running_loop()
        groups = {
            "edge": EdgeConfig(log_requests=False),
            "auth": AuthConfig(admin_key=Secret(ADMIN)),
        }
        mocks = [mock(time_scale=100.0), mock(time_scale=100.0)]
        async with serving_mocks(mocks, **groups) as live:
            self.url, self.live = live.url, live
            self._started.set()
            await self._stop.wait()


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with Running().serve() as running:
        yield running


DOCUMENT: Final = build(Settings(mock=MockConfig(workers=1))).openapi()
OPERATIONS: Final = [
    (method.upper(), path) for path, item in DOCUMENT["paths"].items() for method in item
]


def tamed(case: Case) -> Case:
    """Keep what would only take time, or leave this machine, out of a body."""
    body: Any = case.body
    if not isinstance(body, dict):
        return case
    if isinstance(body.get("url"), str) and "://" in body["url"]:
        # Of a worker that may serve any model, requests for unknown ones would wait.
        body |= {"url": NOWHERE, "models": ["elsewhere"]}
    if isinstance(body.get("max_tokens"), int):
        body["max_tokens"] = min(body["max_tokens"], TOKENS_MAX)
    elif case.method == "POST" and "url" not in body:
        body.setdefault("max_tokens", TOKENS_MAX)
    if isinstance(body.get("model"), str) and len(body["model"]) % 2 == 0:
        body |= {"model": "mock"} | RIGHT.get(case.operation.path, {})
    return case


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_every_answer_is_one_that_the_document_names(
    method: str, path: str, running: Running, tally: Counter[str]
) -> None:
    operation = schemathesis.openapi.from_dict(DOCUMENT)[path][method]

    @seed(0)
    @settings(
        max_examples=examples(4),
        deadline=None,
        database=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def answers(case: Case) -> None:
        headers = {"authorization": f"Bearer {ADMIN}"} if path.startswith("/admin/") else {}
        answer = tamed(case).call(base_url=running.url, headers=headers, timeout=ANSWER_S)
        tally[str(answer.status_code)] += 1
        case.validate_response(answer, checks=CHECKS)

    answers()
    running.until_quiet()


def test_the_document_has_every_route_that_is_served_by_name() -> None:
    paths = DOCUMENT["paths"]
    assert QUEUED.keys() | LIGHT <= paths.keys()
    assert {"/health", "/ready", "/metrics", "/v1/models", "/admin/v1/workers"} <= paths.keys()
