"""The application: routes, and the layers every request passes, from the outside in:

turnstile (not all at once) -> envelope (ids, errors) -> Host check -> CORS -> API key -> route. All of them are plain ASGI:
a layer that reads a reply before it passes it on would hide from the endpoint that its client has hung up.
Stateless. Not here: any endpoint, each group has a file; starting and stopping (run.py).
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import Request

import octavo
from octavo.server import models, page, recorded, status
from octavo.server.auth import AuthMiddleware
from octavo.server.envelope import EnvelopeMiddleware
from octavo.server.errors import ApiError
from octavo.server.generation import Generation
from octavo.server.origins import CorsMiddleware, HostMiddleware, accepted_hosts
from octavo.server.state import ServerState
from octavo.server.turnstile import TurnstileMiddleware

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
_WORDS = {404: "there is nothing at this path", 405: "this path does not take that method"}


def build_app(server: ServerState) -> FastAPI:
    # No interactive documentation: its pages load their scripts from elsewhere.
    app = FastAPI(title="Octavo", version=octavo.__version__, docs_url=None, redoc_url=None, redirect_slashes=False)

    @app.post(CHAT, tags=["generation"], summary="Answer a conversation")
    async def chat_completions(request: Request) -> Response:
        return Generation(server, "chat")

    @app.post(COMPLETIONS, tags=["generation"], summary="Continue a text")
    async def completions(request: Request) -> Response:
        return Generation(server, "completions")

    for router in (models.router(server), recorded.router(server), status.router(server), page.router()):
        app.include_router(router)
    app.exception_handler(HTTPException)(_raise_as_api_error)
    # the last one added is the outermost
    app.add_middleware(AuthMiddleware, keys=server.keys)
    app.add_middleware(CorsMiddleware, origins=server.config.allowed_origins)
    app.add_middleware(HostMiddleware, hosts=accepted_hosts(server.config.host, server.config.allowed_hosts))
    app.add_middleware(EnvelopeMiddleware)
    app.add_middleware(TurnstileMiddleware)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


async def _raise_as_api_error(request: Request, error: Exception) -> Response:
    """What the router itself found (404, 405) becomes an error like any other."""
    assert isinstance(error, HTTPException)
    headers = tuple((name.lower().encode(), value.encode()) for name, value in (error.headers or {}).items())
    word = _WORDS.get(error.status_code, "the request cannot be served")
    raise ApiError(error.status_code, word, code="not_found" if error.status_code == 404 else None, headers=headers)


def _openapi(app: FastAPI) -> dict[str, Any]:
    """The routes, with what input processes accept as a body: the endpoints themselves never look at it."""
    if app.openapi_schema is None:
        from octavo.server.protocol import ChatRequest, CompletionRequest

        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        for path, model in ((CHAT, ChatRequest), (COMPLETIONS, CompletionRequest)):
            schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas |= schema.pop("$defs", {}) | {model.__name__: schema}
            content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
            document["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
        app.openapi_schema = document
    return app.openapi_schema
