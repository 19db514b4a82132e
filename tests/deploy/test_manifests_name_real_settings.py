"""Kubernetes manifests: settings, flags, paths, ports and names in them exist and fit together."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.app import assemble
from service.settings import Settings, check_environment
from tests.deploy.commands import ROOT, serve_settings

K8S = ROOT / "deploy" / "k8s"
Manifest = dict[str, Any]


def _load(name: str) -> list[Manifest]:
    return list(yaml.safe_load_all((K8S / name).read_text(encoding="utf-8")))


def _one(name: str, kind: str) -> Manifest:
    (found,) = [manifest for manifest in _load(name) if manifest["kind"] == kind]
    return found


def _container(manifest: Manifest) -> Manifest:
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    found: Manifest = container
    return found


def _mounts(container: Manifest) -> dict[str, str]:
    return {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """The settings that the router's container starts with."""
    text = _one("router.yaml", "ConfigMap")["data"]["settings.yaml"]
    file = tmp_path / "settings.yaml"
    file.write_text(text, encoding="utf-8")
    container = _container(_one("router.yaml", "Deployment"))
    path = f"{_mounts(container)['settings']}/settings.yaml"
    assert path in container["args"]
    return serve_settings([str(file) if word == path else word for word in container["args"]])


def test_the_router_lists_exactly_the_workers_that_the_stateful_set_makes(
    settings: Settings,
) -> None:
    workers = _one("vllm.yaml", "StatefulSet")
    name, service = workers["metadata"]["name"], workers["spec"]["serviceName"]
    (port,) = _container(workers)["ports"]
    urls = {
        f"http://{name}-{index}.{service}:{port['containerPort']}"
        for index in range(workers["spec"]["replicas"])
    }
    assert {worker.url for worker in settings.worker_configs()} == urls


def test_router_and_workers_agree_on_the_batch_limit(settings: Settings) -> None:
    arguments = _container(_one("vllm.yaml", "StatefulSet"))["args"]
    flag = arguments.index("--max-num-seqs")
    assert int(arguments[flag + 1]) == settings.fleet.max_num_seqs


def test_the_workers_image_is_of_a_version_that_the_compatibility_table_knows() -> None:
    image = _container(_one("vllm.yaml", "StatefulSet"))["image"]
    table = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    head = next(line for line in table.splitlines() if line.startswith("|"))
    versions = re.findall(r"\d+\.\d+\.\d+", head)
    assert image.partition(":v")[2] in versions, f"{image} is none of {versions}"


def test_the_router_has_time_to_drain_before_it_is_killed(settings: Settings) -> None:
    pod = _one("router.yaml", "Deployment")["spec"]["template"]["spec"]
    pre_stop_s = int(
        _container(_one("router.yaml", "Deployment"))["lifecycle"]["preStop"]["exec"]["command"][1]
    )
    assert pod["terminationGracePeriodSeconds"] > settings.server.drain_s + pre_stop_s


def test_probes_and_scrapes_ask_paths_that_the_router_serves(settings: Settings) -> None:
    deployment = _one("router.yaml", "Deployment")
    container = _container(deployment)
    paths = set(assemble(settings).app.openapi()["paths"])
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["path"] in paths
    annotations = deployment["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/path"] in paths
    assert int(annotations["prometheus.io/port"]) == settings.server.port
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"


def test_the_router_listens_where_its_ports_say(settings: Settings) -> None:
    container = _container(_one("router.yaml", "Deployment"))
    assert settings.server.host == "0.0.0.0"
    assert [port["containerPort"] for port in container["ports"]] == [settings.server.port]


def test_environment_variables_of_the_router_are_settings() -> None:
    container = _container(_one("router.yaml", "Deployment"))
    check_environment({variable["name"]: "x" for variable in container["env"]})


def test_the_cluster_adds_no_variables_that_would_be_unknown_settings() -> None:
    pod = _one("router.yaml", "Deployment")["spec"]["template"]["spec"]
    assert pod["enableServiceLinks"] is False


def test_discovery_follows_the_workers_service_by_a_port_that_it_has(tmp_path: Path) -> None:
    (patch,) = _load("discovery/settings.yaml")
    file = tmp_path / "settings.yaml"
    file.write_text(patch["data"]["settings.yaml"], encoding="utf-8")
    settings = serve_settings(["serve", "--config", str(file)])
    settings.check()
    assert patch["metadata"] == {"name": _one("router.yaml", "ConfigMap")["metadata"]["name"]}
    assert settings.worker_configs() == ()
    (source,) = settings.discovery.kubernetes
    service = _one("vllm.yaml", "Service")
    assert source.service == service["metadata"]["name"]
    assert source.port_name in [port["name"] for port in service["spec"]["ports"]]
    # Everything but where workers come from is as without discovery.
    base = yaml.safe_load(_one("router.yaml", "ConfigMap")["data"]["settings.yaml"])
    patched = yaml.safe_load(patch["data"]["settings.yaml"])
    del base["workers"], patched["discovery"]
    assert patched == base


def test_the_router_may_list_and_watch_endpointslices_and_nothing_else() -> None:
    account = _one("discovery/rbac.yaml", "ServiceAccount")["metadata"]["name"]
    role = _one("discovery/rbac.yaml", "Role")
    assert role["rules"] == [
        {
            "apiGroups": ["discovery.k8s.io"],
            "resources": ["endpointslices"],
            "verbs": ["list", "watch"],
        }
    ]
    binding = _one("discovery/rbac.yaml", "RoleBinding")
    assert binding["roleRef"]["kind"] == "Role"
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account}]
    (patch,) = _load("discovery/router.yaml")
    assert patch["metadata"]["name"] == _one("router.yaml", "Deployment")["metadata"]["name"]
    pod = patch["spec"]["template"]["spec"]
    assert pod == {"serviceAccountName": account, "automountServiceAccountToken": True}


def test_the_kustomization_of_discovery_lists_files_that_exist() -> None:
    (kustomization,) = _load("discovery/kustomization.yaml")
    folder = K8S / "discovery"
    assert (folder / kustomization["resources"][0] / "kustomization.yaml").is_file()
    named = [*kustomization["resources"][1:], *(one["path"] for one in kustomization["patches"])]
    assert {path.name for path in folder.iterdir()} == {*named, "kustomization.yaml"}


def test_the_service_monitor_finds_the_routers_service() -> None:
    (monitor,) = _load("servicemonitor.yaml")
    service = _one("router.yaml", "Service")
    wanted = monitor["spec"]["selector"]["matchLabels"]
    assert wanted.items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
    assert endpoint["path"] == "/metrics"


@pytest.mark.parametrize("name", ["router.yaml", "vllm.yaml", "podmonitor.yaml"])
def test_selectors_and_named_ports_find_their_pods(name: str) -> None:
    workloads = [
        manifest
        for file in ("router.yaml", "vllm.yaml")
        for manifest in _load(file)
        if manifest["kind"] in ("Deployment", "StatefulSet")
    ]
    for manifest in _load(name):
        spec = manifest.get("spec", {})
        selector = spec.get("selector", {})
        wanted = selector.get("matchLabels", selector)
        if not wanted:
            continue
        found = [
            workload
            for workload in workloads
            if wanted.items() <= workload["spec"]["template"]["metadata"]["labels"].items()
        ]
        assert len(found) == 1, f"{manifest['kind']} {manifest['metadata']['name']}"
        names = {port["name"] for port in _container(found[0])["ports"]}
        asked = {port.get("targetPort", port["name"]) for port in spec.get("ports", ())}
        asked |= {endpoint["port"] for endpoint in spec.get("podMetricsEndpoints", ())}
        assert asked <= names


def test_the_pod_runs_as_the_user_of_the_image() -> None:
    pod = _one("router.yaml", "Deployment")["spec"]["template"]["spec"]
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    user, group = re.findall(r"^USER (\d+):(\d+)$", dockerfile, re.MULTILINE)[0]
    assert pod["securityContext"]["runAsUser"] == int(user)
    assert pod["securityContext"]["runAsGroup"] == int(group)
    assert pod["securityContext"]["runAsNonRoot"] is True


def test_the_kustomization_lists_files_that_exist_and_tags_the_version() -> None:
    (kustomization,) = _load("kustomization.yaml")
    assert all((K8S / name).is_file() for name in kustomization["resources"])
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (version,) = re.findall(r'^version = "(.*)"$', project, re.MULTILINE)
    assert kustomization["images"] == [{"name": "bidgate", "newTag": version}]
    assert _container(_one("router.yaml", "Deployment"))["image"] == "bidgate"


def test_what_the_image_compiled_is_copied_to_where_the_router_looks_for_it() -> None:
    pod = _one("router.yaml", "Deployment")["spec"]["template"]["spec"]
    (copying,), (router,) = pod["initContainers"], pod["containers"]
    image = re.search(r"NUMBA_CACHE_DIR=(\S+)", (ROOT / "Dockerfile").read_text(encoding="utf-8"))
    assert image is not None
    assert copying["command"] == ["cp", "-R", f"{image[1]}/.", _mounts(copying)["compiled"]]
    assert _mounts(router)["compiled"] == image[1]
    assert copying["image"] == router["image"]
