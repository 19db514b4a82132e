"""Workers at https: a private authority, a certificate of bidgate's own, and its renewal."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from service.reload import Loaded
from service.secrets import noting_files
from service.settings import Settings
from service.settings_text import SettingsError
from service.tls import renew, worker_context
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
    transport = WorkerTransport(keepalive_s=4.0, tls=tls)
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
    tls = worker_context(fleet)
    assert tls is not None
    noting = Noting()
    worker = RawWorker(noting)
    async with worker.listening(of_a_worker(authority, asks=True)) as url:
        assert await ask(tls, url) == 200
        issue(authority, tmp_path, "new.internal")
        renew(tls, fleet)
        assert await ask(tls, url) == 200
        (tmp_path / "client.pem").write_text("no certificate")
        with pytest.raises(SettingsError, match=r"fleet\.worker_client_cert_file"):
            renew(tls, fleet)
        assert await ask(tls, url) == 200
    assert noting.names == ["old.internal", "new.internal", "new.internal"]


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
    with pytest.raises(ValueError, match="needs a worker_client_cert_file"):
        FleetConfig(worker_client_key_file=tmp_path / "client.key")
