"""Two real servers, of which one is killed and restarted while the run goes on."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.infer.server_process import end, free_port, start, wait_until_healthy
from transport.run import found_run
from transport.weights.filesystem import FilesystemPolicyReader

pytestmark = [pytest.mark.e2e, pytest.mark.chaos]

ROOT = Path(__file__).parents[2]
PRESET = ROOT / "configs/quickstart"


def program(name: str, preset: str, log: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", f"{name}.cli", str(PRESET / preset), *options]
    with log.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, cwd=ROOT)


def until(condition: Callable[[], bool], *processes: subprocess.Popen[bytes], timeout_s: float = 90) -> None:
    """Returns when it holds; fails after the time, or when one of the processes ends."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert all(process.poll() is None for process in processes), "a program has ended"
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_run_goes_on_while_one_of_two_servers_is_killed_and_catches_up_after_its_restart(tmp_path: Path) -> None:
    run = found_run(tmp_path / "run")
    ports = [free_port(), free_port()]
    urls = [f"http://127.0.0.1:{port}" for port in ports]

    def start_server(index: int, name: str) -> subprocess.Popen[bytes]:
        arguments = {
            "model": PRESET / "model",
            "output_dir": run.path,
            "port": ports[index],
            "dtype": "float32",
            "max_model_len": 128,
        }
        return start(arguments, log=tmp_path / f"{name}.log", environment={})

    with ExitStack() as stack:

        def tracked(process: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
            stack.callback(lambda: end(process) if process.poll() is None else None)
            return process

        survivor, victim = (tracked(start_server(index, f"infer{index}")) for index in (0, 1))
        for url, server, name in zip(urls, (survivor, victim), ("infer0", "infer1"), strict=True):
            wait_until_healthy(url, server, tmp_path / f"{name}.log")
        shared = ["--output_dir", str(run.path), "--run_id", run.run_id]
        train = tracked(program("trainer", "train.yaml", tmp_path / "train.log", *shared, "--num_threads", "1"))
        several = ["--client.base_url", f"[{urls[0]}/v1,{urls[1]}/v1]", "--max_steps", "500", "--batch_size", "64"]
        orch = tracked(program("orchestrator", "orch.yaml", tmp_path / "orch.log", *shared, *several))
        reader = FilesystemPolicyReader(run.broadcasts, run_id=run.run_id)
        until(lambda: (reader.latest() or 0) >= 3, train, orch, survivor, victim)

        victim.send_signal(signal.SIGKILL)
        victim.wait()
        at_death = reader.latest() or 0
        until(lambda: (reader.latest() or 0) >= at_death + 5, train, orch, survivor)

        returned = tracked(start_server(1, "infer1_again"))
        wait_until_healthy(urls[1], returned, tmp_path / "infer1_again.log")
        log = tmp_path / "orch.log"
        until(lambda: f"{urls[1]} gets requests again" in log.read_text(), train, orch, survivor, returned)
        at_return = reader.latest() or 0
        until(lambda: (reader.latest() or 0) >= at_return + 3, train, orch, survivor, returned)

        def serves_requests_of_new_versions() -> bool:
            in_flight = httpx.get(f"{urls[1]}/policy/info").json()["in_flight"]
            return any(int(version) >= at_return and num > 0 for version, num in in_flight.items())

        until(serves_requests_of_new_versions, train, orch, survivor, returned)
