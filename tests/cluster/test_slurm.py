"""`grpo launch quickstart --on slurm` on a real Slurm: the trainer on two machines, over gloo, the others on one each.

The machines are names of this one, each with a slurmd of its own; their processes reach each other by addresses only.
"""

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from grpo.configs.run import load_run
from grpo.deploy.slurm import script
from grpo.transport.folders import steps_in

from tests.cluster.slurm import CPUS, Slurm, missing
from tests.e2e.runs import Run, done, told
from tests.support import until

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.e2e,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(missing()), reason=f"Slurm is not installed here: no {', '.join(missing())}"),
    pytest.mark.skipif(os.getuid() != 0, reason="Slurm's machines are started by root here"),
]
NUM_STEPS = 12
"""So many that the run is not over before it has lost a machine, which was after step 2 on a busy machine."""
TOPOLOGY = {
    "infer": {"cpus": CPUS},
    "train": {"nodes": 2, "cpus": CPUS},
    "env": {"replicas": 1, "cpus": 2},
    "slurm": {"time": "20"},
    "slurm_notice_s": 60,
}


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    cluster = Slurm(tmp_path_factory.mktemp("slurm"), num_nodes=6)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


class Launched:
    """`grpo launch` with one run's settings, given again and again."""

    def __init__(self, slurm: Slurm, folder: Path) -> None:
        self.slurm, self.run = slurm, Run(folder)
        self.words = ["quickstart", "--on", "slurm", "--output_dir", str(folder), "--device", "cpu"]
        self.words += ["--max_steps", str(NUM_STEPS), "--orch.batch_size", "64", "--orch.eval.num_examples", "0"]
        self.words += ["--train.num_threads", "1", "--infer.num_threads", "1", "--train.ckpt.interval", "1"]
        self.words += ["--topology", json.dumps(TOPOLOGY)]

    def __call__(self, *more: str) -> str:
        """What it prints."""
        secrets = {"VLLM_API_KEY": "a-secret-of-this-test", "GRPO_ENV_KEY": "another-secret-of-this-test"}
        variables = self.slurm.environment | secrets | {"OMP_NUM_THREADS": "1"}
        return done("launch", *self.words, *more, variables=variables)

    def published(self) -> int:
        return max(steps_in(self.run.folder / "broadcasts"), default=-1)

    def num_starts(self) -> int:
        """How often the orchestrator has found its environment."""
        log = self.run.folder / "logs" / "env.0.log"
        return log.read_text().count("a session has begun") if log.exists() else 0

    def queued(self, column: str) -> list[str]:
        """Of all jobs, or their parts."""
        return self.slurm.run("squeue", "--noheader", f"--format={column}").split()

    def until(self, there: Callable[[], object]) -> None:
        until(there, log=self.logs)

    def logs(self) -> str:
        files = sorted((self.run.folder / "logs").glob("*.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in files)


def test_a_run_whose_time_is_cut_short_and_that_loses_a_machine_comes_to_its_end(slurm: Slurm, tmp_path: Path) -> None:
    launch = Launched(slurm, tmp_path / "run")
    assert "queued as job" in launch()
    job = launch.queued("%i")[0].partition("+")[0]
    launch.until((launch.run.folder / "status" / "orch.json").exists)
    state = launch()  # while the server starts
    assert "RUNNING" in state
    assert "grpo-orch" in state
    launch.until(lambda: launch.published() >= 1)
    slurm.run("scancel", "--batch", "--signal=USR1", job)  # as Slurm does before its time is over
    launch.until(lambda: "told to end (SIGUSR1); its checkpoint of step" in launch.logs())
    launch.until(lambda: launch.num_starts() > 1)

    node = slurm.run("squeue", "--noheader", "--format=%N", "--name=run").split()[-1]
    lost = slurm.run("scontrol", "show", "hostnames", node).split()[-1]
    before = launch.num_starts()
    slurm.lose(lost)
    launch.until(lambda: launch.num_starts() > before)
    assert not any(lost in nodes for nodes in launch.queued("%N"))
    launch.until(lambda: not launch.queued("%i"))

    assert launch.run.summary["steps"] == NUM_STEPS
    assert [line["progress/step"] for line in launch.run.steps] == list(range(1, NUM_STEPS + 1))
    assert "done its" in launch()
    assert "gone without a word" not in told("status", launch.run.folder)
    launch.until(lambda: not slurm.processes())


def test_a_run_that_is_stopped_leaves_nothing_behind(slurm: Slurm, tmp_path: Path) -> None:
    launch = Launched(slurm, tmp_path / "run")
    launch()
    launch.until((launch.run.folder / "run.json").exists)
    launch("--stop")
    launch.until(lambda: not launch.queued("%i") and not slurm.processes())


def test_sbatch_reads_folders_and_values_whole(slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here := tmp_path / "my run's #1, 100%").mkdir()
    monkeypatch.chdir(here)
    folder, comment = here / 'out "x" $HOME', "a; b #c"
    topology = {"slurm": {"time": "5", "comment": comment}}
    words = ["--device", "cpu", "--output_dir", str(folder), "--topology", json.dumps(topology)]
    text = script(load_run("quickstart", words), "quickstart", words)
    (folder / "logs").mkdir(parents=True)
    file = tmp_path / "job.sh"
    file.write_text(re.sub(r"^exec .*$", "pwd; squeue --noheader --format=%k", text, flags=re.MULTILINE))
    slurm.run("sbatch", str(file))
    until(lambda: not slurm.run("squeue", "--noheader"))
    assert (folder / "logs/slurm.log").read_text().splitlines() == [str(here), *[comment] * 3]
