"""The commonest mistake on the command line: a worker without its scheme."""

from __future__ import annotations

import pytest

from service.worker_config import WorkerConfig
from service.worker_settings import FleetConfig, worker_config


@pytest.mark.parametrize("address", ["notaurl", "localhost:8000", "ftp://a:1"])
def test_the_line_shows_the_address_and_what_one_looks_like(address: str) -> None:
    with pytest.raises(ValueError, match=r"http\(s\)://host\[:port\]") as told:
        WorkerConfig(worker_id=address.rpartition("://")[2], url=address, batch_limit=8)
    assert str(told.value).endswith(address)


@pytest.mark.parametrize(
    ("address", "faults"),
    [
        ("host:8000/", ["its scheme is missing", "it has a trailing slash"]),
        ("", ["its scheme is missing"]),
        ("ftp://a:1/", ["its scheme is ftp", "it has a trailing slash"]),
        ("http://a b?c", ["it has blanks", "it has a query"]),
        ("me:s3cret@host/", ["its scheme is missing", "credentials", "it has a trailing slash"]),
        ("http://[::1", ["Invalid IPv6 URL"]),
    ],
)
def test_every_fault_is_told_the_first_to_mend_first(address: str, faults: list[str]) -> None:
    with pytest.raises(ValueError, match="url must be") as told:
        WorkerConfig(worker_id="a", url=address, batch_limit=0)
    places = [str(told.value).find(fault) for fault in [*faults, "batch_limit"]]
    assert -1 not in places
    assert places == sorted(places)
    assert "s3cret" not in str(told.value)


def test_a_missing_scheme_is_the_only_fault_of_a_plain_host() -> None:
    with pytest.raises(ValueError, match="its scheme is missing") as told:
        worker_config("host:8000/", FleetConfig())
    assert str(told.value).count(";") == 0
