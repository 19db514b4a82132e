"""1 edge, the small routes: what is served, how it goes, and who is scarce."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib.metadata import version
from typing import Final

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from service.control.events import unserved
from service.errors import REASON_HEADER, Answer, error_body
from service.queue_stats import QueueStats
from service.surface import ALIVE_PATHS, READY_PATHS, no_such_path
from service.telemetry import Telemetry

FALLING_BACK: Final = "decisions are first come first served: the policy fails or is too slow"


def routes(
    *,
    stats: Callable[[], QueueStats],
    models: Callable[[], dict[str, object]],
    held: Callable[[], int],
    telemetry: Telemetry,
) -> APIRouter:
    """Build the routes that are not proxied, over what they read."""
    router = APIRouter()

    _add_models(router, models)

    async def health() -> dict[str, str]:
        """The process is alive."""
        return {"status": "ok"}

    async def ready() -> Response:
        """Whether a request sent now would be served; 503 tells load balancers to go elsewhere.

        Decisions by the fallback still serve, so they are told under a 200: a fault that every
        replica has must not take all of them out.
        """
        return _readiness(stats())

    for paths, answer in ((ALIVE_PATHS, health), (READY_PATHS, ready)):
        for path in paths:
            router.add_api_route(path, answer, include_in_schema=path == paths[0])
            router.add_api_route(path, answer, methods=["HEAD"], include_in_schema=False)
    # As vLLM has it, for SageMaker.
    router.add_api_route("/ping", health, methods=["POST"], include_in_schema=False)

    @router.get("/load")
    async def load() -> dict[str, int]:
        """Requests inside now, as vLLM tells its own."""
        return {"server_load": held()}

    @router.get("/version")
    async def tell_version() -> dict[str, str]:
        """The version of bidgate."""
        return {"version": version("bidgate")}

    @router.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Prometheus series."""
        page, content_type = telemetry.page(request.headers.get("accept", ""))
        return Response(page, headers={"content-type": content_type})

    @router.get("/scarcity")
    async def scarcity() -> dict[str, object]:
        """Queue, workers and their shadow prices, for `bidgate explain`."""
        return _scarcity(stats())

    return router


def _readiness(stats: QueueStats) -> Response:
    trouble = _trouble(stats)
    if trouble is not None:
        return JSONResponse({"status": "not ready", "why": trouble}, status_code=503)
    if stats.falling_back:
        return JSONResponse({"status": "degraded", "why": FALLING_BACK})
    return JSONResponse({"status": "ready"})


def _add_models(router: APIRouter, models: Callable[[], dict[str, object]]) -> None:
    @router.get("/v1/models")
    async def list_models() -> dict[str, object]:
        """The union of what the workers that are up serve."""
        return models()

    @router.get("/v1/models/{name:path}")
    async def show_model(name: str) -> dict[str, object]:
        """One of them."""
        served = {str(card["id"]): card for card in _cards(models())}
        if name not in served:
            raise HTTPException(404, unserved(name, served), {REASON_HEADER: "model_not_found"})
        return served[name]


def with_aliases(models: dict[str, object], aliases: Mapping[str, str]) -> dict[str, object]:
    """Add to a model list the other names of models that are on it."""
    listed = {str(card["id"]): card for card in _cards(models)}
    others = [
        {**listed[model], "id": alias}
        for alias, model in aliases.items()
        if model in listed and alias not in listed
    ]
    return {**models, "data": [*listed.values(), *others]}


def _cards(models: dict[str, object]) -> list[dict[str, object]]:
    cards = models["data"]
    assert isinstance(cards, list), "a model list is one"
    return cards


def answer_unknown_paths(app: FastAPI) -> None:
    """Give FastAPI's own refusals (404, 405) the OpenAI shape."""

    @app.exception_handler(HTTPException)
    async def refuse(request: Request, error: HTTPException) -> Response:
        kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
        code = "method_not_allowed" if error.status_code == 405 else None
        headers = {**(error.headers or {}), "content-type": "application/json"}
        answer = Answer(error.status_code, kind, headers.get(REASON_HEADER) or code)
        path = request.url.path
        unknown = error.status_code == 404 and not answer.code
        words = no_such_path(path) if unknown else f"{path}: {error.detail}"
        body = error_body(words, answer)
        headers[REASON_HEADER] = answer.code or answer.type
        return Response(body, error.status_code, headers)


def _trouble(stats: QueueStats) -> str | None:
    if stats.draining:
        return "draining"
    if not stats.ticking:
        return "the last decision failed"
    if not stats.usable_workers:
        return "no worker is up"
    if stats.lacks_prefill:
        return "no prefill worker is up"
    return None


def _scarcity(stats: QueueStats) -> dict[str, object]:
    router = stats.router
    return {
        "waiting": router.waiting,
        "running": router.running,
        "oldest_wait_s": router.oldest_wait_s,
        "arrivals_per_s": router.arrivals_per_s,
        "price_age_s": router.price_age_s,
        "workers": [asdict(worker) for worker in router.workers],
        "prefillers": [asdict(worker) for worker in router.prefillers],
    }
