"""Who may send requests to the server: whoever has the API key, or, without one, no web page."""

import hashlib
import ipaddress
import secrets
from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

OPEN_PATHS = ("/health",)
Rule = Callable[[Scope], str | None]
"""Returns why a request is refused; None where it is not."""


def guarded(app: ASGIApp, *, key: str | None, host: str, key_var: str) -> ASGIApp:
    """Returns the application behind the rule for this key, or, without one, for a server on `host`; `key_var` names
    the environment variable that could hold a key."""
    rule, status = (_no_web_page(host, key_var), 403) if key is None else (_has_key(key), 401)

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or (message := rule(scope)) is None:
            await app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            error = {"type": "unauthorized", "message": message}
            await JSONResponse({"error": error}, status)(scope, receive, send)

    return guard


def _has_key(key: str) -> Rule:
    """Every route but /health asks for `Authorization: Bearer KEY`. Digests are compared, which are of equal length, so
    that the time tells nothing about the key."""
    expected = hashlib.sha256(key.encode()).digest()

    def rule(scope: Scope) -> str | None:
        header: bytes = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, sent = header.partition(b" ")
        digest = hashlib.sha256(sent.strip()).digest()
        right = scheme.lower() == b"bearer" and secrets.compare_digest(digest, expected)
        if right or scope["path"] in OPEN_PATHS:
            return None
        return "this server asks for its API key: send Authorization: Bearer KEY"

    return rule


def _no_web_page(own_host: str, key_var: str) -> Rule:
    """Refuses what a web page in somebody's browser can send, by its Origin, and what DNS rebinding makes of one, by a
    Host that is neither an address nor this server's own name."""
    own_names = {"localhost", own_host.lower()}

    def rule(scope: Scope) -> str | None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        host, origin = (headers.get(name, b"").decode("latin-1").lower() for name in (b"host", b"origin"))
        name = urlsplit(f"//{host}").hostname or ""
        if host and name not in own_names and not _is_address(name):
            return (
                f"the request is for the host {name[:100]!r}, and this server has no API key: ask it by its address, "
                f"or set {key_var} on both sides"
            )
        if origin and urlsplit(origin).netloc != host:
            return f"the request comes from a page of {origin[:100]!r}: set {key_var} on both sides"
        return None

    return rule


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
