"""What every test starts from: no settings of the developer's shell, repeatable examples.

`--hypothesis-profile=explore` digs deeper.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from service.control import compile_all
from service.control.kernels.compiled import Kernel

# Whoever gives a kernel other types than it takes is told, however late.
Kernel.checks = True

settings.register_profile(
    "repeatable",
    deadline=None,
    derandomize=True,
    max_examples=30,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "explore",
    deadline=None,
    max_examples=300,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("repeatable")

SETTINGS_PREFIX = "BIDGATE_"
OF_THE_TESTS = ("BIDGATE_VLLM_", "BIDGATE_SHARED_DATA")
"""Variables that tests read while they are imported or once in a session."""

# Modules build settings while they are imported, before any fixture runs.
for _name in list(os.environ):
    if _name.upper().startswith(SETTINGS_PREFIX) and not _name.startswith(OF_THE_TESTS):
        del os.environ[_name]


TESTS = Path(__file__).parent
WITH_SOCKETS = (
    *("service", "chaos", "fuzz", "mock", "loadgen/test_demo", "loadgen/test_side_by_side"),
    *(
        "loadgen/test_children",
        "loadgen/test_commands",
        "loadgen/test_replay",
        "loadgen/test_light",
    ),
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With JOBS=2 one process has whatever uses sockets, so that no two of those compete."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        file = item.path.relative_to(TESTS).as_posix()
        group = "sockets" if file.startswith(WITH_SOCKETS) else file
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(autouse=True)
def _no_settings_around(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test, nor a process that it starts, sees a setting that it did not make itself."""
    for name in list(os.environ):
        if name.upper().startswith(SETTINGS_PREFIX):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    """Nothing is compiled while a test waits for a decision."""
    compile_all()
