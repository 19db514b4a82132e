"""Workers in the settings: what holds for the fleet, for a group of workers, and for each one.

The same fields stand in an entry of `workers`, in a file of workers, in the template of a
discovery source and in the body of the admin API; `worker_config` makes the plain values of any.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar, TypeAlias

from pydantic import ConfigDict

from service.address_guard import check_url
from service.control.events import Role
from service.secrets import Secret
from service.settings_text import SettingsError, line_of_entry
from service.worker_config import RANKS_MAX, WorkerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """What holds for every worker that does not say otherwise.

    Attributes:
        max_num_seqs: the workers' --max-num-seqs, which vLLM tells nobody.
        worker_api_key: bearer token for the workers.
        data_parallel_size: ranks behind each URL (vLLM's --data-parallel-size, or
            --data-parallel-size-local with --data-parallel-hybrid-lb); each rank is a worker of
            its own.
        allow_link_local: let workers be at link-local and metadata addresses, which are refused
            as long as nobody means them.
        worker_ca_file: PEM; workers at https must show a certificate signed by one of these, and
            not by one that the system trusts.
        worker_client_cert_file: PEM certificate that bidgate shows to workers that want one.
        worker_client_key_file: PEM private key; left out when it stands in
            worker_client_cert_file.
        worker_client_key_password: of that private key.
    """

    max_num_seqs: int = 256
    worker_api_key: Secret | None = None
    data_parallel_size: int = 1
    allow_link_local: bool = False
    worker_ca_file: Path | None = None
    worker_client_cert_file: Path | None = None
    worker_client_key_file: Path | None = None
    worker_client_key_password: Secret | None = None

    def __post_init__(self) -> None:
        """Refuse a batch of nothing, and no rank at all."""
        if self.max_num_seqs < 1:
            raise ValueError(f"max_num_seqs must be at least 1, got {self.max_num_seqs}")
        if not 1 <= self.data_parallel_size <= RANKS_MAX:
            given = self.data_parallel_size
            raise ValueError(f"data_parallel_size must be in 1..{RANKS_MAX}, got {given}")
        key = self.worker_client_key_file or self.worker_client_key_password
        if key and not self.worker_client_cert_file:
            raise ValueError(
                "worker_client_key_file and worker_client_key_password need a "
                "worker_client_cert_file"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTemplate:
    """What several workers can have in common; fields left out follow the fleet's.

    Attributes:
        batch_limit: their --max-num-seqs.
        kv_capacity_tokens: their KV cache; learned from the engine when left out.
        models: what they serve; learned from /v1/models when left out.
        role: prefill (they compute prompts only), decode (fetch what was prefilled), or both.
        api_key: bearer token for them.
        data_parallel_size: ranks behind each URL; the limits above are those of one rank.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    batch_limit: int | None = None
    kv_capacity_tokens: int | None = None
    models: tuple[str, ...] | None = None
    role: Role | None = None
    api_key: Secret | None = None
    data_parallel_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings(WorkerTemplate):
    """One worker in the YAML file; fields left out follow the fleet's.

    Attributes:
        url: http://host:port.
        id: its name in metrics and headers; host:port when left out.
        batch_limit: its --max-num-seqs.
        kv_capacity_tokens: its KV cache; learned from the engine when left out.
        models: what it serves; learned from /v1/models when left out.
        role: prefill (computes prompts only), decode (fetches what was prefilled), or both.
        api_key: bearer token for it.
        data_parallel_size: ranks behind the URL; the limits above are those of one rank.
    """

    url: str
    id: str | None = None


WorkerEntry: TypeAlias = str | WorkerSettings
"""A URL, or a mapping with more."""


def from_template(url: str, worker_id: str | None, template: WorkerTemplate) -> WorkerSettings:
    """One worker of a group that shares a template."""
    common = {spec.name: getattr(template, spec.name) for spec in fields(WorkerTemplate)}
    return WorkerSettings(url=url, id=worker_id, **common)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLists:
    """The workers of the settings, as they were given.

    Attributes:
        workers: of any role. prefill_workers, decode_workers: of one.
        file: that they may have come from.
    """

    workers: tuple[WorkerEntry, ...]
    prefill_workers: tuple[str, ...]
    decode_workers: tuple[str, ...]
    file: Path | None = None

    def configs(self, fleet: FleetConfig) -> tuple[WorkerConfig, ...]:
        """The plain values of all of them, ranks apart.

        Raises:
            SettingsError: URLs are none, or names are given twice; with file and line where the
                file has that entry.
        """
        known: dict[str, WorkerConfig] = {}
        mistakes = []
        for setting, entry in self._entries():
            try:
                for rank in worker_config(entry, fleet).ranks():
                    if rank.worker_id in known:
                        raise ValueError(f"{rank.worker_id} is listed twice")
                    known[rank.worker_id] = rank
            except ValueError as error:
                mistakes.append(f"{self._place(setting, entry)}{setting}: {error}")
        if mistakes:
            raise SettingsError(*mistakes)
        return tuple(known.values())

    def _entries(self) -> Iterator[tuple[str, WorkerSettings]]:
        for one in self.workers:
            yield "workers", WorkerSettings(url=one) if isinstance(one, str) else one
        for url in self.prefill_workers:
            yield "prefill_workers", WorkerSettings(url=url, role=Role.PREFILL)
        for url in self.decode_workers:
            yield "decode_workers", WorkerSettings(url=url, role=Role.DECODE)

    def _place(self, setting: str, entry: WorkerSettings) -> str:
        """Where the file has the entry, as a prefix; nothing for what a flag gave."""
        if self.file is None:
            return ""
        words = (entry.url,) if entry.id is None else (entry.id, entry.url)
        found = (line_of_entry(self.file, setting, word) for word in words)
        line = next((line for line in found if line is not None), None)
        return "" if line is None else f"{self.file}:{line}: "


def worker_config(entry: WorkerEntry, fleet: FleetConfig) -> WorkerConfig:
    """The plain values of a worker, with the fleet's where it has none; ranks() takes it apart.

    Raises:
        ValueError: no worker can be like that.
    """
    one = WorkerSettings(url=entry) if isinstance(entry, str) else entry
    scheme, mark, rest = one.url.rpartition("://")
    url = scheme + mark + rest.rstrip("/").removesuffix("/v1")
    key = one.api_key or fleet.worker_api_key
    ranks = one.data_parallel_size
    worker = WorkerConfig(
        worker_id=url.rpartition("://")[2] if one.id is None else one.id,
        url=url,
        batch_limit=fleet.max_num_seqs if one.batch_limit is None else one.batch_limit,
        kv_capacity_tokens=one.kv_capacity_tokens,
        models=None if one.models is None else frozenset(one.models),
        role=one.role or Role.BOTH,
        api_key=None if key is None else key.get_secret_value(),
        data_parallel_size=fleet.data_parallel_size if ranks is None else ranks,
    )
    if not fleet.allow_link_local:
        check_url(url)
    return worker
