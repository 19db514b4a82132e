"""Workers at https: a private authority, a certificate of bidgate's own, and its renewal."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
import yaml
from cryptography.hazmat.primitives import serialization
from pydantic import SecretStr

from service.cli import read_settings, run
from service.reload import Loaded
from service.secrets import noting_files
from service.settings import Settings
from service.settings_text import SettingsError
from service.tls import WorkerTls, worker_context
from service.worker_link import BROKEN, WorkerTransport
from service.worker_settings import FleetConfig
from tests.service.live import serving, until
from tests.service.raw_worker import Got, RawWorker, whole
from tests.service.stage import completion


@pytest.fixture
def authority(tmp_path: Path) -> trustme.CA:
    """The workers' own authority, trusted by no system."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    return authority


def of_a_worker(authority: trustme.CA, *, asks: bool = False, name: str = "127.0.0.1") -> Any:
    """TLS of a worker's listener; `asks` wants a certificate of its clients."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(name).configure_cert(context)
    if asks:
        context.verify_mode = ssl.CERT_REQUIRED
        authority.configure_trust(context)
    return context


def issue(authority: trustme.CA, folder: Path, name: str) -> None:
    """Write a client's certificate, and its key apart."""
    certificate = authority.issue_cert(name)
    certificate.private_key_pem.write_to_path(folder / "client.key")
    certificate.cert_chain_pems[0].write_to_path(folder / "client.pem")


def with_certificate(folder: Path) -> FleetConfig:
    return FleetConfig(
        worker_ca_file=folder / "ca.pem",
        worker_client_cert_file=folder / "client.pem",
        worker_client_key_file=folder / "client.key",
    )


async def hello(request: Got) -> None:
    request.writer.write(whole(200, b'{"choices":[]}'))


class Noting:
    """Answers, and keeps the names that its clients' certificates bear."""

    def __init__(self) -> None:
        self.names: list[str] = []

    async def __call__(self, request: Got) -> None:
        shown = request.writer.get_extra_info("peercert")
        self.names.append(shown["subjectAltName"][0][1])
        await hello(request)


async def ask(tls: ssl.SSLContext | None, url: str) -> int:
    """Ask over a connection of its own."""
    transport = WorkerTransport(keepalive_s=4.0, tls=lambda: tls)
    try:
        response = await transport.handle_async_request(httpx.Request("GET", f"{url}/v1/things"))
        await response.aread()
        await response.aclose()
        return response.status_code
    finally:
        await transport.aclose()


async def test_a_worker_behind_a_private_authority_is_watched_and_serves(
    authority: trustme.CA, tmp_path: Path
) -> None:
    worker = RawWorker(hello)
    fleet = FleetConfig(worker_ca_file=tmp_path / "ca.pem")
    async with worker.listening(of_a_worker(authority)) as url, serving([url], fleet=fleet) as live:
        for path in ("/v1/completions", "/v1/embeddings"):
            answer = await live.client.post(f"{live.url}{path}", json=completion())
            assert (answer.status_code, answer.content) == (200, b'{"choices":[]}')


async def test_a_worker_that_wants_a_certificate_gets_it(
    authority: trustme.CA, tmp_path: Path
) -> None:
    issue(authority, tmp_path, "bidgate.internal")
    noting = Noting()
    worker = RawWorker(noting)
    tls = of_a_worker(authority, asks=True)
    fleet = with_certificate(tmp_path)
    async with worker.listening(tls) as url, serving([url], fleet=fleet) as live:
        answer = await live.client.post(f"{live.url}/v1/completions", json=completion())
        assert answer.status_code == 200
        assert noting.names == ["bidgate.internal"]


async def test_without_a_certificate_such_a_worker_answers_nothing(
    authority: trustme.CA, tmp_path: Path
) -> None:
    worker = RawWorker(hello)
    tls = worker_context(FleetConfig(worker_ca_file=tmp_path / "ca.pem"))
    async with worker.listening(of_a_worker(authority, asks=True)) as url:
        with pytest.raises(BROKEN):
            await ask(tls, url)
    assert not worker.got


@pytest.mark.parametrize("why", ["unknown authority", "another private authority", "other name"])
async def test_a_worker_that_is_not_who_it_should_be_is_sent_nothing(
    authority: trustme.CA, tmp_path: Path, why: str
) -> None:
    name = "elsewhere.internal" if why == "other name" else "127.0.0.1"
    if why == "another private authority":
        trustme.CA().cert_pem.write_to_path(tmp_path / "ca.pem")
    ca_file = None if why == "unknown authority" else tmp_path / "ca.pem"
    tls = worker_context(FleetConfig(worker_ca_file=ca_file))
    assert (tls is None) == (why == "unknown authority")
    worker = RawWorker(hello)
    async with worker.listening(of_a_worker(authority, name=name)) as url:
        # Nothing was sent, so another worker may be tried.
        with pytest.raises(httpx.ConnectError):
            await ask(tls, url)
    assert not worker.got


async def test_a_renewed_certificate_is_shown_to_workers(
    authority: trustme.CA, tmp_path: Path
) -> None:
    issue(authority, tmp_path, "old.internal")
    fleet = with_certificate(tmp_path)
    tls = WorkerTls(fleet)
    noting = Noting()
    worker = RawWorker(noting)
    async with worker.listening(of_a_worker(authority, asks=True)) as url:
        assert await ask(tls.context, url) == 200
        issue(authority, tmp_path, "new.internal")
        tls.renew(fleet)
        assert await ask(tls.context, url) == 200
        (tmp_path / "client.pem").write_text("no certificate")
        with pytest.raises(SettingsError, match=r"fleet\.worker_client_cert_file"):
            tls.renew(fleet)
        assert await ask(tls.context, url) == 200
    assert noting.names == ["old.internal", "new.internal", "new.internal"]


@contextlib.asynccontextmanager
async def staying(tls: ssl.SSLContext) -> AsyncIterator[str]:
    """A worker that keeps connections and answers each request with its client's port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        port = f"{writer.get_extra_info('peername')[1]:05}".encode()
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n" + port)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    async with server:
        yield f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_an_authority_that_is_taken_out_is_trusted_no_more_though_connections_idle(
    authority: trustme.CA, tmp_path: Path
) -> None:
    successor = trustme.CA()
    old, new = (one.cert_pem.bytes() for one in (authority, successor))
    (tmp_path / "ca.pem").write_bytes(old + new)
    fleet = FleetConfig(worker_ca_file=tmp_path / "ca.pem")
    tls = WorkerTls(fleet)
    transport = WorkerTransport(keepalive_s=600.0, tls=lambda: tls.context)

    async def port_of_a_request(url: str) -> int:
        response = await transport.handle_async_request(httpx.Request("GET", f"{url}/v1/things"))
        port = int(await response.aread())
        await response.aclose()
        return port

    try:
        async with staying(of_a_worker(authority)) as url, staying(of_a_worker(successor)) as other:
            first = await port_of_a_request(url)
            tls.renew(fleet)
            assert await port_of_a_request(url) == first, "nothing changed, so nothing is new"
            (tmp_path / "ca.pem").write_bytes(new)
            tls.renew(fleet)
            with pytest.raises(httpx.ConnectError):
                await port_of_a_request(url)
            assert await port_of_a_request(other)
            await transport.aclose()
    finally:
        await transport.aclose()


async def test_a_running_service_trusts_an_authority_no_more_that_is_taken_out(
    authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.reload.LOOK_S", 0.5)
    worker = RawWorker(hello)
    fleet = FleetConfig(worker_ca_file=tmp_path / "ca.pem")
    async with (
        worker.listening(of_a_worker(authority)) as url,
        serving([url], fleet=fleet, reread=reread) as live,
    ):

        async def status() -> int:
            answer = await live.client.post(
                f"{live.url}/v1/completions", json=completion(), headers={"prefer": "if-available"}
            )
            return answer.status_code

        async def is_shut_out() -> bool:
            return await status() != 200

        assert await status() == 200
        trustme.CA().cert_pem.write_to_path(tmp_path / "ca.pem")
        await until(is_shut_out, within_s=30.0)
        authority.cert_pem.write_to_path(tmp_path / "ca.pem")

        async def is_back() -> bool:
            return await status() == 200

        await until(is_back, within_s=30.0)


PASSWORD = "pass phrase of the key"


def issue_with_password(authority: trustme.CA, folder: Path, name: str, password: str) -> None:
    """The same, with a key that is encrypted."""
    issue(authority, folder, name)
    key = serialization.load_pem_private_key((folder / "client.key").read_bytes(), None)
    sealed = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(password.encode()),
    )
    (folder / "client.key").write_bytes(sealed)


@pytest.mark.parametrize("named", ["env", "file"])
async def test_a_key_with_a_password_is_opened_and_the_password_shown_nowhere(
    authority: trustme.CA,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    named: str,
) -> None:
    issue_with_password(authority, tmp_path, "bidgate.internal", PASSWORD)
    (tmp_path / "password").write_text(PASSWORD + "\n")
    monkeypatch.setenv("KEY_PASSWORD", PASSWORD)
    password = {"env": "KEY_PASSWORD"} if named == "env" else {"file": str(tmp_path / "password")}
    settings = tmp_path / "b.yaml"
    named_settings = {
        "workers": ["https://127.0.0.1:1"],
        "fleet": {
            "worker_ca_file": str(tmp_path / "ca.pem"),
            "worker_client_cert_file": str(tmp_path / "client.pem"),
            "worker_client_key_file": str(tmp_path / "client.key"),
            "worker_client_key_password": password,
        },
        "server": {
            "tls_cert_file": str(tmp_path / "client.pem"),
            "tls_key_file": str(tmp_path / "client.key"),
            "tls_key_password": password,
        },
    }
    settings.write_text(yaml.safe_dump(named_settings))
    read = read_settings(["check-config", "--config", str(settings)])
    assert PASSWORD not in repr(read)
    noting = Noting()
    async with RawWorker(noting).listening(of_a_worker(authority, asks=True)) as url:
        assert await ask(worker_context(read.fleet), url) == 200
    assert noting.names == ["bidgate.internal"]
    assert read.server.tls_context() is not None
    for right in (True, False):
        if not right:
            monkeypatch.setenv("KEY_PASSWORD", "wrong, too")
            (tmp_path / "password").write_text("wrong, too")
        with pytest.raises(SystemExit) as stopped:
            run(["check-config", "--config", str(settings)])
        assert (stopped.value.code in (0, None)) is right
        said = "".join(capsys.readouterr())
        assert PASSWORD not in said
        assert "wrong, too" not in said


async def test_a_running_service_takes_a_renewed_key_with_its_new_password(
    authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.reload.LOOK_S", 0.5)
    passwords = [PASSWORD]
    issue_with_password(authority, tmp_path, "old.internal", passwords[-1])
    noting = Noting()

    def reread_with_password(settings: Settings) -> Loaded:
        secret = SecretStr(passwords[-1])
        fleet = dataclasses.replace(settings.fleet, worker_client_key_password=secret)
        return reread(settings.model_copy(update={"fleet": fleet}))

    fleet = dataclasses.replace(
        with_certificate(tmp_path), worker_client_key_password=SecretStr(PASSWORD)
    )
    async with (
        RawWorker(noting).listening(of_a_worker(authority, asks=True)) as url,
        serving([url], fleet=fleet, reread=reread_with_password) as live,
    ):

        async def is_new() -> bool:
            answer = await live.client.post(f"{live.url}/v1/completions", json=completion())
            assert answer.status_code == 200
            return noting.names[-1] == "new.internal"

        assert not await is_new()
        passwords.append("another")
        issue_with_password(authority, tmp_path, "new.internal", passwords[-1])
        await until(is_new, within_s=30.0)


def reread(settings: Settings) -> Loaded:
    """Check what the settings name, as the command does when a file changes."""
    with noting_files() as files:
        settings.check()
    return Loaded(settings=settings, files=frozenset(files))


async def test_a_running_service_notices_a_renewed_certificate(
    authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.reload.LOOK_S", 0.5)
    issue(authority, tmp_path, "old.internal")
    noting = Noting()
    worker = RawWorker(noting)
    fleet = with_certificate(tmp_path)
    async with (
        worker.listening(of_a_worker(authority, asks=True)) as url,
        serving([url], fleet=fleet, reread=reread) as live,
    ):

        async def shown() -> str:
            answer = await live.client.post(f"{live.url}/v1/completions", json=completion())
            assert answer.status_code == 200
            return noting.names[-1]

        async def is_new() -> bool:
            return await shown() == "new.internal"

        assert await shown() == "old.internal"
        issue(authority, tmp_path, "new.internal")
        await until(is_new, within_s=30.0)


@pytest.mark.parametrize(
    ("fleet", "words"),
    [
        ({"worker_ca_file": "/no/such/ca.pem"}, r"fleet\.worker_ca_file.*/no/such/ca\.pem"),
        ({"worker_client_cert_file": "/no/cert.pem"}, r"worker_client_cert_file.*/no/cert\.pem"),
    ],
)
def test_files_that_cannot_be_used_are_one_line(fleet: dict[str, str], words: str) -> None:
    settings = Settings(workers=("https://a:1",), fleet=fleet)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match=words):
        settings.check()


def test_a_key_without_its_certificate_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="need a worker_client_cert_file"):
        FleetConfig(worker_client_key_password=SecretStr("x"))
    with pytest.raises(ValueError, match="need a worker_client_cert_file"):
        FleetConfig(worker_client_key_file=tmp_path / "client.key")
