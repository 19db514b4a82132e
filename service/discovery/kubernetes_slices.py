"""5 fleet, workers behind a Kubernetes Service: its EndpointSlices, listed, then watched.

Everything is listed anew whenever a watch ends, for whatever reason: its time is over, the
connection broke, or the version is too old (410). A deletion that was missed meanwhile is missing
from the list, so no worker outlives its endpoint. Where the watch is refused the lists go on, with
the pauses of a source that fails. kubernetes-asyncio is imported when needed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import wraps
from http import HTTPStatus
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import aiohttp

from service.discovery.config import KubernetesConfig
from service.discovery.source import Snapshot, SourceError, authority
from service.worker_settings import WorkerSettings, from_template

if TYPE_CHECKING:
    from kubernetes_asyncio.client import ApiClient

NAMESPACE_FILE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
LIST_TIMEOUT_S: Final = 30.0
WATCH_GRACE_S: Final = 10.0
"""How long after its time a watch may stay silent before its connection counts as dead."""
SLICES_MAX: Final = 4096

Slices = dict[str, Mapping[str, Any]]
"""EndpointSlices as JSON, by name."""


class _WatchOverError(SourceError):
    """A watch ended as watches do: its version is too old, or the connection broke."""


class KubernetesSource:
    """Follows the EndpointSlices that a selector finds."""

    def __init__(self, config: KubernetesConfig) -> None:
        self.label = config.label
        self.retry_max_s = config.retry_max_s
        self.trouble = ""
        self._config = config

    async def snapshots(self) -> AsyncIterator[Snapshot]:
        """Yield the ready endpoints after the list and after each change; ends with the watch."""
        async with _api_client(self._config.kubeconfig) as client:
            slices, version = await self._list(client)
            yield self._entries(slices)
            async for changed in self._watch(client, slices, version):
                yield self._entries(changed)

    async def _list(self, client: ApiClient) -> tuple[Slices, str]:
        with _api_errors(self._config.label):
            answer = await _call(
                client,
                namespace=_namespace(self._config.namespace),
                label_selector=self._config.selector,
                limit=SLICES_MAX,
                timeout_s=LIST_TIMEOUT_S,
            )
        metadata = answer.get("metadata") or {}
        if metadata.get("continue"):
            raise SourceError(f"{self.label}: more than {SLICES_MAX} EndpointSlices")
        slices = {_name(one): one for one in answer.get("items") or ()}
        return slices, str(metadata.get("resourceVersion") or "")

    async def _watch(
        self, client: ApiClient, slices: Slices, version: str
    ) -> AsyncIterator[Slices]:
        try:
            with _api_errors(self.label):
                response = await self._open(client, version)
            if self.trouble:
                self.trouble = ""
                yield slices
            # However a watch ends, the list that follows tells what it missed, or fails itself.
            with suppress(_WatchOverError), _api_errors(self.label):
                async for event in _events(client, response):
                    if _apply(slices, event):
                        yield slices
        except SourceError as error:
            self.trouble = str(error)
            raise

    async def _open(self, client: ApiClient, version: str) -> aiohttp.ClientResponse:
        """Begin a watch.

        Raises:
            SourceError: the API server does not let us.
        """
        from kubernetes_asyncio import client as api

        config = self._config
        response = cast(
            aiohttp.ClientResponse,
            await api.DiscoveryV1Api(client).list_namespaced_endpoint_slice(
                _namespace(config.namespace),
                label_selector=config.selector,
                resource_version=version,
                allow_watch_bookmarks=True,
                watch=True,
                timeout_seconds=int(config.resync_s),
                _request_timeout=config.resync_s + WATCH_GRACE_S,
                _preload_content=False,
            ),
        )
        if response.status != 200:
            response.close()
            words = f"the API server refused the watch: {response.status} {response.reason}"
            raise SourceError(f"{self.label}: {words}")
        return response

    def _entries(self, slices: Slices) -> Snapshot:
        workers: dict[str, WorkerSettings] = {}
        # IPv4 sorts before IPv6: a pod that has both is one worker.
        ordered = sorted(slices.values(), key=lambda one: (str(one.get("addressType")), _name(one)))
        for one in ordered:
            port = self._port(one)
            if port is None:
                continue
            for endpoint in one.get("endpoints") or ():
                address = _ready_address(endpoint)
                if address is None:
                    continue
                url = f"{self._config.scheme}://{authority(address, port)}"
                name = (endpoint.get("targetRef") or {}).get("name") or authority(address, port)
                workers.setdefault(name, from_template(url, name, self._config.worker))
        return tuple(workers.values())

    def _port(self, one: Mapping[str, Any]) -> int | None:
        """The slice's port; None when it does not have the one that is wanted."""
        ports = [port for port in one.get("ports") or () if port.get("port")]
        wanted = self._config.port_name
        if wanted is not None:
            return next((int(port["port"]) for port in ports if port.get("name") == wanted), None)
        if len(ports) > 1:
            names = ", ".join(str(port.get("name")) for port in ports)
            raise SourceError(f"{self.label}: several ports ({names}); choose one by port_name")
        return int(ports[0]["port"]) if ports else None


async def _events(
    client: ApiClient, response: aiohttp.ClientResponse
) -> AsyncIterator[Mapping[str, Any]]:
    """Read the events of a watch that has begun."""
    from kubernetes_asyncio import client as api
    from kubernetes_asyncio import watch

    @wraps(api.DiscoveryV1Api(client).list_namespaced_endpoint_slice)
    async def begun(**_: object) -> aiohttp.ClientResponse:
        return response

    watcher = watch.Watch()
    try:
        # Events without end are the default, and then it would begin a second watch by itself.
        async for event in watcher.stream(begun, timeout_seconds=0):
            yield event
    finally:
        watcher.stop()
        response.close()
        await watcher.close()


def _apply(slices: Slices, event: Mapping[str, Any]) -> bool:
    """Change the slices by an event; whether anything may have changed."""
    kind, one = event["type"], event["raw_object"]
    match kind:
        case "ADDED" | "MODIFIED":
            slices[_name(one)] = one
        case "DELETED":
            slices.pop(_name(one), None)
        case _:
            return False
    if len(slices) > SLICES_MAX:
        raise SourceError(f"more than {SLICES_MAX} EndpointSlices")
    return True


def _name(one: Mapping[str, Any]) -> str:
    return str((one.get("metadata") or {}).get("name"))


def _ready_address(endpoint: Mapping[str, Any]) -> str | None:
    """The endpoint's address if it takes traffic; the API says that an unknown `ready` is true."""
    ready = (endpoint.get("conditions") or {}).get("ready")
    addresses = endpoint.get("addresses") or ()
    return str(addresses[0]) if addresses and ready is not False else None


def _namespace(configured: str | None) -> str:
    if configured is not None:
        return configured
    try:
        return NAMESPACE_FILE.read_text(encoding="utf-8").strip()
    except OSError:
        return "default"


async def _call(
    client: ApiClient, *, namespace: str, label_selector: str, limit: int, timeout_s: float
) -> Mapping[str, Any]:
    """List EndpointSlices as plain JSON."""
    from kubernetes_asyncio import client as api

    # Without preload the answer is the HTTP client's own, whatever the stub says.
    response = cast(
        aiohttp.ClientResponse,
        await api.DiscoveryV1Api(client).list_namespaced_endpoint_slice(
            namespace,
            label_selector=label_selector,
            limit=limit,
            _request_timeout=timeout_s,
            _preload_content=False,
        ),
    )
    async with response:
        if response.status != 200:
            raise SourceError(f"the API server answered {response.status} {response.reason}")
        answer = await response.json()
    if not isinstance(answer, dict):
        raise SourceError("the API server's list is no object")
    return answer


@asynccontextmanager
async def _api_client(kubeconfig: Path | None) -> AsyncIterator[ApiClient]:
    # The library is large: importing it must not hold up the requests that there are.
    await asyncio.to_thread(import_module, "kubernetes_asyncio.config")
    from kubernetes_asyncio import client as api
    from kubernetes_asyncio import config

    configuration = api.Configuration()
    try:
        if kubeconfig is None:
            config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        else:
            await config.load_kube_config(
                config_file=str(kubeconfig),
                client_configuration=configuration,
                persist_config=False,
            )
    except (config.ConfigException, OSError) as error:
        raise SourceError(f"no access to a Kubernetes API: {error}") from error
    async with api.ApiClient(configuration) as client:
        yield client


@contextmanager
def _api_errors(label: str) -> Iterator[None]:
    """Turn what a call may raise into a SourceError, without the headers of the answer."""
    from kubernetes_asyncio.client import ApiException

    try:
        yield
    except ApiException as error:
        kind = _WatchOverError if error.status == HTTPStatus.GONE else SourceError
        raise kind(f"{label}: {error.status} {error.reason}") from None
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        words = " ".join(str(error).split()) or type(error).__name__
        raise _WatchOverError(f"{label}: {words}") from error
