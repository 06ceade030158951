"""`grpo-train` with `gpus: 2` as processes: what becomes of all of them when one ends."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo.transport.batches.filesystem import BatchSender
from grpo.transport.errors import START_AGAIN
from grpo.transport.run import RunFolder, create_run
from grpo.transport.status import read_status

from tests.support import runs, until, until_gone
from tests.trainer.forked import Forked, forked
from tests.trainer.models import tiny_batch

ARGUMENTS = ["--gpus", "2", "--device", "cpu", "--recipe", "fp32"]
ARGUMENTS += ["--num_threads", "1", "--sequence_len", "128", "--wait_timeout_s", "240"]


def status(run: RunFolder, rank: int) -> dict[str, Any]:
    return read_status(run.status / ("train.json" if rank == 0 else f"train.rank_{rank}.json")) or {"state": "none"}


@contextmanager
def trainer(model: Path, tmp_path: Path) -> Iterator[tuple[Forked, RunFolder]]:
    """What has launched two ranks, which wait for their first batch. It runs as a job scheduler would start it, with
    variables that look like torchrun's."""
    run = create_run(tmp_path / "run")
    arguments = [*ARGUMENTS, "--model", str(model), "--output_dir", str(run.path), "--run_id", run.run_id]
    job = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "1"}
    with forked(tmp_path / "logs", arguments, **job) as launcher:
        until(
            lambda: all(status(run, rank)["state"] == "waiting" for rank in (0, 1)),
            launcher.process,
            log=lambda: launcher.stderr,
        )
        yield launcher, run


def last_error(errors: str) -> str:
    return [line for line in errors.splitlines() if line.startswith("error: ")][-1]


def test_a_rank_that_is_killed_ends_the_others_and_is_named(tiny_model: Path, tmp_path: Path) -> None:
    with trainer(tiny_model, tmp_path) as (launcher, run):
        pids = [status(run, rank)["pid"] for rank in (0, 1)]
        os.kill(pids[1], signal.SIGKILL)
        assert launcher.end() == START_AGAIN
        assert all(named in last_error(launcher.stderr) for named in ("rank 1", str(pids[1]), "SIGKILL"))
        assert "rank 1" in status(run, 0)["message"]
        assert not any(map(runs, pids))


def test_a_rank_that_fails_ends_the_others_with_its_own_error(tiny_model: Path, tmp_path: Path) -> None:
    with trainer(tiny_model, tmp_path) as (launcher, run):
        batches = (tiny_batch((6, 9), run_id=run.run_id), tiny_batch((129,), run_id=run.run_id, rank=1))
        with BatchSender(run.batches, run_id=run.run_id, num_ranks=2) as sender:
            sender.send(1, [[batch] for batch in batches])
            assert launcher.end() == 1
        assert all(named in last_error(launcher.stderr) for named in ("rank 1", "step 1", "129"))
        assert "rank 1" in status(run, 0)["message"]


def test_ranks_whose_launcher_is_killed_do_not_stay_behind(tiny_model: Path, tmp_path: Path) -> None:
    with trainer(tiny_model, tmp_path) as (launcher, run):
        pids = [status(run, rank)["pid"] for rank in (0, 1)]
        launcher.process.kill()
        until_gone(pids)
