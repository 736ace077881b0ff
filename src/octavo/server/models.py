"""GET /v1/models and /v1/models/{id}: which names a request may use for the one model there is.

Stateless. Not here: checking the name in a request (prepare.py).
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from octavo.server.errors import ApiError
from octavo.server.state import ServerState


def router(server: ServerState) -> APIRouter:
    routes = APIRouter(tags=["models"])

    @routes.get("/v1/models")
    async def list_models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [_model(server, name) for name in server.model_names]})

    @routes.get("/v1/models/{model_id:path}")
    async def get_model(model_id: str) -> JSONResponse:
        if model_id not in server.model_names:
            raise ApiError(404, "there is no model of this name; GET /v1/models lists them", param="model", code="model_not_found")
        return JSONResponse(_model(server, model_id))

    return routes


def _model(server: ServerState, name: str) -> dict[str, Any]:
    info = server.engine.info
    return {
        "id": name,
        "object": "model",
        "created": server.created,
        "owned_by": "octavo",
        "root": server.model_names[0],
        "max_model_len": None if info is None else info.max_model_len,
    }
