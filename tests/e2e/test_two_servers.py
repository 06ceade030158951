"""Two real servers, of which one is killed and restarted while the run goes on."""

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.runs import ROOT, until
from tests.infer.server_process import children_of, end, free_port, start, wait_until_gone, wait_until_healthy
from transport.run import create_run
from transport.weights.store import PolicyReader

pytestmark = [pytest.mark.e2e, pytest.mark.chaos, pytest.mark.timeout(1800)]

PRESET = ROOT / "configs/quickstart"
BATCH_SIZE, GROUP_SIZE = 64, 16
TRAIN = ("--num_threads", "1", "--max_steps", "2000")
SETTINGS = ("--max_steps", "2000", "--batch_size", str(BATCH_SIZE), "--eval.num_examples", "0")


def program(name: str, preset: str, log: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", f"{name}.cli", str(PRESET / preset), *options]
    with log.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, cwd=ROOT)


def make_way(*processes: subprocess.Popen[bytes]) -> None:
    """Gives the processor to others first: a run at full speed takes it from a server that starts."""
    for process in processes:
        for pid in (process.pid, *children_of(process.pid)):
            for thread in psutil.Process(pid).threads():
                os.setpriority(os.PRIO_PROCESS, thread.id, 19)


def newest_in_flight(client: httpx.Client) -> int:
    """The newest version of which the server has requests; -1 where it has none."""
    counts: dict[str, int] = client.get("/policy/info").json()["in_flight"]
    return max((int(version) for version, num in counts.items() if num > 0), default=-1)


def proved_since(ledger: Path, url: str, since: float) -> list[int]:
    """The versions that the server has proved since a moment."""
    with closing(sqlite3.connect(ledger)) as database:
        query = "SELECT version FROM proofs WHERE server = ? AND proved_at > ? ORDER BY proved_at"
        return [version for (version,) in database.execute(query, (url, since))]


def check_that_nothing_is_lost(rows: Sequence[tuple[Any, ...]]) -> None:
    """`rows`: group, state, reason and step of every rollout that was issued, after the run was ended by a signal."""
    groups = Counter(group for group, *_ in rows)
    assert groups == dict.fromkeys(range(len(groups)), GROUP_SIZE)
    shipped = Counter(step for *_, step in rows if step is not None)
    assert shipped == dict.fromkeys(range(1, len(shipped) + 1), BATCH_SIZE)
    assert {reason for _, state, reason, _ in rows if state == "dropped"} <= {"run_ended"}
    assert all(step is not None for _, state, _, step in rows if state != "dropped")


def test_a_run_goes_on_while_one_of_two_servers_is_killed_and_it_proves_the_versions_in_use_after_its_restart(
    tmp_path: Path,
) -> None:
    run = create_run(tmp_path / "run")
    ports = [free_port(), free_port()]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    orch_log = tmp_path / "orch.log"

    with ExitStack() as stack:

        def tracked(process: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
            stack.callback(lambda: end(process) if process.poll() is None else None)
            return process

        def start_server(index: int, name: str) -> subprocess.Popen[bytes]:
            model = {"model": PRESET / "model", "dtype": "float32", "max_model_len": 128}
            arguments = {"output_dir": run.path, "port": ports[index], **model}
            return tracked(start(arguments, log=tmp_path / f"{name}.log", environment={}))

        survivor, victim = start_server(0, "infer0"), start_server(1, "infer1")
        shared = ["--output_dir", str(run.path), "--run_id", run.run_id]
        train = tracked(program("trainer", "run.yaml", tmp_path / "train.log", *shared, *TRAIN))
        both = ["--client.base_url", f"{urls[0]}/v1,{urls[1]}/v1"]
        orch = tracked(program("orchestrator", "run.yaml", orch_log, *shared, *both, *SETTINGS))
        wait_until_healthy(urls[1], victim, tmp_path / "infer1.log")
        second = stack.enter_context(httpx.Client(base_url=urls[1], timeout=30))
        until(lambda: newest_in_flight(second) >= 1, train, orch, survivor, victim)
        make_way(survivor, train, orch)

        pids = children_of(victim.pid)
        assert pids
        died_at = time.time()
        victim.send_signal(signal.SIGKILL)
        victim.wait()
        reader = PolicyReader(run.broadcasts, run_id=run.run_id)
        at_death = reader.latest() or 0
        wait_until_gone(pids)
        returned = start_server(1, "infer1_again")
        until(lambda: (reader.latest() or 0) >= at_death + 3, train, orch, survivor)

        wait_until_healthy(urls[1], returned, tmp_path / "infer1_again.log")
        until(lambda: newest_in_flight(second) > at_death, train, orch, survivor, returned)
        proved = proved_since(run.path / "ledger.sqlite", urls[1], died_at)
        assert proved
        assert min(proved) >= at_death
        server_log = (tmp_path / "infer1_again.log").read_text()
        assert all(f"version {version} is live: canary" in server_log for version in proved)
        at_return = reader.latest() or 0
        until(lambda: newest_in_flight(second) > at_return, train, orch, survivor, returned)
        assert end(orch) == 128 + signal.SIGTERM

    with sqlite3.connect(run.path / "ledger.sqlite") as database:
        check_that_nothing_is_lost(database.execute("SELECT group_id, state, reason, step FROM rollouts").fetchall())
