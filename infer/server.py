"""`grpo-infer` from start to end: checks that need no model, the engine, vLLM's routes and ours, the API key."""

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from pathlib import Path

import uvicorn
from grpo.configs.infer import InferSettings
from grpo.infer.access import guarded
from grpo.infer.arguments import ArgumentError, device_of, prepare_environment, served_rank
from grpo.infer.checks import BaseModel, check_tokenizer, is_stored_quantized, tensor_shapes
from grpo.infer.engine import EngineEnded, embedded
from grpo.infer.routes import PolicyRoutes
from grpo.infer.versions import VersionTable
from grpo.transport.cores import available_cores
from grpo.transport.errors import START_AGAIN
from grpo.transport.keys import is_loopback
from grpo.transport.logs import printable, start_log
from grpo.transport.ports import listening_socket
from grpo.transport.run import RunFolder
from grpo.transport.run_warnings import kept_warnings
from grpo.transport.status import server_file
from grpo.transport.weights.chat_template import check_arguments
from grpo.transport.weights.dequantized import wait_for_dequantized
from grpo.transport.weights.http import FetchedVersions
from grpo.transport.weights.identity import base_identity, resolve_model

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 300
"""Longer than any client keeps an idle connection, so that none is closed under a request."""
DEQUANTIZED_S = 1200.0
"""How long the trainer is waited for to write the values of its quantized base."""
SHUTDOWN_S = 2
"""For requests that run when the server is told to end."""


def run(settings: InferSettings) -> int:
    """Serves until told to end. Returns the exit code: after an error, which is the last line on standard error, 1, 2
    where this vLLM cannot honour the settings, `START_AGAIN` where the engine's process has ended by itself; 143 and
    130 after SIGTERM and SIGINT, which end it at any moment."""
    start_log()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    address = f"{settings.host}:{settings.port}"
    name = server_file(settings.host, settings.port).removesuffix(".json")
    kept = kept_warnings(Path(settings.output_dir), name, program=f"grpo-infer {address}")
    try:
        model_dir = resolve_model(settings.model).resolve()
        check_tokenizer(model_dir)
        check_arguments(model_dir, settings.chat_template_kwargs)
        with kept, listening_socket(settings.host, settings.port) as sock:
            key = os.environ.get(settings.api_key_var) or None
            if key is None and not is_loopback(settings.host):
                log.warning("anyone who reaches %s can use the model; set %s", settings.host, settings.api_key_var)
            prepare_environment()
            asyncio.run(_serve(settings, model_dir, sock, key))
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    except Exception as error:
        known = isinstance(error, OSError | ValueError | RuntimeError)
        log.log(logging.DEBUG if known else logging.ERROR, "failed", exc_info=True)
        print(f"error: {printable(str(error) if known else repr(error))}", file=sys.stderr, flush=True)
        return START_AGAIN if isinstance(error, EngineEnded) else 2 if isinstance(error, ArgumentError) else 1
    return 0


async def _serve(settings: InferSettings, model_dir: Path, sock: socket.socket, key: str | None) -> None:
    """Builds the engine, then serves until a signal (uvicorn raises it again) or the engine's end."""
    identity, device = base_identity(model_dir), device_of(settings)
    if device == "cpu":
        threads = os.environ.get("OMP_NUM_THREADS", "1")
        log.info("computes with %s threads (num_threads); this process may use %d cores", threads, available_cores())
    model_dir = base_folder(settings, model_dir, identity, device)
    shapes = tensor_shapes(model_dir)
    async with embedded(settings, model_dir=model_dir, sock=sock) as (app, engine):
        if settings.colocate:
            await engine.or_end(engine.export_base_weights(Path(settings.output_dir), base_identity(model_dir)))
        base = BaseModel(
            identity=identity,
            quantization=settings.base_quantization,
            shapes=shapes,
            vocab_size=engine.vocab_size,
            max_model_len=engine.max_model_len,
            max_rank=served_rank(settings) if settings.enable_lora else None,
            dtype=engine.torch_dtype,
            noisy_norms=engine.noisy_norms,
        )
        folder, fetched = Path(settings.output_dir), None
        if (url := settings.weight_broadcast_url) is not None:
            shared_key = RunFolder(path=folder, run_id="").key(settings.weight_broadcast_key_var)
            copies = folder / "fetched" / f"{settings.host}_{settings.port}".replace(":", "_")
            fetched = FetchedVersions(copies, url=url, key=shared_key, timeout_s=settings.canary_timeout_s)
        table = VersionTable(
            engine,
            base,
            output_dir=folder,
            tolerance=settings.canary_tolerance,
            timeout_s=settings.canary_timeout_s,
            num_slots=settings.max_loras,
            fetched=fetched,
        )
        engine.count_requests(table.using_key)
        gc.freeze()  # what is there stays: the collector never looks at it
        gc.enable()
        routes = PolicyRoutes(settings, engine, table)
        app.include_router(routes.router(), prefix="/policy")
        config = uvicorn.Config(
            guarded(app, key=key, host=settings.host, key_var=settings.api_key_var),
            log_config=None,
            access_log=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=SHUTDOWN_S,
        )
        app.state.server = server = uvicorn.Server(config)
        ended, announcing = asyncio.create_task(engine.ended.wait()), asyncio.create_task(routes.announce())
        ended.add_done_callback(lambda _: setattr(server, "should_exit", True))
        try:
            log.info("serving on %s:%d", *sock.getsockname()[:2])
            await server.serve(sockets=[sock])
            if engine.ended.is_set():
                raise engine.fault()
        finally:
            ended.cancel()
            announcing.cancel()
            if fetched is not None:
                fetched.close()
            routes.report_end(sys.exception())


def base_folder(settings: InferSettings, model_dir: Path, identity: str, device: str) -> Path:
    """Returns the checkpoint to serve: the model's, or with `base_quantization` the values of it that the trainer has
    written, which are waited for. Raises `DeadlineError`."""
    own = device == "cuda" and not settings.colocate and is_stored_quantized(model_dir)
    if settings.base_quantization is None or own:
        return model_dir
    log.info("waiting for the values of the trainer's %s base", settings.base_quantization)
    return wait_for_dequantized(
        Path(settings.output_dir),
        base_model=identity,
        quantization=settings.base_quantization,
        timeout_s=DEQUANTIZED_S,
    )
