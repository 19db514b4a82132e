"""A worker as the operator configured it: where it is, how to authenticate, what it can hold.

Plain values, so that fleet and forwarder share them without knowing the settings.
"""

from __future__ import annotations

from collections.abc import Iterator
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
        """Refuse what no worker can have; every fault is told."""
        faults = [*self._faults()]
        if faults:
            raise ValueError("; ".join(faults))

    def _faults(self) -> Iterator[str]:
        """What is wrong, the first to mend first."""
        wrong = ", ".join(_url_faults(self.url))
        if wrong:
            yield f"url must be http(s)://host[:port][/prefix] alone: {wrong}: {_shown(self.url)}"
        if not (_is_header_text(self.worker_id) and len(self.worker_id) <= ID_CHARS_MAX):
            # It is the value of a header, and part of the path of the operator's routes.
            yield f"a worker's id must be 1 to {ID_CHARS_MAX} printable ASCII characters, no blanks"
        if self.api_key is not None and not _is_header_text(self.api_key):
            yield "api_key must be printable ASCII without blanks"
        if self.batch_limit < 1:
            yield f"batch_limit must be at least 1, got {self.batch_limit}"
        if self.kv_capacity_tokens is not None and self.kv_capacity_tokens < 1:
            yield f"kv_capacity_tokens must be at least 1, got {self.kv_capacity_tokens}"
        ranks, rank = self.data_parallel_size, self.data_parallel_rank
        if not 1 <= ranks <= RANKS_MAX:
            yield f"data_parallel_size must be in 1..{RANKS_MAX}, got {ranks}"
        elif not 0 <= (rank or 0) < ranks:
            yield f"data_parallel_rank must be in 0..{ranks - 1}, got {rank}"

    def ranks(self) -> tuple[WorkerConfig, ...]:
        """One worker for each rank behind the URL, named `id@rank`; itself when there is one."""
        if self.data_parallel_size == 1:
            return (self,)
        return tuple(
            replace(self, worker_id=f"{self.worker_id}@{rank}", data_parallel_rank=rank)
            for rank in range(self.data_parallel_size)
        )


def _url_faults(url: str) -> Iterator[str]:
    """What keeps a text from being a worker's base URL, the first to mend first."""
    scheme, mark, rest = url.partition("://")
    if not mark:
        yield "its scheme is missing"
    elif scheme not in ("http", "https"):
        yield f"its scheme is {scheme}" if scheme else "its scheme is empty"
    if "@" in (rest if mark else url).partition("/")[0]:
        # The worker's id, which clients and metrics see, is made from the URL.
        yield "it must not hold credentials (api_key is for them)"
    if url and not _is_header_text(url):
        yield "it has blanks, or characters that are not printable ASCII"
    if any(mark in url for mark in "?#\\"):
        yield "it has a query, a fragment or a backslash"
    if (rest if mark else url).endswith("/"):
        yield "it has a trailing slash"
    try:
        parts = urlsplit(url)
        if mark and not parts.hostname:
            yield "its host is missing"
        if parts.port == 0:
            yield "its port is 0"
    except ValueError as error:
        yield str(error)


def _shown(url: str) -> str:
    """A URL without its credentials, and in quotes where it could be misread."""
    shown = f"***@{url.rpartition('@')[2]}" if "@" in url else url
    return shown if _is_header_text(shown) else repr(shown)


def _is_header_text(text: str) -> bool:
    """Whether text can stand in an HTTP header, or a path, as one word."""
    return text.isascii() and text.isprintable() and bool(text) and " " not in text
