"""GET /: the chat page, one file without any other, and the header that lets a browser run nothing but it.

Stateless. Not here: what the page does (index.html).
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import Response


def router() -> APIRouter:
    page = files(__name__).joinpath("index.html").read_bytes()
    headers = {
        "content-security-policy": content_security_policy(page),
        "content-type": "text/html; charset=utf-8",
        "cache-control": "no-cache",
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
    }
    routes = APIRouter(include_in_schema=False)

    @routes.head("/")
    @routes.get("/")
    async def chat_page() -> Response:
        return Response(page, headers=headers)

    return routes


def content_security_policy(page: bytes) -> str:
    """Nothing from elsewhere, and of scripts and styles only those in the file, by their hashes."""
    rules = ["default-src 'none'", "connect-src 'self'", "img-src data:", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"]
    for directive, tag in (("script-src", b"script"), ("style-src", b"style")):
        blocks = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), page, re.DOTALL)
        rules.append(" ".join([directive, *(f"'sha256-{base64.b64encode(hashlib.sha256(block).digest()).decode()}'" for block in blocks)]))
    return "; ".join(rules)
