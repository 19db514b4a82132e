"""The commonest mistake on the command line: a worker without its scheme."""

from __future__ import annotations

import pytest

from service.worker_config import WorkerConfig


@pytest.mark.parametrize("address", ["notaurl", "localhost:8000", "ftp://a:1", ""])
def test_the_line_shows_the_address_and_what_one_looks_like(address: str) -> None:
    with pytest.raises(ValueError, match=r"http\(s\)://host\[:port\]") as told:
        WorkerConfig(worker_id=address.partition("://")[2], url=address, batch_limit=8)
    assert str(told.value).endswith(address)
