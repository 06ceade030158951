"""Runs the service: the base model, the log, the thread that trains, and the routes, until it is told to end."""

import asyncio
import json
import logging
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import uvicorn
from grpo.configs.train import TrainSettings
from grpo.service.engine import Engine
from grpo.service.log import CommandLog
from grpo.service.recorder import Recorder
from grpo.service.routes import Futures, Routes
from grpo.service.sampling import Sampling
from grpo.service.training import Base, OtherRanks
from grpo.trainer.memory import keep_freed_memory
from grpo.trainer.startup import device_for, set_threads
from grpo.transport.folders import write_atomic
from grpo.transport.limits import raise_file_limit
from grpo.transport.run import RunFolder
from grpo.transport.weights.identity import base_identity
from transformers import AutoTokenizer

log = logging.getLogger(__name__)

SERVICE_FILE = "service.json"
_KEYS_FILE = "service.keys.json"
_LOG_FILE = "commands.sqlite"


def tenant_keys(folder: Path, tenants: Sequence[str]) -> dict[str, str]:
    """Returns the tenants' API keys by name, which stay the same in later starts in the same folder."""
    file = folder / _KEYS_FILE
    known: dict[str, str] = json.loads(file.read_text()) if file.exists() else {}
    keys = {name: known.get(name) or f"tml-{secrets.token_urlsafe(32)}" for name in tenants}
    write_atomic(file, json.dumps(known | keys).encode(), private=True)
    return keys


def serve(
    settings: TrainSettings,
    model_folder: Path,
    run: RunFolder,
    *,
    listening: socket.socket,
    tenants: Sequence[str],
    max_rank: int,
    servers: Sequence[str],
    server_key: str | None,
    check: Callable[[Sequence[str]], None],
    num_ranks: int = 1,
    join: Callable[[Base], OtherRanks] | None = None,
) -> None:
    """Serves on the socket `listening`. `servers` are the addresses of the grpo-infers that sample, empty for no
    sampling, and `server_key` is their key; `check` is called each second, with those that do not answer, and may
    raise; `join` are the other ranks, of which there are `num_ranks` with this one. Returns after SIGINT or SIGTERM.
    Raises `LogFailed` where the log cannot be written, and `RankGone`."""
    raise_file_limit()  # each client keeps connections open
    device = device_for(settings.device)
    set_threads(settings.num_threads)
    if device.type == "cpu":
        keep_freed_memory()
    base = Base(settings, model_folder, device, max_rank=max_rank, num_ranks=num_ranks)
    if join is not None:
        base.others = join(base)
    keys = tenant_keys(run.path, tenants)
    sampling = servers, server_key
    asyncio.run(_serve(base, model_folder.resolve(), run, sampling, listening=listening, keys=keys, check=check))


async def _serve(
    base: Base,
    model_folder: Path,
    run: RunFolder,
    samples_on: tuple[Sequence[str], str | None],
    *,
    listening: socket.socket,
    keys: Mapping[str, str],
    check: Callable[[Sequence[str]], None],
) -> None:
    commands, futures, sampling = CommandLog(run.path / _LOG_FILE), Futures(), None
    if samples_on[0]:
        sampling = Sampling(
            commands,
            run,
            urls=samples_on[0],
            key=samples_on[1],
            base_model=base_identity(model_folder),
            max_tokens=base.settings.sequence_len,
            finished=futures.finished,
        )
    publish = None if sampling is None else sampling.publish
    recorder = Recorder(run.path, commands, share=base.settings.proofs.share)
    engine = Engine(base, commands, run.path, recorder=recorder, finished=futures.finished, publish=publish)
    routes = Routes(
        model=base.settings.model,
        tokenizer=str(model_folder),
        max_tokens=base.max_tokens,
        keys=keys,
        commands=commands,
        engine=engine,
        sampling=sampling,
        futures=futures,
    )
    config = uvicorn.Config(routes.app(), log_level="warning", timeout_graceful_shutdown=1, timeout_keep_alive=60)
    http = uvicorn.Server(config)
    recorder.start(lambda: vocabulary(model_folder))
    engine.start()
    if sampling is not None:
        sampling.start()
    listening.listen()
    serving = asyncio.create_task(http.serve([listening]))
    try:
        _announce(run, listening, keys)  # the socket listens: who comes early waits
        while not serving.done():
            check(sampling.left_out if sampling is not None else ())
            commands.check()
            engine.check()
            await asyncio.wait((serving,), timeout=1.0)
    finally:
        http.should_exit = True
        await asyncio.gather(serving, return_exceptions=True)
        if sampling is not None:
            await sampling.close()
        await asyncio.to_thread(engine.close)
        await asyncio.to_thread(recorder.close)
        commands.close()
        (run.path / SERVICE_FILE).unlink(missing_ok=True)


def vocabulary(model_folder: Path) -> list[str]:
    """Returns the text of each token id alone, from 0; of one that is no whole character, the signs that stand for its
    bytes."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder, local_files_only=True, trust_remote_code=False)
    names = {number: name for name, number in tokenizer.get_vocab().items()}
    single: list[str] = tokenizer.batch_decode([[number] for number in range(max(names) + 1)])
    return [names.get(number, text) if "\ufffd" in text else text for number, text in enumerate(single)]


def _announce(run: RunFolder, listening: socket.socket, keys: Mapping[str, str]) -> None:
    """Writes where the service is and its keys, for this user alone."""
    host, port = listening.getsockname()[:2]
    host = socket.gethostname() if host in ("0.0.0.0", "::") else host
    address = f"[{host}]" if ":" in host else host
    about = {"base_url": f"http://{address}:{port}", "api_key": next(iter(keys.values())), "api_keys": dict(keys)}
    write_atomic(run.path / SERVICE_FILE, json.dumps(about, indent=1).encode(), private=True)
    print(f"{about['base_url']} serves; {run.path / SERVICE_FILE} has the API keys", flush=True)
