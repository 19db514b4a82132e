"""Dockerfile and compose file: what they copy, mount and run exists."""

from __future__ import annotations

import re
import shlex
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from service.app import assemble
from service.mock.command import MockWorkerOptions
from service.settings import Settings, check_environment
from tests.deploy.commands import ROOT, parse_command, serve_settings

DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
SERVICES = COMPOSE["services"]
OURS = [name for name, service in SERVICES.items() if service["image"] == "bidgate:local"]
PIN = re.compile(r"^([a-z0-9._-]+)==([^ ;]+)", re.MULTILINE)


def _instructions(word: str) -> list[list[str]]:
    lines = [line.split(maxsplit=1) for line in DOCKERFILE.splitlines() if line.strip()]
    return [shlex.split(rest) for first, *tail in lines if first == word for rest in tail]


def _environment() -> dict[str, str]:
    return dict(pair.split("=", 1) for line in _instructions("ENV") for pair in line)


def _pins(name: str) -> dict[str, str]:
    return dict(PIN.findall((ROOT / name).read_text(encoding="utf-8")))


def test_everything_the_image_copies_exists_and_is_in_the_build_context() -> None:
    allowed = [
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line.startswith("!")
    ]
    copied = [
        source
        for words in _instructions("COPY")
        if not words[0].startswith("--from")
        for source in words[:-1]
    ]
    assert copied
    for source in copied:
        assert (ROOT / source).exists()
        assert any(fnmatch(source, pattern) for pattern in allowed), f"{source} is ignored"


def test_the_image_holds_the_dependencies_of_the_service_and_no_others() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    runtime = _pins("requirements-runtime.lock")
    names = {re.split(r"[<>=;\[ ]", line)[0] for line in project["dependencies"]}
    assert names <= set(runtime)
    only_load = {
        re.split(r"[<>=;\[ ]", line)[0] for line in project["optional-dependencies"]["loadgen"]
    }
    assert not {"matplotlib", "pyarrow", "scipy", "jinja2"} & only_load & set(runtime)


@pytest.mark.parametrize("name", ["requirements-runtime.lock", "requirements-build.lock"])
def test_the_locks_of_the_image_agree_with_the_lock_of_the_tests(name: str) -> None:
    full = _pins("requirements.lock")
    pins = _pins(name)
    assert pins
    assert pins.items() <= full.items()


def test_no_lock_names_an_index() -> None:
    for lock in ROOT.glob("requirements*.lock"):
        assert "://" not in lock.read_text(encoding="utf-8")


def test_the_image_runs_as_an_ordinary_user_and_knows_every_variable_it_sets() -> None:
    (user,) = _instructions("USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user[0])
    check_environment(_environment())


def test_the_health_check_asks_a_route_on_the_port_that_the_image_listens_on() -> None:
    environment = _environment()
    exposed = _instructions("EXPOSE")[0][0]
    assert environment["BIDGATE_SERVER__PORT"] == exposed
    (check,) = re.findall(r"^HEALTHCHECK.*$", DOCKERFILE, re.MULTILINE)
    assert "BIDGATE_SERVER__PORT" in check
    assert "/health'" in check
    app = assemble(Settings(workers=("http://127.0.0.1:9",))).app
    assert "/health" in app.openapi()["paths"]


def test_the_image_starts_the_command_that_the_package_installs() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "scripts"
    ]
    (entry,) = re.findall(r'^ENTRYPOINT \["(.*)"\]$', DOCKERFILE, re.MULTILINE)
    assert entry in scripts


@pytest.mark.parametrize("name", OURS)
def test_a_service_of_the_compose_file_has_a_command_that_parses(name: str) -> None:
    parse_command(SERVICES[name]["command"])


def test_the_router_of_the_compose_file_uses_every_mock_worker() -> None:
    settings = serve_settings(SERVICES["router"]["command"])
    workers = {
        name: parse_command(SERVICES[name]["command"])[1] for name in OURS if name != "router"
    }
    addresses = {urlsplit(worker.url).netloc for worker in settings.worker_configs()}
    assert len(workers) == 4
    for name, options in workers.items():
        assert isinstance(options, MockWorkerOptions)
        assert options.max_num_seqs == settings.fleet.max_num_seqs
        assert options.host == "0.0.0.0"
        assert f"{name}:{options.port}" in addresses
    assert len(addresses) == len(workers)


def test_the_router_has_time_to_drain_before_it_is_killed() -> None:
    settings = serve_settings(SERVICES["router"]["command"])
    assert int(SERVICES["router"]["stop_grace_period"].removesuffix("s")) > settings.server.drain_s


def test_what_the_compose_file_mounts_exists_and_what_it_names_is_mounted() -> None:
    for service in SERVICES.values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert source in COMPOSE["volumes"] or (ROOT / source).exists()
    mounts = dict(volume.split(":")[:2] for volume in SERVICES["grafana"]["volumes"])
    home = Path(SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (ROOT / _source(mounts, str(home.parent)) / home.name).is_file()
    providers = yaml.safe_load((ROOT / "deploy/grafana/dashboards.yml").read_text(encoding="utf-8"))
    for provider in providers["providers"]:
        assert provider["options"]["path"] in mounts.values()


def test_prometheus_and_grafana_ask_services_that_exist() -> None:
    config = yaml.safe_load((ROOT / "deploy/prometheus.yml").read_text(encoding="utf-8"))
    targets = [
        target
        for job in config["scrape_configs"]
        for group in job["static_configs"]
        for target in group["targets"]
    ]
    assert {target.split(":")[0] for target in targets} == set(OURS)
    sources = yaml.safe_load(
        (ROOT / "deploy/grafana/datasources/prometheus.yml").read_text(encoding="utf-8")
    )
    assert {urlsplit(source["url"]).hostname for source in sources["datasources"]} <= set(SERVICES)


def test_ports_are_published_on_the_loopback_only() -> None:
    for service in SERVICES.values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))


def _source(mounts: dict[str, str], target: str) -> str:
    return next(source for source, where in mounts.items() if where == target)
