"""1 edge, the small routes: what is served, how it goes, and who is scarce."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from service.central_queue import QueueStats
from service.errors import Answer, error_body
from service.telemetry import Telemetry


def routes(
    *,
    stats: Callable[[], QueueStats],
    models: Callable[[], dict[str, object]],
    telemetry: Telemetry,
) -> APIRouter:
    """Build the routes that are not proxied, over what they read."""
    router = APIRouter()

    @router.get("/v1/models")
    async def list_models() -> dict[str, object]:
        """The union of what the workers that are up serve."""
        return models()

    @router.get("/health")
    async def health() -> dict[str, str]:
        """The process is alive."""
        return {"status": "ok"}

    @router.get("/ready")
    async def ready() -> Response:
        """Whether a request sent now would be served; 503 tells load balancers to go elsewhere."""
        trouble = _trouble(stats())
        body = {"status": "ready"} if trouble is None else {"status": "not ready", "why": trouble}
        return JSONResponse(body, status_code=200 if trouble is None else 503)

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


def answer_unknown_paths(app: FastAPI) -> None:
    """Give FastAPI's own refusals (404, 405) the OpenAI shape."""

    @app.exception_handler(HTTPException)
    async def answer(request: Request, error: HTTPException) -> Response:
        kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
        body = error_body(f"{request.url.path}: {error.detail}", Answer(error.status_code, kind))
        headers = {**(error.headers or {}), "content-type": "application/json"}
        return Response(body, error.status_code, headers)


def _trouble(stats: QueueStats) -> str | None:
    if stats.draining:
        return "draining"
    if not stats.ticking:
        return "the last decision failed"
    if not stats.usable_workers:
        return "no worker is up"
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
    }
