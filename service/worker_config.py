"""A worker as the operator configured it: where it is, how to authenticate, what it can hold.

Plain values, so that fleet and forwarder share them without knowing the settings.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final
from urllib.parse import urlsplit

from service.control.events import Role

RANKS_MAX: Final = 1024
"""More data-parallel ranks than any server has."""
ID_CHARS_MAX: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """One worker of the static list: a server, or one data-parallel rank of it.

    Attributes:
        worker_id: unique name; metric label and value of the x-bidgate-worker header.
        url: base URL, scheme and authority and an optional path prefix, without a trailing slash
            and without /v1: http://10.0.0.7:8000.
        batch_limit: B_g, the engine's --max-num-seqs; >= 1.
        kv_capacity_tokens: M_g; None to learn it from the engine's vllm:cache_config_info.
        models: names served; None to learn them from /v1/models.
        role: whether it computes prompts only, decodes what others prefilled, or does both.
        api_key: sent to the worker as a bearer token, or None; never shown.
        data_parallel_size: ranks behind the URL; limits above are those of one rank.
        data_parallel_rank: which of them this worker is, counted from 0 at each URL; None when
            the worker is the whole server.
    """

    worker_id: str
    url: str
    batch_limit: int
    kv_capacity_tokens: int | None = None
    models: frozenset[str] | None = None
    role: Role = Role.BOTH
    api_key: str | None = field(default=None, repr=False)
    data_parallel_size: int = 1
    data_parallel_rank: int | None = None

    def __post_init__(self) -> None:
        """Refuse what no worker can have."""
        if not self.url.startswith(("http://", "https://")) or self.url.endswith("/"):
            raise ValueError(
                f"url must be http(s)://host[:port] with no trailing slash: {self.url}"
            )
        parts = urlsplit(self.url)
        if not _is_header_text(self.url) or parts.query or parts.fragment or "\\" in self.url:
            raise ValueError(f"url must be http(s)://host[:port][/prefix] alone: {self.url!r}")
        if not (_is_header_text(self.worker_id) and len(self.worker_id) <= ID_CHARS_MAX):
            # It is the value of a header, and part of the path of the operator's routes.
            raise ValueError(
                f"a worker's id must be 1 to {ID_CHARS_MAX} printable ASCII characters, no blanks"
            )
        if self.api_key is not None and not _is_header_text(self.api_key):
            raise ValueError("api_key must be printable ASCII without blanks")
        if "@" in parts.netloc:
            # The worker's id, which clients and metrics see, is made from the URL.
            raise ValueError("url must not hold credentials; api_key is for them")
        if self.batch_limit < 1:
            raise ValueError(f"batch_limit must be at least 1, got {self.batch_limit}")
        if self.kv_capacity_tokens is not None and self.kv_capacity_tokens < 1:
            raise ValueError(
                f"kv_capacity_tokens must be at least 1, got {self.kv_capacity_tokens}"
            )
        if not 1 <= self.data_parallel_size <= RANKS_MAX:
            raise ValueError(
                f"data_parallel_size must be in 1..{RANKS_MAX}, got {self.data_parallel_size}"
            )
        if not 0 <= (self.data_parallel_rank or 0) < self.data_parallel_size:
            raise ValueError(
                f"data_parallel_rank must be in 0..{self.data_parallel_size - 1}, "
                f"got {self.data_parallel_rank}"
            )

    def ranks(self) -> tuple[WorkerConfig, ...]:
        """One worker for each rank behind the URL, named `id@rank`; itself when there is one."""
        if self.data_parallel_size == 1:
            return (self,)
        return tuple(
            replace(self, worker_id=f"{self.worker_id}@{rank}", data_parallel_rank=rank)
            for rank in range(self.data_parallel_size)
        )


def _is_header_text(text: str) -> bool:
    """Whether text can stand in an HTTP header, or a path, as one word."""
    return text.isascii() and text.isprintable() and bool(text) and " " not in text
