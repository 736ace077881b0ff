"""/health, /ready, /version and /metrics: what the server says of itself, with nothing in it that came with a request.

/health: is it worth keeping (200), or does nothing move (503)? /ready: should it be sent requests now?
Stateless. Not here: the figures themselves (metrics.py).
"""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

import octavo
from octavo.server.metrics import CONTENT_TYPE
from octavo.server.state import ServerState


def router(server: ServerState) -> APIRouter:
    routes = APIRouter(tags=["status"])

    @routes.head("/health", include_in_schema=False)
    @routes.get("/health")
    async def health() -> JSONResponse:
        engine = server.engine
        healthy = engine.is_healthy()
        return _answer(server, healthy, {"state": server.status, "restarts": engine.restarts})

    @routes.head("/ready", include_in_schema=False)
    @routes.get("/ready")
    async def ready() -> JSONResponse:
        return _answer(server, server.is_ready, {"state": server.status})

    @routes.head("/version", include_in_schema=False)
    @routes.get("/version")
    async def version() -> JSONResponse:
        return JSONResponse({"version": octavo.__version__})

    @routes.get("/metrics")
    async def metrics() -> Response:
        return Response(server.metrics.expose(), headers={"content-type": CONTENT_TYPE.decode()})

    return routes


def _answer(server: ServerState, good: bool, body: dict[str, object]) -> JSONResponse:
    headers = {"cache-control": "no-store"} | ({} if good else {"retry-after": str(server.retry_after)})
    return JSONResponse(body, 200 if good else 503, headers)
