"""Where workers are found, in the settings."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, ClassVar, Final

from cyclopts import Parameter
from pydantic import BeforeValidator, ConfigDict

from service.settings_text import SettingsError, listed
from service.worker_settings import WorkerTemplate

SOURCES_MAX: Final = 64
HOST_AND_PORT: Final = re.compile(r"(?P<name>[^\s:/]+):(?P<port>\d+)")
NAMESPACED: Final = re.compile(r"(?:(?P<ns>[^\s/:]+)/)?(?P<service>[^\s/:]+)(?::(?P<port>\S+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class DnsConfig:
    """Workers behind a DNS name.

    Attributes:
        name: with port, all its A and AAAA records are workers; without, it is an SRV name.
        port: of every worker; SRV records bring their own.
        scheme: http or https.
        interval_s: longest time until it is asked again; a shorter TTL asks sooner.
        min_interval_s: shortest such time, however short the TTL.
        timeout_s: longest a question may take.
        nameservers: address or address:port of the servers; the system's when left out.
        worker: what its workers have in common.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    name: str
    port: int | None = None
    scheme: str = "http"
    interval_s: float = 30.0
    min_interval_s: float = 1.0
    timeout_s: float = 5.0
    nameservers: tuple[str, ...] = ()
    worker: WorkerTemplate = field(default_factory=WorkerTemplate)

    def __post_init__(self) -> None:
        """Refuse names and times that are none."""
        if not self.name:
            raise ValueError("name must not be empty")
        if self.port is not None and not 0 < self.port <= 65535:
            raise ValueError(f"port must be in 1..65535, got {self.port}")
        _check_scheme(self.scheme)
        for name in ("interval_s", "min_interval_s", "timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")

    @property
    def label(self) -> str:
        """Its name in metrics and log lines."""
        return f"dns:{self.name}" if self.port is None else f"dns:{self.name}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesConfig:
    """Workers behind a Kubernetes Service, or behind a selector, by its EndpointSlices.

    Attributes:
        service: name of the Service; or leave it out and give a label_selector.
        label_selector: of the EndpointSlices, as kubectl takes it; with a service, both must hold.
        namespace: theirs; bidgate's own when left out.
        port_name: which port of the Service; needed when it has several.
        scheme: http or https.
        kubeconfig: file for use outside the cluster; inside, the service account is used.
        resync_s: everything is listed again this often, should a change have been missed.
        retry_max_s: longest pause after a failure.
        worker: what its workers have in common.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    service: str | None = None
    label_selector: str | None = None
    namespace: str | None = None
    port_name: str | None = None
    scheme: str = "http"
    kubeconfig: Path | None = None
    resync_s: float = 300.0
    retry_max_s: float = 10.0
    worker: WorkerTemplate = field(default_factory=WorkerTemplate)

    def __post_init__(self) -> None:
        """Refuse what selects nothing, and times that are none."""
        if self.service is None and self.label_selector is None:
            raise ValueError("give a service or a label_selector")
        _check_scheme(self.scheme)
        if not self.resync_s >= 1 or not self.retry_max_s > 0:
            raise ValueError("resync_s must be at least 1 and retry_max_s positive")

    @property
    def selector(self) -> str:
        """Of the slices, as the API takes it."""
        parts = []
        if self.service is not None:
            parts.append(f"kubernetes.io/service-name={self.service}")
        if self.label_selector is not None:
            parts.append(self.label_selector)
        return ",".join(parts)

    @property
    def label(self) -> str:
        """Its name in metrics and log lines."""
        what = self.service or self.label_selector
        namespace = "" if self.namespace is None else f"{self.namespace}/"
        port = "" if self.port_name is None else f":{self.port_name}"
        return f"kubernetes:{namespace}{what}{port}"


def _read_dns(value: object) -> object:
    """`name:port` for A and AAAA records, `_http._tcp.name` for SRV records, or a mapping."""
    if not isinstance(value, str):
        return value
    found = HOST_AND_PORT.fullmatch(value)
    if found is not None:
        return {"name": found["name"], "port": int(found["port"])}
    if value.startswith("_"):
        return {"name": value}
    raise ValueError("must be name:port, or an SRV name such as _http._tcp.name")


def _read_kubernetes(value: object) -> object:
    """`namespace/service:port_name`, where only the service is needed, or a mapping."""
    if not isinstance(value, str):
        return value
    found = NAMESPACED.fullmatch(value)
    if found is None:
        raise ValueError("must be namespace/service:port_name; only the service is needed")
    return {"service": found["service"], "namespace": found["ns"], "port_name": found["port"]}


DnsEntry = Annotated[DnsConfig, BeforeValidator(_read_dns)]
KubernetesEntry = Annotated[KubernetesConfig, BeforeValidator(_read_kubernetes)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoveryConfig:
    """Where workers are found besides the list of `workers`.

    Attributes:
        files: YAML files, each with a list of workers like `workers`; changes are followed.
        dns: names: `name:port` for A and AAAA records, `_http._tcp.name` for SRV records.
        kubernetes: Services, `namespace/service:port_name`, followed by their EndpointSlices.
        file_interval_s: how often the files are looked at.
        keep_s: a source that fails keeps its workers; after this long only those that are up.
        remove_s: longest a removed worker's requests may take to end; then they are cut.
    """

    files: Annotated[
        tuple[Path, ...],
        BeforeValidator(listed),
        Parameter(name="--workers-files", consume_multiple=True, negative="", metavar="FILE..."),
    ] = ()
    dns: Annotated[tuple[DnsEntry, ...], BeforeValidator(listed), Parameter(parse=False)] = ()
    kubernetes: Annotated[
        tuple[KubernetesEntry, ...], BeforeValidator(listed), Parameter(parse=False)
    ] = ()
    file_interval_s: float = 1.0
    keep_s: float = 3600.0
    remove_s: float = 600.0

    def __post_init__(self) -> None:
        """Refuse times that are none, the same source twice, and more than SOURCES_MAX."""
        for name in ("file_interval_s", "keep_s", "remove_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        labels = [str(path) for path in self.files]
        labels += [one.label for one in self.dns] + [one.label for one in self.kubernetes]
        twice = next((label for label in labels if labels.count(label) > 1), None)
        if twice is not None:
            raise ValueError(f"{twice} is listed twice")
        if len(labels) > SOURCES_MAX:
            raise ValueError(f"at most {SOURCES_MAX} sources can be followed, got {len(labels)}")

    @property
    def is_empty(self) -> bool:
        """Whether there is no source."""
        return not (self.files or self.dns or self.kubernetes)


def require_kubernetes() -> None:
    """Look for the library that only Kubernetes discovery needs.

    Raises:
        SettingsError: says how to install it.
    """
    if find_spec("kubernetes_asyncio") is None:
        raise SettingsError(
            "discovery.kubernetes needs kubernetes-asyncio; install it with: "
            "pip install 'bidgate[kubernetes]'"
        )


def _check_scheme(scheme: str) -> None:
    if scheme not in ("http", "https"):
        raise ValueError(f"scheme must be http or https, got {scheme}")
