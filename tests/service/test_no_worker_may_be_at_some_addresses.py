"""Addresses where no worker may be, in every spelling, by name or by number."""

from __future__ import annotations

import pytest

from service.address_guard import ForbiddenAddressError, GuardedResolver, check_url, is_forbidden
from service.worker_settings import FleetConfig, worker_config


@pytest.mark.parametrize(
    "host",
    [
        "169.254.169.254",
        "2852039166",
        "0xa9fea9fe",
        "0251.0376.0251.0376",
        "169.254.43518",
        "[::ffff:169.254.169.254]",
        "[64:ff9b::a9fe:a9fe]",
        "[fe80::1]",
        "[fd00:ec2::254]",
        "100.100.100.200",
        "metadata.google.internal",
        "METADATA.google.internal.",
        "0.0.0.0",
        "[::]",
        "224.0.0.1",
    ],
)
def test_addresses_where_no_worker_may_be_are_refused_in_every_spelling(host: str) -> None:
    with pytest.raises(ForbiddenAddressError, match="allow_link_local"):
        check_url(f"http://{host}:80")
    with pytest.raises(ForbiddenAddressError):
        worker_config(f"http://{host}:80", FleetConfig())
    assert worker_config(f"http://{host}:80", FleetConfig(allow_link_local=True))


@pytest.mark.parametrize("host", ["10.0.0.7", "127.0.0.1", "[::1]", "vllm-0.vllm", "localhost"])
def test_ordinary_addresses_are_not(host: str) -> None:
    check_url(f"http://{host}:8000")
    assert not is_forbidden(host.strip("[]"))


@pytest.mark.parametrize("url", ["http://", "http://:80", "http://a:0", "http://a:99999"])
def test_a_url_without_a_place_is_refused(url: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 several messages
        check_url(url)


async def test_a_name_that_leads_to_a_forbidden_address_is_not_connected_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resolver = GuardedResolver()

    async def rebound(*_: object) -> list[dict[str, object]]:
        return [{"host": host} for host in addresses]

    monkeypatch.setattr(resolver._inner, "resolve", rebound)
    addresses = ["169.254.169.254"]
    with pytest.raises(OSError, match="no worker may be"):
        await resolver.resolve("innocent.test", 80)
    addresses = ["169.254.169.254", "10.0.0.1"]
    assert [one["host"] for one in await resolver.resolve("innocent.test", 80)] == ["10.0.0.1"]
