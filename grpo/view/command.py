"""`grpo view RUN…`: serves the page until it is interrupted, or writes it into one file."""

import argparse
import contextlib
import secrets
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

import uvicorn

from grpo.run_files import NoRun
from grpo.view.data import find_runs
from grpo.view.export import export
from grpo.view.server import HOST, make_app

EPILOG = "exit codes: 0 ended by Ctrl-C, or the report is written; 2 there is no run, or the command line is wrong"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of `grpo view`."""
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="a run's folder, or a folder of runs")
    parser.add_argument("--port", type=int, default=0, help="port on 127.0.0.1 (0: a free one)")
    parser.add_argument("--export", metavar="FILE", type=Path, help="write one self-contained HTML file instead")


def main(options: argparse.Namespace) -> int:
    """`grpo view`; the exit code."""
    folders: list[Path] = options.runs

    def runs() -> Mapping[str, Path]:
        return find_runs(folders)

    if not runs() and (missing := [folder for folder in folders if not folder.is_dir()]):
        print(f"error: {missing[0]}: no such folder; give the output_dir of a run", file=sys.stderr)
        return 2
    if options.export is not None:
        return _written(options.export, export(runs()))
    with socket.create_server((HOST, options.port)) as listener:
        port = listener.getsockname()[1]
        token = secrets.token_urlsafe(24)
        print(f"http://{HOST}:{port}/?token={token}", flush=True)
        app = make_app(runs, token, port)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1))
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[listener])
    return 0


def _written(path: Path, page: str) -> int:
    try:
        path.write_text(page)
    except (OSError, NoRun) as error:
        print(f"error: {path} cannot be written: {error}; give another FILE", file=sys.stderr)
        return 2
    print(f"{path}: {len(page) / 1e6:.1f} MB")
    return 0
