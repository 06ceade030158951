"""`grpo launch quickstart --on slurm` on a real Slurm: servers on two machines, the trainer on two others, over gloo.

The machines are names of this one, each with a slurmd of its own; their processes reach each other by addresses only.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.slurm import CPUS, Slurm, missing
from transport.folders import steps_in

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.e2e,
    pytest.mark.timeout(540),
    pytest.mark.skipif(bool(missing()), reason=f"Slurm is not installed here: no {', '.join(missing())}"),
    pytest.mark.skipif(os.getuid() != 0, reason="Slurm's machines are started by root here"),
]
ROOT = Path(__file__).parents[2]
NUM_STEPS = 12
TOPOLOGY = {
    "infer": {"replicas": 2, "cpus": CPUS},
    "train": {"nodes": 2, "cpus": CPUS},
    "slurm": {"time": "20"},
    "slurm_notice_s": 60,
}


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    cluster = Slurm(tmp_path_factory.mktemp("slurm"), num_nodes=7)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


class Launched:
    """`grpo launch` with one run's settings, given again and again."""

    def __init__(self, slurm: Slurm, folder: Path, topology: Mapping[str, Any]) -> None:
        self.slurm, self.folder = slurm, folder
        self.words = ["quickstart", "--on", "slurm", "--output_dir", str(folder), "--device", "cpu"]
        self.words += ["--max_steps", str(NUM_STEPS), "--orch.batch_size", "128", "--orch.eval.num_examples", "32"]
        self.words += ["--train.num_threads", "1", "--infer.num_threads", "1", "--train.ckpt.interval", "1"]
        self.words += ["--topology", json.dumps(topology)]

    def __call__(self, *more: str) -> str:
        """What it prints."""
        command = [sys.executable, "-m", "grpo.cli", "launch", *self.words, *more]
        environment = self.slurm.environment | {"VLLM_API_KEY": "a-secret-of-this-test", "OMP_NUM_THREADS": "1"}
        environment["GRPO_ENV_KEY"] = "another-secret-of-this-test"
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def published(self) -> int:
        return max(steps_in(self.folder / "broadcasts"), default=-1)

    def until(self, there: Callable[[], object], limit_s: float = 200) -> None:
        deadline = time.monotonic() + limit_s
        while not there():
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.1)

    def logs(self) -> str:
        files = sorted((self.folder / "logs").glob("*.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in files)


def test_a_run_loses_a_machine_and_its_time_is_cut_short_and_it_learns_as_on_one_machine(
    slurm: Slurm, tmp_path: Path
) -> None:
    launch = Launched(slurm, tmp_path / "run", TOPOLOGY)
    assert "queued as job" in launch()
    launch.until(lambda: launch.published() >= 2)
    state = launch()
    assert "RUNNING" in state
    assert "grpo-infer" in state

    node = launch.slurm.run("squeue", "--noheader", "--format=%N", "--name=run").split()[-1]
    lost = launch.slurm.run("scontrol", "show", "hostnames", node).split()[-1]
    launch.slurm.lose(lost)
    launch.until(lambda: "RUNNING" not in launch.slurm.run("squeue", "--noheader", "--format=%T"))
    before = launch.published()
    launch.until(lambda: launch.published() >= before + 2)
    assert lost not in launch.slurm.run("squeue", "--noheader", "--format=%N")

    job = launch.slurm.run("squeue", "--noheader", "--format=%i").split()[0].partition("+")[0]
    launch.slurm.run("scancel", "--batch", "--signal=USR1", job)  # as Slurm does before its time is over
    launch.until(lambda: "with a checkpoint" in launch.logs() or "checkpoint of step" in launch.logs())
    launch.until(lambda: (launch.folder / "summary.json").exists())
    launch.until(lambda: not launch.slurm.run("squeue", "--noheader"))

    summary = json.loads((launch.folder / "summary.json").read_text())
    assert summary["steps"] == NUM_STEPS
    records = [json.loads(line) for line in (launch.folder / "metrics.jsonl").read_text().splitlines()]
    rewards = {one["progress/step"]: one["reward/mean"] for one in records if "reward/mean" in one}
    assert sorted(rewards) == list(range(1, NUM_STEPS + 1))
    assert rewards[NUM_STEPS] > rewards[1]
    assert "done its" in launch()
    launch.until(lambda: not launch.slurm.processes())


def test_a_run_with_environments_apart_that_is_stopped_leaves_nothing_behind(slurm: Slurm, tmp_path: Path) -> None:
    launch = Launched(slurm, tmp_path / "run", TOPOLOGY | {"env": {"replicas": 1, "cpus": 2}})
    launch()
    launch.until(lambda: launch.published() >= 1)
    assert "a session has begun" in (launch.folder / "logs" / "env.0.log").read_text()
    launch("--stop")
    launch.until(lambda: not launch.slurm.run("squeue", "--noheader") and not launch.slurm.processes())
