"""`grpo view RUN…`: serves the page until it is interrupted, or writes it into one file."""

import argparse
import contextlib
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import uvicorn

from grpo.run_files import NoRun
from grpo.transport.errors import UserError
from grpo.transport.ports import port_number
from grpo.view.data import find_runs, overview
from grpo.view.export import export
from grpo.view.server import HOST, make_app

END_S = 3.0
"""Longest time that requests may take to end with the run."""
EPILOG = "exit codes: 0 ended by Ctrl-C, or the report is written; 2 there is no run, or the command line is wrong"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="a run's folder, or a folder of runs")
    parser.add_argument("--port", type=port_number, default=0, help="port on 127.0.0.1 (0: a free one)")
    parser.add_argument("--export", metavar="FILE", type=Path, help="write one self-contained HTML file instead")


def main(options: argparse.Namespace) -> int:
    """`grpo view`; the exit code."""
    folders: list[Path] = options.runs

    def runs() -> Mapping[str, Path]:
        return find_runs(folders)

    if not runs() and (missing := [folder for folder in folders if not folder.is_dir()]):
        raise NoRun(f"{missing[0]}: no such folder; give the output_dir of a run")
    if options.export is not None:
        page = export(runs())
        options.export.write_text(page)
        print(f"{options.export}: {len(page) / 1e6:.1f} MB")
        return 0
    with _listening(runs, options.port) as (server, listener), contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listener])
    return 0


@contextlib.contextmanager
def page_of(run: Path) -> Iterator[None]:
    """Serves the page of a run in a thread of this process, and prints its address."""
    with _listening(lambda: find_runs([run]), 0) as (server, listener):
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="grpo view", daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.should_exit = True
            thread.join(END_S)


@contextlib.contextmanager
def _listening(runs: Callable[[], Mapping[str, Path]], port: int) -> Iterator[tuple[uvicorn.Server, socket.socket]]:
    """A server and its socket; the address, with a new token, is printed."""
    with socket.create_server((HOST, port)) as listener:
        port, token = listener.getsockname()[1], secrets.token_urlsafe(24)
        print(f"http://{HOST}:{port}/?token={token}", flush=True)
        app = make_app(runs, token, port)
        threading.Thread(target=_read_once, args=(runs,), name="grpo view reads", daemon=True).start()
        config = uvicorn.Config(app, log_level="critical", access_log=False, timeout_graceful_shutdown=1)
        yield uvicorn.Server(config), listener


def _read_once(runs: Callable[[], Mapping[str, Path]]) -> None:
    """Reads the runs' metrics before anybody asks, so that the first page of a long run need not wait for them."""
    for name, run in runs().items():
        with contextlib.suppress(UserError, OSError):
            overview(name, run)
