"""5 fleet, workers behind a DNS name: A and AAAA records with one port, or SRV records.

Asked again when the shortest TTL is over, within bounds. A name without records is believed only
when EMPTY_ANSWERS of them came in a row: one wrong answer must not empty the fleet.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

import dns.asyncresolver
import dns.exception
import dns.nameserver
import dns.resolver
from dns.rdtypes.IN.A import A
from dns.rdtypes.IN.AAAA import AAAA
from dns.rdtypes.IN.SRV import SRV

from service.discovery.config import DnsConfig
from service.discovery.source import Snapshot, SourceError, authority
from service.worker_settings import from_template

EMPTY_ANSWERS: Final = 3
TARGETS_MAX: Final = 4096
DNS_PORT: Final = 53
Found = tuple[tuple[str, int], ...]
"""(host, port) of each worker."""


class DnsSource:
    """Follows one name."""

    def __init__(self, config: DnsConfig) -> None:
        self.label = config.label
        self.retry_max_s = config.interval_s
        self.trouble = ""
        self._config = config
        self._empty_answers = 0
        self._families: set[str] = set()

    async def snapshots(self) -> AsyncIterator[Snapshot]:
        """Yield the workers behind the name at each answer."""
        resolver = make_resolver(self._config)
        while True:
            found, ttl_s = await self._ask(resolver)
            self._empty_answers = 0 if found else self._empty_answers + 1
            if not found and self._empty_answers < EMPTY_ANSWERS:
                raise SourceError(f"{self._config.name} has no records")
            yield self._entries(found)
            pause_s = min(max(ttl_s, self._config.min_interval_s), self._config.interval_s)
            await asyncio.sleep(pause_s)

    def _entries(self, found: Found) -> Snapshot:
        config = self._config
        urls = [f"{config.scheme}://{authority(host, port)}" for host, port in found]
        return tuple(from_template(url, None, config.worker) for url in urls)

    async def _ask(self, resolver: dns.asyncresolver.Resolver) -> tuple[Found, float]:
        """All records and the shortest TTL, seconds."""
        port = self._config.port
        if port is None:
            answers = [await self._answer(resolver, "SRV")]
        else:
            answers = await self._addresses(resolver)
        found: dict[tuple[str, int], None] = {}
        ttl_s = float("inf")
        for answer in answers:
            if answer is None or answer.rrset is None:
                continue
            ttl_s = min(ttl_s, float(answer.rrset.ttl))
            for record in answer.rrset:
                if isinstance(record, SRV):
                    found[record.target.to_text(omit_final_dot=True), record.port] = None
                elif isinstance(record, A | AAAA) and port is not None:
                    found[record.address, port] = None
        if len(found) > TARGETS_MAX:
            raise SourceError(f"{self._config.name} has more than {TARGETS_MAX} records")
        return tuple(sorted(found)), ttl_s

    async def _addresses(
        self, resolver: dns.asyncresolver.Resolver
    ) -> list[dns.resolver.Answer | None]:
        """Answers of both families; some servers fail at the family that a name never had."""
        answers: list[dns.resolver.Answer | None] = []
        failed: SourceError | None = None
        for kind in ("A", "AAAA"):
            try:
                answer = await self._answer(resolver, kind)
            except SourceError as error:
                failed = error
                if kind in self._families:
                    raise
            else:
                answers.append(answer)
                if answer is not None:
                    self._families.add(kind)
        if failed is not None and not any(answers):
            raise failed
        return answers

    async def _answer(
        self, resolver: dns.asyncresolver.Resolver, kind: str
    ) -> dns.resolver.Answer | None:
        """The records of one kind; None when the name has none."""
        name = self._config.name
        try:
            return await resolver.resolve(name, kind, lifetime=self._config.timeout_s, search=True)
        except (dns.resolver.NXDOMAIN, dns.resolver.NoAnswer):
            return None
        except (dns.exception.DNSException, OSError) as error:
            words = " ".join(str(error).split()) or type(error).__name__
            raise SourceError(f"cannot resolve {name}: {words}") from error


def make_resolver(config: DnsConfig) -> dns.asyncresolver.Resolver:
    """A resolver that asks the configured servers, or the system's.

    Raises:
        SourceError: a server has no address, or the system names none.
    """
    try:
        resolver = dns.asyncresolver.Resolver(configure=not config.nameservers)
        if config.nameservers:
            resolver.nameservers = [_nameserver(one) for one in config.nameservers]
    except (dns.exception.DNSException, ValueError, OSError) as error:
        raise SourceError(f"dns {config.name}: {error}") from error
    # What the system forgot cannot be asked for again: the TTL is ours to keep.
    resolver.cache = None
    return resolver


def _nameserver(text: str) -> dns.nameserver.Do53Nameserver:
    address, colon, port = text.rpartition(":")
    if not colon or (address.count(":") and not address.endswith("]")):
        return dns.nameserver.Do53Nameserver(text, DNS_PORT)
    return dns.nameserver.Do53Nameserver(address.strip("[]"), int(port))
