"""How much is fuzzed, and the figures at the end: `make fuzz EXAMPLES=5000` prints them."""

from __future__ import annotations

import os
from collections import Counter, defaultdict

import pytest
from fastapi.dependencies import models

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))
"""Cases of each test; 0 is the short run of the test suite."""
FIGURES: pytest.StashKey[dict[str, Counter[str]]] = pytest.StashKey()


def examples(short: int) -> int:
    """How many cases a test tries."""
    return EXAMPLES or short


def forget_applications() -> None:
    """Empty FastAPI's caches of endpoints: they keep the last thousands of applications alive."""
    for cached in vars(models).values():
        if hasattr(cached, "cache_clear"):
            cached.cache_clear()


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Counter[str]:
    """Counts what was seen in this test, for the table at the end."""
    figures = request.config.stash.setdefault(FIGURES, defaultdict(Counter))
    return figures[request.node.name]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print what was seen, in the long run."""
    figures = config.stash.get(FIGURES, {})
    if not EXAMPLES:
        return
    for name, counts in figures.items():
        seen = ", ".join(f"{key} {count}" for key, count in sorted(counts.items()))
        terminalreporter.write_line(f"{name}: {sum(counts.values())} cases: {seen}")
