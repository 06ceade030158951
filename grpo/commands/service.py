"""`grpo service --model M`: a training service for loops that are written against the `tinker` client."""

import argparse
import contextlib
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from grpo.configs.facts import model_facts
from grpo.configs.loading import load
from grpo.configs.train import TrainSettings
from grpo.deploy.programs import Signals
from grpo.server_process import server_process
from grpo.service_folder import SERVICE
from grpo.transport.cores import set_numeric_defaults
from grpo.transport.digests import write_digests
from grpo.transport.errors import UserError
from grpo.transport.logs import start_log
from grpo.transport.ports import free_port, listening_socket, port_number
from grpo.transport.run import RunFolder, join_run, only_one, open_run
from grpo.transport.status import STOPPED, StatusFile
from grpo.transport.weights.identity import base_identity, resolve_model

MAX_RANK = 128
JOIN_S = 10.0
SERVER_KEY_VAR = "GRPO_SERVICE_SERVER_KEY"
_TENANT = re.compile(r"[A-Za-z0-9_-]{1,40}")
EPILOG = """\
A stock client needs two environment variables, both from service.json in the output folder, which is written once the
service serves: TINKER_BASE_URL (base_url) and TINKER_API_KEY (api_key). The same command after any end, kill -9
included, goes on where it was. `grpo docs service` says what is served.

  grpo service --model Qwen/Qwen3-0.6B --output_dir outputs/service --port 8100

exit codes: 0 done, 1 the service failed, 2 the command line is wrong, 75 what it has done can be written no more (make
room, and give the same command again), 130 Ctrl-C, 143 SIGTERM"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("--model", required=True, metavar="M", help="base model: a folder or a Hugging Face id")
    parser.add_argument("--output_dir", required=True, type=Path, metavar="D", help="the service's folder")
    parser.add_argument("--port", type=port_number, help="default: a free one")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument(
        "--tenants", type=_tenants, default=("default",), metavar="A,B", help="names that get an API key each (default)"
    )
    parser.add_argument(
        "--sequence_len", metavar="N", help="longest sequence in tokens (2048, or what the model reads)"
    )
    parser.add_argument("--micro_batch_tokens", metavar="N", help="tokens of a pass (the longest sequence)")
    parser.add_argument("--max_rank", type=_rank, default=32, metavar="R", help="highest LoRA rank (%(default)s)")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="where to train")
    parser.add_argument(
        "--gpus", type=_gpus, default=1, metavar="N", help="GPUs that train, each with the whole base (1)"
    )
    parser.add_argument("--num_threads", metavar="N", help="the trainer's threads on a CPU")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--no_sampling", action="store_true", help="train only, without a grpo-infer")
    where.add_argument(
        "--server",
        metavar="URL,URL",
        type=_urls,
        default=(),
        help="grpo-infers with the same model and output_dir, instead of one of its own; "
        f"{SERVER_KEY_VAR} has their API key",
    )


def _tenants(text: str) -> tuple[str, ...]:
    names = text.split(",")
    if not all(map(_TENANT.fullmatch, names)) or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text[:80]!r}: expected different names of letters, digits, - and _")
    return tuple(names)


def _urls(text: str) -> tuple[str, ...]:
    urls = tuple(url.rstrip("/") for url in text.split(","))
    if not all(re.fullmatch(r"https?://[^/\s]+", url) for url in urls) or len(set(urls)) < len(urls):
        raise argparse.ArgumentTypeError(f"{text[:200]!r}: expected different addresses as http://HOST:PORT")
    return urls


def _rank(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_RANK:
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: expected a whole number from 1 to {MAX_RANK}")
    return int(text)


def _gpus(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: expected a whole number from 1 on")
    return int(text)


def main(options: argparse.Namespace) -> int:
    """Serves, and returns the exit code."""
    if find_spec("tinker") is None:
        raise UserError("the service speaks the schema of the client's package: pip install 'grpo-pipeline[service]'")
    settings = train_settings(options)
    folder = resolve_model(options.model)
    set_numeric_defaults()
    start_log()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    with Signals(), contextlib.ExitStack() as stack:
        stack.enter_context(only_one(options.output_dir, "launcher"))
        run = open_run(options.output_dir, resume="auto")
        _join(run, settings, options, base_identity(folder))
        status = stack.enter_context(_told(run))
        listening = stack.enter_context(contextlib.closing(listening_socket(options.host, options.port or 0)))
        servers, checks = options.server, list[Callable[[], None]]()
        if not (servers or options.no_sampling):
            os.environ[SERVER_KEY_VAR] = secrets.token_urlsafe(32)
            asked = server_settings(options, settings)
            started = stack.enter_context(server_process(asked, run.logs / "infer.log", output_dir=run.path))
            servers = (started.url,)
            checks.append(started.check)
        from grpo.service.ranks import other_ranks
        from grpo.service.run import serve

        join = None
        if options.gpus > 1:
            limits: Any = {"num": options.gpus, "max_rank": options.max_rank}
            join, check_ranks = stack.enter_context(other_ranks(settings, folder, run.logs, **limits))
            checks.append(check_ranks)

        def serving(left_out: Sequence[str]) -> None:
            status.set("serving", message=f"left out, not answering: {', '.join(left_out)}" if left_out else None)
            for check in checks:
                check()

        serve(
            settings,
            folder,
            run,
            listening=listening,
            tenants=options.tenants,
            max_rank=options.max_rank,
            servers=servers,
            server_key=os.environ.get(SERVER_KEY_VAR),
            check=serving,
            num_ranks=options.gpus,
            join=join,
        )
    return 0


def _join(run: RunFolder, settings: TrainSettings, options: argparse.Namespace, base_model: str) -> None:
    """Records in `run.json` what serves. Raises `UserError` where the models in the folder are of another base."""

    def same_base(earlier: Mapping[str, Any]) -> Sequence[tuple[str, Any, Any]]:
        if earlier.get("base_model", base_model) != base_model:
            raise UserError(f"{run.path} has models on {earlier['base_model']}, and this base is {base_model}")
        return ()

    about: dict[str, Any] = {"settings": settings.model_dump(mode="json"), "base_model": base_model}
    about |= {"tenants": list(options.tenants), "samples": not options.no_sampling}
    join_run(run.path, role=SERVICE, record=about, compare=same_base, run_id=run.run_id, timeout_s=JOIN_S)


@contextlib.contextmanager
def _told(run: RunFolder) -> Iterator[StatusFile]:
    """Yields the service's status file, which says in the end how it has ended; those of earlier servers go. A service
    that was told to end leaves the digests of its files."""
    for file in run.status.glob("infer.*.json"):
        file.unlink()
    status = StatusFile(run.status / f"{SERVICE}.json")
    status.set("starting")
    try:
        yield status
    except BaseException as error:
        with contextlib.suppress(OSError):  # of a full disk, which the error names
            status.failed(error)
        if isinstance(error, KeyboardInterrupt | SystemExit):
            write_digests(run.path, run_id=run.run_id)
        raise
    status.set(STOPPED)
    write_digests(run.path, run_id=run.run_id)


def train_settings(options: argparse.Namespace) -> TrainSettings:
    """Returns the trainer's settings. Raises `SettingsError`."""
    words = ["--optimizer", "adamw", "--lora_rank", "1"]
    for key in ("model", "output_dir", "sequence_len", "micro_batch_tokens", "device", "num_threads"):
        if (value := getattr(options, key)) is not None:
            words += [f"--{key}", str(value)]
    settings = load(TrainSettings, file=None, arguments=words).settings
    if options.sequence_len is None and (facts := model_facts(settings.model)) and facts.positions:
        settings = settings.model_copy(update={"sequence_len": min(settings.sequence_len, facts.positions)})
    return settings


def server_settings(options: argparse.Namespace, settings: TrainSettings) -> dict[str, Any]:
    """Returns the settings of the grpo-infer that samples."""
    return {
        "model": options.model,
        "host": "127.0.0.1",
        "port": free_port(),
        "dtype": settings.dtype,
        "max_model_len": settings.sequence_len,
        "max_lora_rank": options.max_rank,
        "api_key_var": SERVER_KEY_VAR,
        "device": options.device,
    }
