"""Clients' keys: who is let in, and whom a key stands for; no key is ever shown."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from pydantic import SecretStr

from service.auth_settings import AuthConfig, ClientKey, client_keys
from service.errors import UnauthorizedError
from service.settings import Settings
from service.settings_text import SettingsError
from tests.service.doors import a_door, a_key, bearer, knock, run_stage
from tests.service.stage import HandlerTransport, Stage, completion


def test_without_keys_everything_but_admin_is_open() -> None:
    door = a_door()
    assert knock(door, "/v1/completions", None) == 200
    assert knock(door, "/scarcity", None) == 200
    assert knock(door, "/admin/v1/workers", None) == 404
    assert knock(door, "/admin/v1/workers", "any") == 404


@pytest.mark.parametrize(
    "path",
    ["/v1/completions", "/v1/models", "/scarcity", "/version", "/docs", "/openapi.json", "/"],
)
def test_with_keys_every_route_but_health_needs_one(path: str) -> None:
    door = a_door(a_key("one"))
    assert [knock(door, path, key, "GET") for key in (None, "", "on", "onee", "one")] == [
        *[401] * 4,
        200,
    ]


def test_health_is_open_and_metrics_as_configured() -> None:
    key = a_key("one")
    door = a_door(key)
    assert knock(door, "/metrics", None, "GET") == 200
    closed = a_door(key, metrics_open=False)
    assert knock(closed, "/metrics", None, "GET") == 401
    assert knock(closed, "/metrics", "one", "GET") == 200


PROBED = ("/health", "/healthz", "/live", "/livez", "/liveness", "/ping")


READINESS = ("/ready", "/readyz", "/readiness")


@pytest.mark.parametrize("path", [*PROBED, *READINESS])
def test_whatever_answers_probes_needs_no_key(path: str) -> None:
    methods = ("GET", "HEAD", "POST") if path == "/ping" else ("GET", "HEAD")

    async def scenario(stage: Stage, worker: HandlerTransport) -> None:
        for method in methods:
            assert (await stage.send(method, path)).status == 200
            assert (await stage.send(method, path, headers=bearer("wrong"))).status == 200
        assert not worker.requests

    run_stage((a_key("one"),), scenario)


def test_no_path_is_open_but_those_of_probes() -> None:
    async def scenario(stage: Stage, worker: HandlerTransport) -> None:
        documented = set(stage.inner.openapi()["paths"])
        assert {"/metrics", "/v1/models", "/scarcity", "/load", "/version"} < documented
        own = documented | {*PROBED, *READINESS, "/docs", "/redoc", "/openapi.json", "/nowhere"}
        opened = {path for path in own if (await stage.send("GET", path)).status != 401}
        assert opened == {*PROBED, *READINESS, "/metrics"}

    run_stage((a_key("one"),), scenario)


def test_the_admin_key_opens_admin_and_nothing_else() -> None:
    door = a_door(a_key("client"), admin_key=SecretStr("boss"))
    assert knock(door, "/admin/v1/workers", "client") == 401
    assert knock(door, "/admin/v1/workers", None) == 401
    assert knock(door, "/admin/v1/workers", "boss") == 200
    assert knock(door, "/v1/completions", "boss") == 401


def test_a_key_may_be_known_by_its_digest_only() -> None:
    digest = hashlib.sha256(b"one").hexdigest()
    door = a_door(ClientKey(key_sha256=digest))
    assert knock(door, "/v1/completions", "one") == 200
    assert knock(door, "/v1/completions", digest) == 401


@pytest.mark.parametrize(
    "headers",
    [
        [(b"authorization", b"Bearer one")],
        [(b"authorization", b"bearer  one ")],
        [(b"x-api-key", b"one")],
    ],
)
def test_a_key_may_come_in_any_clients_way(headers: list[tuple[bytes, bytes]]) -> None:
    door = a_door(a_key("one", tenant="t"))
    assert door.admit("/v1/completions", headers, 0.0, limited=True).tenant == "t"


@pytest.mark.parametrize("value", [b"one", b"Basic one", b"Bearer", b"Bearer \xff\xfe", b""])
def test_a_garbled_credential_is_a_401(value: bytes) -> None:
    door = a_door(a_key("one"))
    with pytest.raises(UnauthorizedError):
        door.admit("/v1/completions", [(b"authorization", value)], 0.0, limited=True)


def test_every_key_is_compared_whichever_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []
    import service.auth

    def count(digest: bytes, sent: bytes) -> bool:
        compared.append(digest)
        return digest == sent

    monkeypatch.setattr(service.auth.hmac, "compare_digest", count)
    door = a_door(*(a_key(f"key-{i}") for i in range(5)))
    for key in ("key-0", "key-4", "none"):
        compared.clear()
        knock(door, "/v1/completions", key)
        assert len(compared) == 5


def test_a_refusal_has_openais_shape_and_the_key_goes_no_further() -> None:
    async def scenario(stage: Stage, worker: HandlerTransport) -> None:
        refused = await stage.post(completion(), headers=bearer("wrong"))
        assert (refused.status, refused.error["type"]) == (401, "authentication_error")
        assert refused.header("x-request-id")
        served = await stage.post(completion(), headers=bearer("one") | {"x-api-key": "one"})
        assert served.status == 200
        (request,) = worker.requests
        assert "authorization" not in request.headers
        assert "x-api-key" not in request.headers

    run_stage((a_key("one"),), scenario)


def test_whom_a_key_stands_for_is_not_for_its_holder_to_say() -> None:
    tenants: list[str] = []

    async def scenario(stage: Stage, worker: HandlerTransport) -> None:
        placed = stage.placed()
        header = {"x-bidgate-tenant": "someone-else"}
        await stage.post(completion(), headers=bearer("one") | header)
        await stage.post(completion(), headers=bearer("two") | header)
        tenants.extend(request.tenant for request in placed)

    run_stage((a_key("one", tenant="team"), a_key("two")), scenario)
    assert tenants == ["team", "someone-else"]


def test_keys_may_come_from_a_file_the_environment_or_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_text("from-file\n")
    monkeypatch.setenv("SOME_KEY", "from-env")
    listed = tmp_path / "keys.yaml"
    listed.write_text(
        f"- {{key: written, tenant: a, requests_max: 3}}\n"
        f"- {{key: {{file: {tmp_path / 'secret'}}}}}\n"
        f"- {{key: {{env: SOME_KEY}}}}\n"
    )
    monkeypatch.setenv("BIDGATE_AUTH__KEYS", '[{"key": "in-a-variable"}]')
    settings = Settings(auth={"keys_file": listed}, edge={"api_key": "plain"})  # type: ignore[arg-type]
    door = a_door(*settings.client_keys())
    keys = ("in-a-variable", "written", "from-file", "from-env", "plain")
    assert {knock(door, "/v1/completions", key) for key in keys} == {200}
    shown = f"{settings!r} {settings} {settings.client_keys()!r} {settings.model_dump()}"
    assert not [key for key in keys if key in shown.replace("'plain", "")]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- {key: s3cret, tenannt: a}", ("keys.yaml:1:", "tenannt", "tenant")),
        ("- {tenant: a}", ("keys.yaml:1", "either key or key_sha256")),
        ("- {key: s3cret}\n- {key: s3cret, requests_max: -1}", ("keys.yaml:2", "requests_max")),
        ("- {key_sha256: s3cret}", ("keys.yaml:1", "64 hexadecimal")),
        ("- {key: {env: NO_SUCH_VARIABLE}}", ("keys.yaml:1", "NO_SUCH_VARIABLE")),
        ("- {key: {file: /nope}}", ("keys.yaml:1", "/nope")),
        ("- {key: ''}", ("keys.yaml:1", "empty")),
        ("- {key: [s3cret]}", ("keys.yaml:1",)),
        ("- {key: s3cret, key: two}", ("keys.yaml:1", "twice")),
        ("s3cret", ("keys.yaml",)),
    ],
)
def test_a_bad_file_of_keys_is_one_line_that_shows_no_key(
    tmp_path: Path, text: str, words: tuple[str, ...]
) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError) as refused:
        client_keys(AuthConfig(keys_file=path))
    line = str(refused.value)
    assert "\n" not in line
    assert all(word in line for word in words)
    assert "s3cret" not in line
