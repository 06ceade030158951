"""The real server as a process: how it ends, and that it leaves nothing behind."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.infer.server_process import Server, children_of, free_port, running, start

pytestmark = [pytest.mark.e2e, pytest.mark.chaos]

MODEL = Path(__file__).parents[2] / "configs/quickstart/model"


def wait_for(condition: Callable[[], bool], *, timeout_s: float, what: str) -> float:
    """Seconds until the condition held; fails after `timeout_s`."""
    started_s = time.monotonic()
    while not condition():
        assert time.monotonic() - started_s < timeout_s, what
        time.sleep(0.05)
    return time.monotonic() - started_s


def alive(pids: list[int]) -> list[int]:
    """Those of the processes that still run; a zombie does not."""
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


def launch(folder: Path) -> Server:
    port = free_port()
    log = folder / "infer.log"
    process = start({"model": MODEL, "output_dir": folder / "run", "port": port}, log=log, environment={})
    return Server(url=f"http://127.0.0.1:{port}", process=process, log=log, headers={})


def test_kill_9_of_a_serving_server_leaves_no_process(tmp_path: Path) -> None:
    with running(log=tmp_path / "infer.log", model=MODEL, output_dir=tmp_path) as server:
        pids = server.engine_pids()
        assert len(pids) >= 1
        server.process.kill()
        server.process.wait()
        wait_for(lambda: not alive(pids), timeout_s=60, what=f"{alive(pids)} outlived the server")


def test_kill_9_while_the_engine_starts_leaves_no_process(tmp_path: Path) -> None:
    server = launch(tmp_path)
    wait_for(lambda: len(children_of(server.process.pid)) >= 2, timeout_s=120, what="no engine process appeared")
    pids = children_of(server.process.pid)
    server.process.kill()
    server.process.wait()
    # The engine's process learns of it when its worker is made, after some seconds of imports.
    wait_for(lambda: not alive(pids), timeout_s=120, what=f"{alive(pids)} outlived the server")


def test_sigterm_ends_a_serving_server_soon_and_whole(tmp_path: Path) -> None:
    with running(log=tmp_path / "infer.log", model=MODEL, output_dir=tmp_path) as server:
        pids = server.engine_pids()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 143
        wait_for(lambda: not alive(pids), timeout_s=60, what="the engine outlived the server")


def test_sigint_while_the_engine_starts_ends_it_soon(tmp_path: Path) -> None:
    server = launch(tmp_path)
    wait_for(lambda: len(children_of(server.process.pid)) >= 2, timeout_s=120, what="no engine process appeared")
    pids = children_of(server.process.pid)
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(60) == 130
    wait_for(lambda: not alive(pids), timeout_s=120, what=f"{alive(pids)} outlived the server")


def test_a_server_whose_engine_dies_ends_with_an_error(tmp_path: Path) -> None:
    with running(log=tmp_path / "infer.log", model=MODEL, output_dir=tmp_path) as server:
        engine = max(server.engine_pids(), key=lambda pid: psutil.Process(pid).memory_info().rss)
        psutil.Process(engine).kill()
        assert server.process.wait(60) == 1
        assert server.log.read_text().splitlines()[-1].startswith("error: vLLM's engine process has ended")


def test_settings_that_the_model_cannot_honour_end_with_an_error(tmp_path: Path) -> None:
    port = free_port()
    log = tmp_path / "infer.log"
    arguments = {"model": MODEL, "output_dir": tmp_path, "port": port, "kv_cache_memory_bytes": 1000}
    process = start(arguments, log=log, environment={})
    assert process.wait(240) == 1
    assert log.read_text().splitlines()[-1].startswith("error: ")
