"""The recorded list of routes, which every test run uses, against the engine that is installed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.vllm.workers import HOME

RECORD = Path(__file__).resolve().parents[1] / "service/vllm_routes_0.32.0.txt"
DECORATED = re.compile(r'@\w+\.(get|post|put|delete|patch|websocket)\(\s*"(/[^"]*)"')
ADDED = re.compile(r'add_api_route\(\s*"(/[^"]*)"[^)]*methods=\["(\w+)"\]')
MOUNTED = re.compile(r'Mount\(\s*"(/[^"]*)"')


def declared(entrypoints: Path) -> set[tuple[str, str]]:
    """Method and path of every route in the engine's sources."""
    found: set[tuple[str, str]] = set()
    for file in entrypoints.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        found |= {(method.upper(), path) for method, path in DECORATED.findall(text)}
        found |= {(method, path) for path, method in ADDED.findall(text)}
        found |= {("GET", path) for path in MOUNTED.findall(text)}
    return found


def test_every_route_of_the_installed_engine_is_recorded() -> None:
    (engine,) = HOME.glob("venv/lib/python3*/site-packages/vllm")
    (info,) = engine.parent.glob("vllm-*.dist-info")
    if not info.name.startswith(RECORD.stem.replace("vllm_routes_", "vllm-")):
        pytest.skip(f"{RECORD.name} is another version's than {info.name}")
    lines = RECORD.read_text(encoding="utf-8").splitlines()
    recorded = {tuple(line.split()[1:]) for line in lines if not line.startswith("#")}
    assert recorded == declared(engine / "entrypoints")
