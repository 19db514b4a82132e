"""1 edge, the operator's routes: add, drain, resume, remove and list workers while bidgate serves.

The door (auth.py) lets only the admin key in. What is done here lasts until bidgate restarts;
every route may be repeated without harm.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

import orjson
import structlog
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import TypeAdapter, ValidationError
from starlette.requests import ClientDisconnect

from service.address_guard import HOW_TO_ALLOW, is_forbidden
from service.auth import ADMIN_PREFIX
from service.discovery.desired import STATIC
from service.discovery.following import Discovery
from service.errors import (
    REASON_HEADER,
    BadRequestError,
    BidgateError,
    BodyTooLargeError,
    BodyTooSlowError,
    ClientGoneError,
    NoSuchWorkerError,
    WorkerConflictError,
)
from service.roster import Roster, Running
from service.settings_text import describe
from service.worker_config import WorkerConfig
from service.worker_settings import WorkerSettings, worker_config

BODY_BYTES_MAX: Final = 64 * 1024
BODY_TIMEOUT_S: Final = 10.0
RESOLVE_TIMEOUT_S: Final = 2.0
WORKERS: Final = f"{ADMIN_PREFIX}v1/workers"
_ENTRY: Final = TypeAdapter(WorkerSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Staff:
    """What the operator's routes work on."""

    discovery: Discovery
    roster: Roster
    running: Running


def admin_routes(staff: Staff) -> APIRouter:
    """Build the routes."""
    # Whether these routes exist is the door's business: it depends on the admin key.
    router = APIRouter(prefix=WORKERS, tags=["operator"])

    @router.get("")
    async def list_workers() -> dict[str, object]:
        """Every worker: where it comes from, how it stands, what runs there; never a key."""
        return {"workers": _listed(staff)}

    @router.post("")
    async def add_worker(request: Request) -> Response:
        """Add a worker, {"url": ...} and what else an entry of `workers` may have.

        201 when that changed something, 200 when it was so already, 409 when the id or the URL is
        another worker's.
        """
        try:
            ranks = await _read_entry(request, staff.discovery)
            changed = [_add(staff.discovery, rank) for rank in ranks]
        except BidgateError as error:
            return _refusal(error)
        ids = [rank.worker_id for rank in ranks]
        if any(changed):
            structlog.get_logger("bidgate.admin").info("workers_added", workers=ids)
        return JSONResponse({"workers": _listed(staff, ids)}, 201 if any(changed) else 200)

    @router.post("/{worker_id:path}/drain")
    async def drain_worker(worker_id: str) -> Response:
        """Start nothing more there; what runs may end. The worker stays in the fleet."""
        return _set_drained(staff, worker_id, on=True)

    @router.post("/{worker_id:path}/resume")
    async def resume_worker(worker_id: str) -> Response:
        """Start requests there again."""
        return _set_drained(staff, worker_id, on=False)

    @router.delete("/{worker_id:path}")
    async def remove_worker(worker_id: str) -> Response:
        """Take a worker out, once what runs there has ended; whoever named it.

        It stays out until it is added here again, or bidgate restarts.
        """
        known = [staff.discovery.remove(one) for one in _ids(staff, worker_id) or [worker_id]]
        if not any(known):
            return _refusal(_unknown(worker_id))
        return JSONResponse({"id": worker_id, "status": "leaving"}, 202)

    return router


def _add(discovery: Discovery, worker: WorkerConfig) -> bool:
    try:
        return discovery.add(worker)
    except ValueError as error:
        raise WorkerConflictError(str(error)) from error


def _set_drained(staff: Staff, worker_id: str, *, on: bool) -> Response:
    ids = _ids(staff, worker_id)
    if not ids:
        return _refusal(_unknown(worker_id))
    for one in ids:
        staff.roster.drain(one, on=on)
    return JSONResponse({"workers": _listed(staff, ids)})


def _ids(staff: Staff, worker_id: str) -> list[str]:
    """The worker of that name, or all ranks of the server of that name."""
    members = staff.roster.members()
    if worker_id in members:
        return [worker_id]
    base = f"{worker_id}@"
    return [one for one in members if one.startswith(base) and one[len(base) :].isdigit()]


def _listed(staff: Staff, ids: list[str] | None = None) -> list[dict[str, object]]:
    wanted = staff.discovery.wanted
    running = staff.running()
    rows: list[dict[str, object]] = []
    for worker_id, (worker, standing) in staff.roster.members().items():
        if ids is not None and worker_id not in ids:
            continue
        rows.append(
            {
                "id": worker_id,
                "url": worker.url,
                "role": worker.role.value,
                "source": wanted.sources.get(worker_id, STATIC),
                "standing": standing,
                "up": staff.discovery.is_up(worker_id),
                "running": running.get(worker_id, 0),
                "batch_limit": worker.batch_limit,
                "has_key": worker.api_key is not None,
            }
        )
    return rows


async def _read_entry(request: Request, discovery: Discovery) -> tuple[WorkerConfig, ...]:
    """The workers that a body describes.

    Raises:
        BadRequestError: it describes none that may be added.
    """
    body = await _read_body(request)
    if isinstance(body.get("api_key"), Mapping):
        # `{file: ...}` and `{env: ...}` are for those who may read this machine's files anyway.
        raise BadRequestError("api_key must be a string here", param="api_key")
    try:
        worker = worker_config(_ENTRY.validate_python(dict(body)), discovery.fleet)
    except ValidationError as error:
        known = WorkerSettings.__dataclass_fields__
        raise BadRequestError("; ".join(describe(error, known))) from None
    except ValueError as error:
        raise BadRequestError(str(error)) from error
    if not discovery.fleet.allow_link_local:
        await _check_host(worker.url)
    return worker.ranks()


async def _read_body(request: Request) -> Mapping[str, object]:
    content = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                content += chunk
                if len(content) > BODY_BYTES_MAX:
                    raise BodyTooLargeError(f"the body is longer than {BODY_BYTES_MAX} bytes")
    except TimeoutError as error:
        raise BodyTooSlowError("the body did not arrive in time") from error
    except ClientDisconnect as error:
        raise ClientGoneError("the operator left") from error
    try:
        body = orjson.loads(bytes(content))
    except orjson.JSONDecodeError as error:
        raise BadRequestError("the body is not JSON") from error
    if not isinstance(body, dict):
        raise BadRequestError("the body must be a JSON object")
    return body


async def _check_host(url: str) -> None:
    """Refuse a name that leads to a forbidden address now; connections are judged again."""
    host = urlsplit(url).hostname or ""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(RESOLVE_TIMEOUT_S):
            found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError, UnicodeError):
        # A worker may be added before its name exists.
        return
    if any(is_forbidden(str(address[0])) for *_, address in found):
        raise BadRequestError(f"{host} is at an address where no worker may be; {HOW_TO_ALLOW}")


def _unknown(worker_id: str) -> NoSuchWorkerError:
    return NoSuchWorkerError(f"there is no worker {worker_id}")


def _refusal(error: BidgateError) -> Response:
    headers = {"content-type": "application/json", REASON_HEADER: error.cause}
    return Response(error.body(), error.status, headers)
