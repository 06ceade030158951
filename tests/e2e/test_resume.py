"""A run that was interrupted goes back to an earlier step and comes to its end, with the real vLLM. That runs which are
killed go on where they stood: tests/chaos."""

import signal
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from tests.chaos.launched import MODULES, Launched
from tests.e2e.held import held
from tests.e2e.runs import Run
from transport.checkpoints import Checkpoints
from transport.run import RunFolder, current_run_id

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]
BATCH_SIZE = 32
NUM_STEPS = 7
OPTIONS = ("--max_steps", str(NUM_STEPS), "--train.ckpt.interval", "2", "--train.ckpt.keep_last", "null")


def check(run: Run, *, num_steps: int) -> None:
    """Every rollout has one fate, and every step its own rollouts."""
    with closing(sqlite3.connect(run.folder / "ledger.sqlite")) as database:
        rows = database.execute("SELECT state, reason, step FROM rollouts").fetchall()
    trained = Counter(step for state, _, step in rows if state == "trained")
    assert trained == dict.fromkeys(range(1, num_steps + 1), BATCH_SIZE)
    assert {state for state, _, _ in rows} <= {"trained", "dropped"}
    assert {reason for state, reason, _ in rows if state == "dropped"} <= {"restarted", "superseded", "run_ended"}
    assert [line["progress/step"] for line in run.steps] == list(range(1, num_steps + 1))
    summary = run.summary
    assert summary["versions_served"][-1] == summary["steps"] == num_steps
    assert summary["rollouts_trained"] == num_steps * BATCH_SIZE
    assert summary["canary_max_abs"] < 1e-4


def test_a_run_that_ctrl_c_has_ended_goes_back_to_a_step_and_on_to_its_end(tmp_path: Path) -> None:
    run, gate = Run(tmp_path / "run"), tmp_path / "gate"
    # It stands still before its last steps until it is interrupted.
    options = (*held(gate, free=5 * BATCH_SIZE), *OPTIONS)
    with closing(Launched(run.folder, *options)) as launched:
        launched.until(lambda: (run.folder / "broadcasts/step_000004/STABLE").exists())
        launched.launcher.send_signal(signal.SIGINT)
        code, errors = launched.end()
    assert (code, errors.splitlines()[-1]) == (130, "ended by SIGINT")
    for role in MODULES:
        assert "Traceback" not in (run.folder / "logs" / f"{role}.log").read_text()
    run_id = current_run_id(run.folder)
    assert run_id is not None
    checkpoints = Checkpoints(RunFolder(path=run.folder, run_id=run_id))
    assert 2 in checkpoints.steps()
    gate.touch()

    with closing(Launched(run.folder, *options, "--resume_step", "2")) as launched:
        code, errors = launched.end()
    assert code == 0, errors
    check(run, num_steps=NUM_STEPS)
    assert current_run_id(run.folder) == run_id
    assert {2, NUM_STEPS} <= set(checkpoints.steps())
    [aside] = (run.folder / "superseded").iterdir()
    assert sorted(path.name for path in (aside / "broadcasts").iterdir())[-1] >= "step_000004"


def test_ctrl_c_while_programs_start_ends_all_of_them(tmp_path: Path) -> None:
    with closing(Launched(tmp_path / "run")) as launched:
        launched.until(lambda: all(launched.program(role) for role in MODULES))
        launched.launcher.send_signal(signal.SIGINT)
        code, errors = launched.end()
    assert (code, errors.splitlines()[-1]) == (130, "ended by SIGINT")
