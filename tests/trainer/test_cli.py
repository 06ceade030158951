"""`grpo-train` as a process: its exit codes and last words."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from grpo.trainer import memory
from grpo.trainer.cli import main
from grpo.trainer.errors import ExporterGone
from grpo.trainer.loop import Trainer
from grpo.transport.cores import NUMERIC_DEFAULTS
from grpo.transport.errors import START_AGAIN
from grpo.transport.status import read_status

from tests.support import until
from tests.trainer.forked import forked, forks
from tests.trainer.models import save_tiny_model

ARGUMENTS = ["--device", "cpu", "--recipe", "fp32", "--num_threads", "1"]


def test_a_missing_model_ends_with_status_1_before_a_run_is_founded(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "grpo.trainer.cli", *ARGUMENTS, "--model", str(tmp_path / "none")]
    command += ["--output_dir", str(tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert str(tmp_path / "none") in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_signal_while_waiting_ends_the_trainer_at_once(tmp_path: Path) -> None:
    model, output = save_tiny_model(tmp_path / "model"), tmp_path / "out"
    with forked(tmp_path / "logs", [*ARGUMENTS, "--model", str(model), "--output_dir", str(output)]) as trainer:
        until(
            lambda: (read_status(output / "status" / "train.json") or {}).get("state") == "waiting",
            trainer.process,
            log=lambda: trainer.stderr,
        )
        assert trainer.process.pid is not None
        os.kill(trainer.process.pid, signal.SIGTERM)
        assert trainer.end() == 143  # it would have waited for its batch far longer


AT_START = """
import os, sys
import grpo.trainer.cli as cli
def run(settings, **_):
    from grpo.transport.cores import NUMERIC_DEFAULTS
    print("torch" in sys.modules, [os.environ[name] for name in NUMERIC_DEFAULTS], flush=True)
cli._run = run
cli.main()
"""


def test_threads_wait_passively_and_caches_are_bounded_unless_the_user_says_otherwise() -> None:
    ours = {name: value for name, value in os.environ.items() if name not in NUMERIC_DEFAULTS}
    command = [sys.executable, "-c", AT_START, "--model", "m"]
    for given, shown in ({}, [*NUMERIC_DEFAULTS.values()]), ({"LRU_CACHE_CAPACITY": "7"}, ["passive", "128", "7"]):
        done = subprocess.run(command, env={**ours, **given}, capture_output=True, text=True, check=True)
        assert done.stdout == f"False {shown}\n"


def _main_of_a_trainer_that_raises(error: type[Exception], arguments: list[str]) -> None:
    def fail(*_: object) -> None:
        raise error("CUDA out of memory, or the server ended")

    Trainer.train = fail  # type: ignore[method-assign, assignment]
    memory.checkpointing_kinds = lambda *_: ("none", "full")
    sys.argv = ["grpo-train", *arguments]
    main()


@pytest.mark.parametrize(
    ("error", "statuses"), [(ExporterGone, [START_AGAIN]), (torch.OutOfMemoryError, [START_AGAIN, 1])]
)
def test_a_trainer_that_goes_on_when_it_is_started_again_has_not_failed(
    tmp_path: Path, error: type[Exception], statuses: list[int]
) -> None:
    """Out of memory it keeps less at the next start, until there is nothing less to keep."""
    model, output = save_tiny_model(tmp_path / "model"), tmp_path / "out"
    arguments = [*ARGUMENTS, "--model", str(model), "--output_dir", str(output)]
    for status in statuses:
        process = forks().Process(target=_main_of_a_trainer_that_raises, args=(error, arguments))
        process.start()
        process.join(120)
        assert process.exitcode == status
        assert ((read_status(output / "status" / "train.json") or {})["state"] == "failed") == (status == 1)
