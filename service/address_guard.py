"""Addresses that no worker may have: link-local, metadata services, multicast, unspecified.

Whoever may name a worker could otherwise make bidgate ask a cloud's metadata service, which
answers with credentials. Literal addresses are judged in every spelling that a resolver takes;
names are judged where connections are made, so a name that changes its mind gains nothing.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import Final, TypeAlias
from urllib.parse import urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

METADATA_NAMES: Final = frozenset({"metadata", "metadata.google.internal", "instance-data"})
METADATA_ADDRESSES: Final = frozenset(
    map(ipaddress.ip_address, ("100.100.100.200", "192.0.0.192", "fd00:ec2::254", "168.63.129.16"))
)
NAT64: Final = ipaddress.ip_network("64:ff9b::/96")
HOW_TO_ALLOW: Final = "set fleet.allow_link_local to allow it"

_Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address


class ForbiddenAddressError(ValueError):
    """No worker may be there; the message is one line."""


def check_url(url: str) -> None:
    """Refuse a worker's URL whose host is a forbidden address or a known metadata name.

    Raises:
        ForbiddenAddressError: it is.
        ValueError: there is no host, or the port is none.
    """
    parts = urlsplit(url)
    host = (parts.hostname or "").rstrip(".").lower()
    if not host:
        raise ValueError(f"url must name a host: {url}")
    if parts.port == 0:
        raise ValueError(f"url must name a port from 1 to 65535: {url}")
    if host in METADATA_NAMES or is_forbidden(host):
        raise ForbiddenAddressError(f"{host} is no address for a worker; {HOW_TO_ALLOW}")


def is_forbidden(host: str) -> bool:
    """Whether a host is a literal address where no worker may be; False for names."""
    address = _literal(host)
    if address is None:
        return False
    inner = _embedded_ipv4(address)
    return any(
        one in METADATA_ADDRESSES or one.is_link_local or one.is_multicast or one.is_unspecified
        for one in (address, inner)
        if one is not None
    )


class GuardedResolver(AbstractResolver):
    """The system's resolver without the forbidden addresses."""

    def __init__(self) -> None:
        self._inner = aiohttp.ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Addresses of a name.

        Raises:
            OSError: the name has none that a worker may have.
        """
        found = await self._inner.resolve(host, port, family)
        allowed = [one for one in found if not is_forbidden(one["host"])]
        if not allowed:
            raise OSError(f"{host} is at an address where no worker may be; {HOW_TO_ALLOW}")
        return allowed

    async def close(self) -> None:
        """Nothing is held."""
        await self._inner.close()


def _literal(host: str) -> _Address | None:
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        pass
    try:
        # Also 2852039166, 0xa9fea9fe and 169.254.43518, which resolvers take for addresses.
        return ipaddress.ip_address(socket.inet_aton(host))
    except (OSError, UnicodeError):
        return None


def _embedded_ipv4(address: _Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address that an IPv6 address leads to, or None."""
    if isinstance(address, ipaddress.IPv4Address):
        return None
    if address in NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour
