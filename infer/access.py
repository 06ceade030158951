"""Decides who may send requests to the server: whoever has the API key, or, without a key, everybody but web pages."""

import ipaddress
import secrets
from collections.abc import Mapping
from contextlib import suppress
from urllib.parse import urlsplit

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send


def guarded(app: ASGIApp, *, key: str | None, host: str, key_var: str) -> ASGIApp:
    """Returns the application, guarded by its key or, without one, closed to web pages. `key_var` names the environment
    variable for a key, for messages."""

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope.get("headers", ())}
        if scope["type"] == "lifespan":
            message = None
        elif key is None:
            message = _of_a_web_page(headers, host.lower(), key_var)
        else:
            message = _without_key(headers, scope["path"], key)
        if message is None:
            await app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            error = {"type": "unauthorized", "message": message}
            await JSONResponse({"error": error}, 403 if key is None else 401)(scope, receive, send)

    return guard


def _without_key(headers: Mapping[str, str], path: str, key: str) -> str | None:
    """Returns why a request without `Authorization: Bearer KEY` is refused; None for /health and the right key."""
    scheme, _, sent = headers.get("authorization", "").partition(" ")
    right = secrets.compare_digest(sent.strip().encode("latin-1"), key.encode())
    if path == "/health" or (scheme.lower() == "bearer" and right):
        return None
    return "this server asks for its API key: send Authorization: Bearer KEY"


def _of_a_web_page(headers: Mapping[str, str], own_host: str, key_var: str) -> str | None:
    """Returns why a request is refused that comes from a web page: its Origin is another site, or, after DNS rebinding,
    its Host is neither an address nor this server's own name. None for all others."""
    host, origin = headers.get("host", "").lower(), headers.get("origin", "").lower()
    name = urlsplit(f"//{host}").hostname or ""
    known = not host or name in ("localhost", own_host)
    with suppress(ValueError):
        known = known or bool(ipaddress.ip_address(name))
    if not known:
        return (
            f"the request is for the host {name[:100]!r}, and this server has no API key: ask it by its address, "
            f"or set {key_var} on both sides"
        )
    if origin and urlsplit(origin).netloc != host:
        return f"the request comes from a page of {origin[:100]!r}: set {key_var} on both sides"
    return None
