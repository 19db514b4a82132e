"""Reading settings again: what may change, what needs a restart, and when a file is looked at."""

from __future__ import annotations

import asyncio
import dataclasses
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import structlog
import trustme

from service import cli
from service.control.config import ControlConfig, PolicyName, Weights
from service.control.events import Arrived, Request, Start, WorkerJoined, WorkerSpec
from service.control.router import Router
from service.reload import LIVE, Loaded, Reloader, differing, is_live, with_old
from service.secrets import noting_files
from service.settings import ServerConfig, Settings, setting_names
from service.settings_text import SettingsError
from service.tls import Certificate, TlsVersion, server_context
from tests.service.live import until

WAIT_S = 30.0
WORKER = "workers: [http://a:1]\n"


@pytest.fixture(autouse=True)
def _files_are_looked_at_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change in the moment before the watch begins is only seen by the next look."""
    monkeypatch.setattr("service.reload.LOOK_S", 0.5)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A settings file that names one worker and nothing else."""
    return write(tmp_path / "b.yaml", WORKER)


def loader(path: Path) -> Callable[[], Loaded]:
    """As the command reads its file."""

    def load() -> Loaded:
        with noting_files() as files:
            settings = cli.read_settings(["serve", "--config", str(path)])
            settings.check()
        return Loaded(settings=settings, files=frozenset(files))

    return load


@dataclasses.dataclass
class Followed:
    """A reloader at work, the file it reads and what it applied."""

    reloader: Reloader
    file: Path
    applied: list[Settings] = dataclasses.field(default_factory=list)

    async def until(self, condition: Callable[[], bool]) -> None:
        await until(condition, within_s=WAIT_S)

    async def take(self, rest: str) -> Settings:
        """Write the worker and the rest into the file, and wait for what is applied of it."""
        count = len(self.applied)
        write(self.file, WORKER + rest)
        await self.until(lambda: len(self.applied) > count)
        assert len(self.applied) == count + 1
        return self.applied[-1]


@asynccontextmanager
async def following(path: Path) -> AsyncIterator[Followed]:
    load = loader(path)
    applied: list[Settings] = []
    reloader = Reloader(load(), load, applied.append, structlog.get_logger())
    task = asyncio.create_task(reloader.run())
    try:
        yield Followed(reloader, path, applied)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_change_is_applied_and_a_bad_one_keeps_what_there_is(file: Path) -> None:
    async with following(file) as followed:
        write(file, "workers: [http://a:1, http://b:2]\n")
        await followed.until(lambda: len(followed.applied) == 1)
        assert len(followed.applied[-1].workers) == 2
        for bad in (
            "workers: [ftp://b]\n",
            "workers: [\n",
            "workers: []\n",
            "wrkers: [http://a]\n",
        ):
            before = followed.reloader.stats().rejections
            write(file, bad)
            await followed.until(lambda n=before: followed.reloader.stats().rejections > n)
            assert followed.reloader.stats().rejected
        assert len(followed.applied) == 1
        write(file, "workers: [http://c:1]\n")
        await followed.until(lambda: len(followed.applied) == 2)
        assert not followed.reloader.stats().rejected


async def test_a_file_that_is_swapped_in_as_kubernetes_does_is_noticed(tmp_path: Path) -> None:
    for number, url in enumerate(("http://a:1", "http://b:2")):
        (tmp_path / f"..{number}").mkdir()
        write(tmp_path / f"..{number}" / "b.yaml", f"workers: ['{url}']\n")
    (tmp_path / "..data").symlink_to("..0")
    file = tmp_path / "b.yaml"
    file.symlink_to("..data/b.yaml")
    async with following(file) as followed:
        (tmp_path / "..tmp").symlink_to("..1")
        (tmp_path / "..tmp").rename(tmp_path / "..data")
        await followed.until(lambda: bool(followed.applied))
    assert followed.applied[0].worker_configs()[0].url == "http://b:2"


async def test_a_secret_in_a_file_of_its_own_is_followed_too(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    secret = write(tmp_path / "elsewhere" / "key", "one")
    text = f"{WORKER}edge: {{api_key: {{file: {secret}}}}}\n"
    async with following(write(tmp_path / "b.yaml", text)) as followed:
        write(secret, "two")
        await followed.until(lambda: bool(followed.applied))
    (key,) = followed.applied[0].client_keys()
    assert key.key is not None
    assert key.key.get_secret_value() == "two"


async def test_what_needs_a_restart_keeps_its_value_and_is_named(file: Path) -> None:
    with structlog.testing.capture_logs() as log:
        async with following(file) as followed:
            settings = await followed.take(
                "server: {port: 9}\ncontrol: {kernel: decode_only, seed: 3, queue_max: 5}\n"
                "forward: {keepalive_s: 3, retries_max: 1}\n"
            )
            pending = followed.reloader.stats().restart_pending
    assert pending == ("server.port", "forward.keepalive_s", "control.kernel", "control.seed")
    assert settings.server.port == ServerConfig().port
    assert (settings.control.seed, settings.control.queue_max) == (0, 5)
    assert (settings.forward.keepalive_s, settings.forward.retries_max) == (4.0, 1)
    named = [line for line in log if line["event"] == "settings_need_restart"]
    assert [line["settings"] for line in named] == [list(pending)]


async def test_shares_affinity_tails_and_sessions_change_without_a_restart(file: Path) -> None:
    async with following(file) as followed:
        settings = await followed.take(
            "edge: {session_headers: x-talk}\n"
            "control: {tenants: {weights: 'a=3,*=1', memory_s: 5}, affinity: {weight: 2,"
            " crowding: 0.1}, slow_start_s: 1, weights: {tail_ttft: 7, ttft_bound_s: 2}}\n"
        )
        assert followed.reloader.stats().restart_pending == ()
    control = settings.control
    assert (control.tenants.weights, control.tenants.memory_s) == ("a=3,*=1", 5.0)
    assert (control.affinity.weight, control.affinity.crowding) == (2.0, 0.1)
    assert (control.slow_start_s, control.weights.tail_ttft) == (1.0, 7.0)
    assert settings.edge.session_headers == "x-talk"


async def test_settings_that_only_a_restart_brings_are_kept_together(file: Path) -> None:
    """One by one they would not pass their own check: a bucket longer than the horizon."""
    async with following(file) as followed:
        settings = await followed.take(
            "control: {horizon_iterations: 8192, bucket_iterations: 8192, queue_max: 7}\n"
        )
        assert followed.reloader.stats().restart_pending == (
            "control.horizon_iterations",
            "control.bucket_iterations",
        )
    assert settings.control == ControlConfig(queue_max=7)


async def test_a_change_that_only_a_restart_could_bring_is_rejected_and_the_next_is_not(
    file: Path,
) -> None:
    """More tenants with a weight than the old tracked_max has room for."""
    many = ",".join(f"t{number}=1" for number in range(300))
    with structlog.testing.capture_logs() as log:
        async with following(file) as followed:
            tenants = f"{{tracked_max: 512, weights: '{many}'}}"
            write(file, f"{WORKER}control: {{tenants: {tenants}}}\n")
            await followed.until(lambda: followed.reloader.stats().rejected)
            await followed.take("control: {tenants: {weights: 'a=2'}}\n")
            assert not followed.reloader.stats().rejected
    (said,) = [line for line in log if line["event"] == "settings_rejected"]
    assert "control.tenants.tracked_max" in said["reason"]
    assert "restart" in said["advice"]


def test_every_live_name_is_a_setting_or_a_group_of_them() -> None:
    names = set(setting_names())
    for live in LIVE:
        assert any(name == live or name.startswith(f"{live}.") for name in names), live
    assert not is_live("server.port")
    assert not is_live("control.kernel")
    assert is_live("control.weights.ttft")
    assert not is_live("edge.some_future_setting")


def test_settings_differ_by_leaves_and_old_values_can_be_kept() -> None:
    old = Settings(control=ControlConfig(queue_max=1))
    weights = Weights(ttft=3.0)
    new = Settings(control=ControlConfig(queue_max=2, seed=4, weights=weights))
    assert set(differing(old, new)) == {
        "control.queue_max",
        "control.seed",
        "control.weights.ttft",
    }
    kept = with_old(old, new, ["control.seed", "control.weights.ttft"])
    assert kept.control == ControlConfig(queue_max=2)
    assert not differing(old, with_old(old, new, differing(old, new)))


def test_the_router_takes_new_settings_and_forgets_no_request() -> None:
    config = ControlConfig(policy=PolicyName.CENTRAL_FCFS)
    router = Router(config)
    router.handle(WorkerJoined(WorkerSpec(worker_id="w", batch_limit=1)), 0.0)
    for name in ("a", "b"):
        request = Request(request_id=name, arrival_s=0.0, prompt_tokens=8, decode_tokens_limit=8)
        assert router.handle(Arrived(request), 0.0) == []
    assert [type(command) for command in router.tick(0.0)] == [Start]
    router.reconfigure(
        dataclasses.replace(
            config, policy=PolicyName.ONLINE_LP, weights=Weights(ttft=5.0), queue_max=1, seed=9
        )
    )
    stats = router.stats(0.1)
    assert (stats.entered, stats.waiting, stats.running) == (2, 1, 1)
    assert router.tick(0.1) == []
    assert router.stats(0.1).fallback_ticks == 0
    late = Request(request_id="c", arrival_s=0.2, prompt_tokens=8)
    (refused,) = router.handle(Arrived(late), 0.2)
    assert "1 requests are waiting already" in refused.detail  # type: ignore[union-attr]


def test_a_mistake_says_file_line_and_field(tmp_path: Path) -> None:
    file = write(
        tmp_path / "b.yaml",
        "# comment\nworkers:\n  - http://a:1\n  - url: http://b:2\n    batch_limit: many\n",
    )
    with pytest.raises(SettingsError) as refused:
        cli.read_settings(["serve", f"--config={file}"])
    assert str(refused.value).startswith(f"{file}:5: workers.1.batch_limit: ")


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "b.yaml", "workers: [http://a:1]\nworkers: [http://b:2]\n")
    with pytest.raises(SettingsError, match=r"b\.yaml:2: .*workers stands twice"):
        cli.read_settings(["serve", "--config", str(file)])


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> str | None:
    """Do a TLS handshake in memory; returns the version."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = server.wrap_bio(to_server, to_client, server_side=True)
    theirs = client.wrap_bio(to_client, to_server, server_hostname="127.0.0.1")
    for _ in range(10):
        for side in (theirs, ours):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return ours.version()


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


def a_certificate(authority: trustme.CA, folder: Path) -> Certificate:
    pem = authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem
    pem.write_to_path(folder / "both.pem")
    return Certificate(folder / "both.pem", None, None)


def test_old_protocols_are_refused(authority: trustme.CA, tmp_path: Path) -> None:
    certificate = a_certificate(authority, tmp_path)
    client = ssl.create_default_context()
    authority.configure_trust(client)
    strict = server_context(certificate, TlsVersion.TLS_1_3, None)
    assert shake_hands(strict, client) == "TLSv1.3"
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError):
        shake_hands(strict, client)
    lax = server_context(certificate, TlsVersion.TLS_1_2, None)
    assert shake_hands(lax, client) == "TLSv1.2"


def test_clients_may_have_to_show_a_certificate(authority: trustme.CA, tmp_path: Path) -> None:
    certificate = a_certificate(authority, tmp_path)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    server = server_context(certificate, TlsVersion.TLS_1_2, tmp_path / "ca.pem")
    client = ssl.create_default_context()
    authority.configure_trust(client)
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError):
        shake_hands(server, client)
    authority.issue_cert("client").configure_cert(client)
    assert shake_hands(server, client) == "TLSv1.2"


def test_a_renewed_certificate_is_used_and_a_broken_one_is_not(
    authority: trustme.CA, tmp_path: Path
) -> None:
    server = server_context(a_certificate(authority, tmp_path), TlsVersion.TLS_1_2, None)
    another = trustme.CA()
    a_certificate(another, tmp_path).load(server)
    client = ssl.create_default_context()
    another.configure_trust(client)
    assert shake_hands(server, client) == "TLSv1.3"
    write(tmp_path / "both.pem", "no certificate")
    with pytest.raises(SettingsError, match=r"both\.pem"):
        Certificate(tmp_path / "both.pem", None, None).load(server)
    assert shake_hands(server, client) == "TLSv1.3"


@pytest.mark.parametrize(
    ("server", "words"),
    [
        ("{tls_key_file: /k}", "tls_cert_file"),
        ("{tls_cert_file: /no/such/cert.pem}", "/no/such/cert.pem"),
        ("{tls_min_version: '1.1'}", "tls_min_version"),
    ],
)
def test_tls_that_cannot_work_refuses_to_start(tmp_path: Path, server: str, words: str) -> None:
    file = write(tmp_path / "b.yaml", f"{WORKER}server: {server}\n")
    with pytest.raises(SettingsError, match=words):
        cli.read_settings(["serve", "--config", str(file)]).check()
