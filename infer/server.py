"""`grpo-infer` from start to end: checks that need no model, the engine, vLLM's routes and ours, the API key."""

import asyncio
import errno
import hashlib
import ipaddress
import logging
import os
import secrets
import signal
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

import uvicorn
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from configs.infer import InferSettings
from infer import vllm_api
from infer.adapters import BaseModel, linear_shapes, tensor_shapes
from infer.in_place import InPlaceTable
from infer.policies import PolicyTable
from infer.rest import Rests
from infer.rest_routes import RestRoutes, WakeFirst
from infer.routes import PolicyRoutes
from transport import imports
from transport.errors import START_AGAIN
from transport.weights.identity import base_identity, resolve_model

log = logging.getLogger(__name__)

OPEN_PATHS = ("/health",)
KEEP_ALIVE_S = 300
"""Longer than any client keeps an idle connection, so that none is closed under a request."""
SHUTDOWN_S = 2
"""For requests that run when the server is told to end."""


class ApiKeyGuard:
    """Around vLLM's application: every route but /health asks for `Authorization: Bearer KEY`."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._digest = _digest(key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] in OPEN_PATHS or self._has_key(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            message = "this server asks for its API key: send Authorization: Bearer KEY"
            await JSONResponse({"error": {"type": "unauthorized", "message": message}}, 401)(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        header: bytes = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, key = header.partition(b" ")
        return scheme.lower() == b"bearer" and secrets.compare_digest(_digest(key.strip()), self._digest)


def _digest(key: bytes) -> bytes:
    """Of equal length for all keys, so that comparing tells nothing about them."""
    return hashlib.sha256(key).digest()


def run(settings: InferSettings) -> int:
    """Serve until told to end; the exit code: 1 after an error, which is the last line on standard error, `START_AGAIN`
    where the engine's process has ended by itself, 143 and 130 after SIGTERM and SIGINT, which end it at any moment."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _exit_on_signal)
    try:
        model_dir = resolve_model(settings.model).resolve()
        with listening_socket(settings.host, settings.port) as sock:
            key = os.environ.get(settings.api_key_var) or None
            _warn_if_open(settings, key)
            vllm_api.prepare_environment()
            asyncio.run(_serve(settings, model_dir, sock, key))
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    except (OSError, ValueError, RuntimeError) as error:
        log.debug("failed", exc_info=True)
        print(f"error: {error}", file=sys.stderr, flush=True)
        return START_AGAIN if isinstance(error, vllm_api.EngineEnded) else 1
    return 0


def _exit_on_signal(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket bound to the address, so that a port in use shows before the model is loaded.

    Raises OSError with the way out.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            message = f"port {port} on {host} is in use; give another with --port, or end the program that has it"
        else:
            message = f"cannot bind to {host}:{port}: {error.strerror}; set host to an address of this machine"
        raise OSError(message) from None
    return sock


def _warn_if_open(settings: InferSettings, key: str | None) -> None:
    try:
        local = ipaddress.ip_address(settings.host).is_loopback
    except ValueError:
        local = settings.host == "localhost"
    if not local and key is None:
        log.warning(
            "serving on %s without an API key: anyone who reaches it can use the model; set %s",
            settings.host,
            settings.api_key_var,
        )


async def _serve(settings: InferSettings, model_dir: Path, sock: socket.socket, key: str | None) -> None:
    """Builds the engine, then serves until a signal or the engine's death."""
    base_shapes = linear_shapes(model_dir)
    identity = base_identity(model_dir)
    async with vllm_api.embedded(settings, model_dir=model_dir, sock=sock) as vllm:
        if settings.colocate:
            await vllm.engine.export_base_weights(Path(settings.output_dir), identity)
        base = BaseModel(
            identity=identity,
            linear_shapes=base_shapes,
            max_rank=vllm_api.served_rank(settings),
            dtype=vllm.engine.torch_dtype,
            noisy_norms=vllm.engine.noisy_norms,
        )
        table = _table(settings, vllm, base, model_dir)
        imports.done()
        rests = Rests(memory=vllm.engine, timeout_s=settings.canary_timeout_s) if settings.sleep_mode else None
        routes = PolicyRoutes(settings=settings, engine=vllm.engine, table=table, rests=rests)
        routes.attach(vllm.app)
        RestRoutes(rests=rests, table=table).attach(vllm.app)
        error: BaseException | None = None
        try:
            await _serve_app(vllm.app, vllm.engine, rests, sock, key)
        except BaseException as caught:
            error = caught
            raise
        finally:
            routes.telling.ended(error)


def _table(
    settings: InferSettings, vllm: vllm_api.Embedded, base: BaseModel, model_dir: Path
) -> PolicyTable | InPlaceTable:
    """With LoRA, versions are adapters, several at once; without, they replace the model's weights, one at a time."""
    output_dir, tolerance, timeout_s = Path(settings.output_dir), settings.canary_tolerance, settings.canary_timeout_s
    if settings.enable_lora:
        return PolicyTable(
            engine=vllm.engine,
            names=vllm.chat_models,
            output_dir=output_dir,
            base=base,
            tolerance=tolerance,
            timeout_s=timeout_s,
        )
    return InPlaceTable(
        engine=vllm.engine,
        names=vllm.chat_models,
        output_dir=output_dir,
        base=base,
        shapes=tensor_shapes(model_dir),
        tolerance=tolerance,
        timeout_s=timeout_s,
    )


async def _serve_app(
    app: Any, engine: vllm_api.Engine, rests: Rests | None, sock: socket.socket, key: str | None
) -> None:
    """Serves HTTP. Waits for requests; ended by a signal (uvicorn raises it again) or by the engine's death."""
    served = app if rests is None else WakeFirst(app, rests)
    config = uvicorn.Config(
        served if key is None else ApiKeyGuard(served, key),
        log_config=None,
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
    server = uvicorn.Server(config)
    app.state.server = server
    watch = asyncio.create_task(vllm_api.until_dead(engine))
    watch.add_done_callback(lambda _: setattr(server, "should_exit", True))
    try:
        log.info("serving on %s:%d", *sock.getsockname()[:2])
        await server.serve(sockets=[sock])
    finally:
        watch.cancel()
    if engine.dead:
        raise vllm_api.EngineEnded("vLLM's engine process has ended by itself; its last lines are above")
