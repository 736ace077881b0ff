"""GET /v1/octavo/steps: the engine's record of its last steps, for `octavo trace server`.

Lengths, times, block numbers and request ids of all clients; no text, no token ids. So beside the key it needs a client on this very
machine, and a piece is bounded. Stateless. Not here: the record (engine/events.py), what is made of it (trace/).
"""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import EngineDeadError
from octavo.server.errors import ApiError, engine_error
from octavo.server.origins import is_loopback
from octavo.server.state import ServerState

#: Steps in one answer at most.
MOST_STEPS = 512


def router(server: ServerState) -> APIRouter:
    routes = APIRouter(tags=["status"])

    @routes.get("/v1/octavo/steps", summary="The record of the last steps; with `after`, of the first ones later than that step")
    async def steps(request: Request) -> Response:
        if request.client is None or not is_loopback(request.client.host):
            raise ApiError(403, "the record of steps is for clients on the server's own machine only", code="loopback_only")
        limit = _number(request, "limit", MOST_STEPS)
        after = _number(request, "after", None)
        server.check_accepting()
        info = server.engine.info
        try:
            found = await server.engine.events(min(limit or 0, MOST_STEPS), after)
        except EngineDeadError as error:
            raise engine_error(error, server.retry_after) from None
        groups = [] if info is None else info.kv_groups
        about = {
            "object": "octavo.steps",
            "model": server.model_names[0],
            "block_size": groups[0].block_size if groups else 16,
            "num_blocks": [group.num_blocks for group in groups],
            # a core that was started again counts its steps from 1
            "restarts": server.engine.restarts,
            "steps": found,
        }
        return Response(msgspec.json.encode(about), headers={"content-type": "application/json", "cache-control": "no-store"})

    return routes


def _number(request: Request, name: str, default: int | None) -> int | None:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 15):
        raise ApiError(400, f"{name} must be a whole number that is not negative", param=name, code="invalid_value")
    return int(text)
