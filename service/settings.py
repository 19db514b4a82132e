"""The settings: one frozen model, read once. Flags > environment BIDGATE_* > YAML file > defaults.

Every group is the plain dataclass of the part it configures, so a knob is named in one place.
Here are the groups of the process itself and the sources; errors in words are settings_text.py's.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Final, get_type_hints

from cyclopts import Group, Parameter
from pydantic import Field, field_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from service.auth_settings import AuthConfig, ClientKey, client_keys, refuse_repeated
from service.control.config import ControlConfig
from service.control.events import Role
from service.discovery.config import (
    DiscoveryConfig,
    DnsConfig,
    KubernetesConfig,
    require_kubernetes,
)
from service.edge_config import EdgeConfig
from service.fleet_types import WatchConfig
from service.forward_config import ForwardConfig
from service.light import LightConfig
from service.logs import LogFormat, LogLevel
from service.mock.profiles import LLAMA_3_8B_A100, PROFILES
from service.open_files import files_needed
from service.queue_stats import QueueConfig
from service.secrets import Secret
from service.settings_text import SettingsError, listed, nearest, read_yaml
from service.tls import Certificate, TlsVersion, server_context, worker_context
from service.tracing_config import TracingConfig, require_otel
from service.worker_config import WorkerConfig
from service.worker_settings import FleetConfig, WorkerEntry, WorkerLists, WorkerSettings

ENV_PREFIX: Final = "BIDGATE_"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where bidgate listens and how it stops.

    Attributes:
        host: address to listen on.
        port: port to listen on; 0 lets the system choose.
        log_format: text for people, json for machines.
        log_level: the least severe lines that are written.
        client_keepalive_s: idle connections of clients are closed after this many seconds.
        head_bytes_max: longest first line and headers of a request; longer is a 431.
        head_timeout_s: longest time they may take to arrive, from the first byte or the opening of
            the connection.
        drain_s: on SIGTERM, how many seconds queued and running requests may take to end.
        tls_cert_file: PEM certificate, with those between it and the root; then https is served.
        tls_key_file: PEM private key; left out when it stands in tls_cert_file.
        tls_key_password: of the private key.
        tls_min_version: oldest TLS that clients may use.
        tls_client_ca_file: PEM; with it, clients must show a certificate signed by one of these.
    """

    host: str = "127.0.0.1"
    port: int = 8001
    log_format: LogFormat = LogFormat.TEXT
    log_level: LogLevel = LogLevel.INFO
    client_keepalive_s: int = 75
    head_bytes_max: int = 64 * 1024
    head_timeout_s: float = 15.0
    drain_s: float = 30.0
    tls_cert_file: Path | None = None
    tls_key_file: Path | None = None
    tls_key_password: Secret | None = None
    tls_min_version: Annotated[
        TlsVersion, Parameter(choices=tuple(each.value for each in TlsVersion), show_default=str)
    ] = TlsVersion.TLS_1_2
    tls_client_ca_file: Path | None = None

    def __post_init__(self) -> None:
        """Refuse ports and times that are none."""
        if not self.host:
            raise ValueError("host must not be empty; 0.0.0.0 listens on every address")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be in 0..65535, got {self.port}")
        if self.client_keepalive_s < 1 or self.drain_s < 0:
            raise ValueError("client_keepalive_s must be at least 1 and drain_s at least 0")
        if self.head_bytes_max < 1024 or not self.head_timeout_s > 0:
            raise ValueError("head_bytes_max must be at least 1024, head_timeout_s positive")
        others = self.tls_key_file or self.tls_key_password or self.tls_client_ca_file
        if self.tls_cert_file is None and others:
            raise ValueError(
                "tls_key_file, tls_key_password and tls_client_ca_file need a tls_cert_file"
            )

    def certificate(self) -> Certificate | None:
        """The listener's certificate; None where plain HTTP is served."""
        if self.tls_cert_file is None:
            return None
        password = self.tls_key_password
        return Certificate(
            self.tls_cert_file,
            self.tls_key_file,
            None if password is None else password.get_secret_value(),
        )

    def tls_context(self) -> ssl.SSLContext | None:
        """TLS of the listener; None where plain HTTP is served.

        Raises:
            SettingsError: a file cannot be used.
        """
        certificate = self.certificate()
        if certificate is None:
            return None
        return server_context(certificate, self.tls_min_version, self.tls_client_ca_file)


@dataclass(frozen=True, slots=True, kw_only=True)
class MockConfig:
    """Mock workers inside this process, to try bidgate without GPUs.

    Attributes:
        workers: how many.
        prefill_workers: how many more that only compute prompts; the others then fetch these.
        profile: whose iteration times they have.
        batch_limit: their --max-num-seqs.
        time_scale: above 1 they run faster than real time.
    """

    workers: Annotated[int, Parameter(name="--mock")] = 0
    prefill_workers: Annotated[int, Parameter(name="--mock-prefill")] = 0
    profile: Annotated[str, Parameter(name="--mock-profile")] = LLAMA_3_8B_A100.name
    batch_limit: Annotated[int, Parameter(name="--mock-batch-limit")] = 32
    time_scale: Annotated[float, Parameter(name="--mock-time-scale")] = 1.0

    def __post_init__(self) -> None:
        """Refuse unknown profiles and impossible sizes."""
        if not 0 <= self.workers <= 64:
            raise ValueError(f"workers must be in 0..64, got {self.workers}")
        if not 0 <= self.prefill_workers <= 64:
            raise ValueError(f"prefill_workers must be in 0..64, got {self.prefill_workers}")
        if self.profile not in PROFILES:
            raise ValueError(f"profile must be one of {', '.join(PROFILES)}, got {self.profile}")
        if self.batch_limit < 1 or not self.time_scale > 0:
            raise ValueError("batch_limit must be at least 1 and time_scale positive")


class Settings(BaseSettings):
    """Everything an operator can set."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
    )

    config: Annotated[
        Path | None,
        Parameter(group=Group("Settings", sort_key=0)),
        Field(description="YAML file with settings; flags and environment win over it."),
    ] = None
    workers: Annotated[
        tuple[WorkerEntry, ...],
        NoDecode,
        Parameter(
            group=Group("Workers", sort_key=1), consume_multiple=True, negative="", metavar="URL..."
        ),
        Field(description="Base URLs of the workers: http://a:8000 http://b:8000."),
    ] = ()
    prefill_workers: Annotated[
        tuple[str, ...],
        NoDecode,
        Parameter(
            group=Group("Workers", sort_key=1), consume_multiple=True, negative="", metavar="URL..."
        ),
        Field(description="Base URLs of workers that only compute prompts (role: prefill)."),
    ] = ()
    decode_workers: Annotated[
        tuple[str, ...],
        NoDecode,
        Parameter(
            group=Group("Workers", sort_key=1), consume_multiple=True, negative="", metavar="URL..."
        ),
        Field(description="Base URLs of workers that fetch what was prefilled (role: decode)."),
    ] = ()
    fleet: Annotated[FleetConfig, Parameter(name="*", group=Group("Workers", sort_key=1))] = (
        FleetConfig()
    )
    discovery: Annotated[
        DiscoveryConfig, Parameter(name="*", group=Group("Workers", sort_key=1))
    ] = DiscoveryConfig()
    mock: Annotated[MockConfig, Parameter(name="*", group=Group("Mock workers", sort_key=2))] = (
        MockConfig()
    )
    server: Annotated[ServerConfig, Parameter(name="*", group=Group("Server", sort_key=3))] = (
        ServerConfig()
    )
    auth: Annotated[AuthConfig, Parameter(name="*", group=Group("Keys", sort_key=4))] = AuthConfig()
    edge: Annotated[EdgeConfig, Parameter(name="*", group=Group("Requests", sort_key=4))] = (
        EdgeConfig()
    )
    forward: Annotated[ForwardConfig, Parameter(name="*", group=Group("Relaying", sort_key=5))] = (
        ForwardConfig()
    )
    watch: Annotated[
        WatchConfig, Parameter(name="*", group=Group("Watching workers", sort_key=6))
    ] = WatchConfig()
    light: Annotated[LightConfig, Parameter(name="*", group=Group("Requests", sort_key=4))] = (
        LightConfig()
    )
    tracing: Annotated[TracingConfig, Parameter(name="*", group=Group("Tracing", sort_key=8))] = (
        TracingConfig()
    )
    queue: Annotated[QueueConfig, Parameter(name="*", group=Group("Decision", sort_key=7))] = (
        QueueConfig()
    )
    control: Annotated[ControlConfig, Parameter(name="*", group=Group("Decision", sort_key=7))] = (
        ControlConfig()
    )

    @field_validator("workers", "prefill_workers", "decode_workers", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        """Accept one string with commas or spaces between, or JSON, as the environment gives it."""
        return listed(value)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags, then environment, then the file that either of them names."""
        path = init_settings().get("config") or os.environ.get(f"{ENV_PREFIX}CONFIG")
        if not path:
            return init_settings, env_settings
        return (
            init_settings,
            env_settings,
            InitSettingsSource(settings_cls, _read_settings_file(Path(path))),
        )

    def worker_configs(self) -> tuple[WorkerConfig, ...]:
        """The configured workers, ranks apart, with the fleet's values where they have none.

        Raises:
            SettingsError: a URL is none, a name is given twice, or there is no worker at all.
        """
        workers = WorkerLists(
            workers=self.workers,
            prefill_workers=self.prefill_workers,
            decode_workers=self.decode_workers,
            file=self.config,
        ).configs(self.fleet)
        if not workers and not self.mock.workers and not self._finds_workers:
            raise SettingsError("no workers: give --workers URL... or --mock N")
        self._check_roles(workers)
        return workers

    def _check_roles(self, workers: tuple[WorkerConfig, ...]) -> None:
        """Refuse half a pair: prefills that nobody fetches, decode workers nobody prefills for."""
        if self._finds_workers:
            return
        roles = {worker.role for worker in workers}
        if self.mock.workers:
            roles.add(Role.DECODE if self.mock.prefill_workers else Role.BOTH)
        if self.mock.prefill_workers:
            roles.add(Role.PREFILL)
        for one, other in ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)):
            if one in roles and other not in roles:
                raise SettingsError(
                    f"workers: there are {one} workers and no {other} workers; give"
                    f" --{other}-workers URL... or another role"
                )

    def client_keys(self) -> tuple[ClientKey, ...]:
        """Every client's key, that of `edge.api_key` among them.

        Raises:
            SettingsError: the file of keys cannot be used, or a key stands twice.
        """
        plain = () if self.edge.api_key is None else (ClientKey(key=self.edge.api_key),)
        keys = (*client_keys(self.auth), *plain)
        refuse_repeated(keys)
        return keys

    def check(self) -> None:
        """Read everything that the settings name, as the service would.

        Raises:
            SettingsError: something of it cannot be used.
        """
        self.worker_configs()
        self.client_keys()
        self.server.tls_context()
        worker_context(self.fleet)
        if self.discovery.kubernetes:
            require_kubernetes()
        if self.tracing.enabled:
            require_otel()

    @property
    def _finds_workers(self) -> bool:
        """Whether workers may come later: from a source, or from the operator."""
        return not self.discovery.is_empty or self.auth.admin_key is not None

    def open_files_needed(self) -> int:
        """Files this process may have to hold open at once."""
        workers = self.worker_configs()
        slots = sum(worker.batch_limit for worker in workers)
        slots += 2 * self.mock.workers * self.mock.batch_limit
        return files_needed(
            queue_max=self.control.queue_max,
            slots=slots,
            workers=len(workers) + 2 * self.mock.workers,
        )


def check_environment(environ: Mapping[str, str]) -> None:
    """Refuse BIDGATE_ variables that no setting has; pydantic-settings would ignore them.

    Raises:
        SettingsError: names each variable and the nearest known one.
    """
    known = {ENV_PREFIX + name.upper().replace(".", "__") for name in setting_names()}
    # A whole group as JSON is a way to set it, and pydantic checks what is inside.
    known |= {ENV_PREFIX + name.upper() for name in Settings.model_fields}
    unknown = [
        f"unknown setting {name}{nearest(name.upper(), known)}"
        for name in sorted(environ)
        if name.upper().startswith(ENV_PREFIX) and name.upper() not in known
    ]
    if unknown:
        raise SettingsError(*unknown)


def setting_names() -> Iterator[str]:
    """Dotted names of every setting: server.port, control.weights.ttft, ..."""
    for name, info in Settings.model_fields.items():
        default = info.default
        if is_dataclass(default) and not isinstance(default, type):
            yield from _field_names(type(default), f"{name}.")
        else:
            yield name
    yield from _field_names(WorkerSettings, "workers.")


def known_names() -> set[str]:
    """Setting names and those inside the entries of lists, to suggest the nearest."""
    names = set(setting_names())
    for prefix, group in (
        ("auth.keys.", ClientKey),
        ("discovery.dns.", DnsConfig),
        ("discovery.kubernetes.", KubernetesConfig),
    ):
        names.update(_field_names(group, prefix))
    return names


def _field_names(group: type, prefix: str) -> Iterator[str]:
    hints = get_type_hints(group)
    for spec in fields(group):
        if is_dataclass(hints[spec.name]):
            yield from _field_names(hints[spec.name], f"{prefix}{spec.name}.")
        else:
            yield f"{prefix}{spec.name}"


def _read_settings_file(path: Path) -> dict[str, object]:
    values = read_yaml(path)
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise SettingsError(f"{path} must hold a mapping of settings")
    return values
