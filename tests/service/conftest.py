"""What every test of the shell starts from."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(autouse=True)
def _log_settings_end_with_the_test() -> Iterator[None]:
    """A test that runs the command sets the process's log up, to an output that ends with it."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)
